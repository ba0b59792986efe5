"""A cluster of one API server and one kubelet, without machines."""

from collections.abc import Iterator

import pytest

from tests.lab.kubelet.cluster import ContainerCluster
from treenail_lab.kubelet.runtime import find_refusal
from treenail_lab.lifetime.owner import owner


@pytest.fixture(scope="package")
def containers() -> Iterator[ContainerCluster]:
    """A cluster that runs containers; skip where this host cannot."""
    if why := find_refusal():
        pytest.skip(why)
    with owner.temporary_directory() as directory, ContainerCluster(directory) as cluster:
        yield cluster
