"""The fixtures of the API servers, the lab's and the real one."""

from tests.fixtures.clusters import controllers, kubeconfig, real_kubeconfig

__all__ = ["controllers", "kubeconfig", "real_kubeconfig"]
