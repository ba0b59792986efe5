"""The fixtures of the API servers, the lab's and the real one."""

from tests.fixtures.clusters import (
    controllers,
    kubeconfig,
    lab_kubeconfig,
    real_kubeconfig,
    shared_kubeconfig,
)

__all__ = ["controllers", "kubeconfig", "lab_kubeconfig", "real_kubeconfig", "shared_kubeconfig"]
