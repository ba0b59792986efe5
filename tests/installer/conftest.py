"""The fixtures of the API servers, the lab's and the real one."""

from tests.cluster_fixtures import (
    controllers,
    kubeconfig,
    lab_kubeconfig,
    objects,
    real_kubeconfig,
    real_objects,
    shared_kubeconfig,
)

__all__ = (
    "controllers",
    "kubeconfig",
    "lab_kubeconfig",
    "objects",
    "real_kubeconfig",
    "real_objects",
    "shared_kubeconfig",
)
