"""The fixtures of the API servers, the lab's and the real one."""

from tests.fixtures.clusters import (
    client,
    controllers,
    kubeconfig,
    lab_kubeconfig,
    objects,
    real_kubeconfig,
    real_objects,
    server,
    shared_kubeconfig,
)

__all__ = [
    "client",
    "controllers",
    "kubeconfig",
    "lab_kubeconfig",
    "objects",
    "real_kubeconfig",
    "real_objects",
    "server",
    "shared_kubeconfig",
]
