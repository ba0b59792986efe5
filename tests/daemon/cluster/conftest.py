"""The fixtures of the API servers, the lab's and the real one."""

from tests.fixtures.clusters import client, server

__all__ = ["client", "server"]
