"""Fixtures of registries: docker-registry where it is installed, and the lab's small registry."""

from collections.abc import Iterator

import pytest

from treenail_lab.registry.front import FaultKind, RegistryFault
from treenail_lab.registry.service import PULLER, PUSHER, RegistryService, find_docker_registry

__all__ = ["PULLER", "PUSHER", "FaultKind", "RegistryFault", "RegistryService"]

needs_docker_registry = pytest.mark.skipif(
    find_docker_registry() is None,
    reason="docker-registry is not installed: install the package docker-registry",
)


@pytest.fixture(
    params=[
        pytest.param(True, id="docker-registry", marks=needs_docker_registry),
        pytest.param(False, id="small-registry"),
    ]
)
def any_registry(request: pytest.FixtureRequest) -> Iterator[RegistryService]:
    """Run the test on docker-registry, and again on the lab's small registry."""
    with RegistryService(is_real=request.param) as service:
        yield service


@pytest.fixture
def real_registry() -> Iterator[RegistryService]:
    """Start docker-registry, or skip the test where it is not installed."""
    if find_docker_registry() is None:
        pytest.skip("docker-registry is not installed: install the package docker-registry")
    with RegistryService(is_real=True) as service:
        yield service


@pytest.fixture
def lab_registry() -> Iterator[RegistryService]:
    """Start docker-registry where it is installed, and the lab's small registry elsewhere."""
    with RegistryService() as service:
        yield service
