"""A cluster that lies to the controller that completes an installation in image mode.

The final registry has the image before a node must drop the registry of the bootstrap host, and
before the logins of that registry leave the cluster.
"""

import pytest

from tests.simulation.handing_over import HandingOver, HandoverCluster
from tests.simulation.matrix import FAMILIES, check_family, find_problems, list_writes

COMMAND = "make test-long ARGS=tests/simulation/test_lying_to_installation.py"
SAMPLE = (
    ("crash before the write", 13),
    ("outage of 15 s", 1),
    ("etcd restored 3 writes back", 1),
    ("etcd restored 15 writes back", 8),
    ("etcd restored 15 writes back, with higher versions", 10),
    ("watches held for 60 s", 4),
    ("all events up to 20 s late", 0),
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> HandoverCluster:
    return HandoverCluster(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def writes(shared: HandoverCluster) -> list[str]:
    return list_writes(lambda: HandingOver(shared))


def test_handover_with_sampled_faults_completes(shared: HandoverCluster, writes: list[str]) -> None:
    assert find_problems(lambda: HandingOver(shared), writes, list(SAMPLE)) == []


@pytest.mark.long
@pytest.mark.limit(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_handover_with_each_fault_at_each_write_completes(
    shared: HandoverCluster, writes: list[str], family: str
) -> None:
    check_family(
        lambda: HandingOver(shared),
        writes,
        family,
        where="the hand-over of an installation",
        result="the image moves, the nodes drop the bootstrap registry, its logins are deleted",
        command=COMMAND,
    )
