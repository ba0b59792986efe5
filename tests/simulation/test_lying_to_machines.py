"""A cluster that lies to the controller that lets new machines join.

Four machines join with access tokens, and three others try to use the same tokens: none of these
ever gets a certificate, and all four become members of their pool.
"""

import pytest

from tests.simulation.joining import Joining, JoiningCluster
from tests.simulation.matrix import FAMILIES, check_family, find_problems, list_writes

COMMAND = "make test-long ARGS=tests/simulation/test_lying_to_machines.py"
SAMPLE = (
    ("crash after the write", 0),
    ("crash of all after the write", 0),
    ("outage of 15 s", 14),
    ("409", 9),
    ("etcd restored 3 writes back", 8),
    ("etcd restored 3 writes back", 12),
    ("etcd restored 15 writes back", 9),
    ("clock jumps 1 h ahead", 1),
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> JoiningCluster:
    return JoiningCluster(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def writes(shared: JoiningCluster) -> list[str]:
    return list_writes(lambda: Joining(shared))


def test_machines_with_sampled_faults_join(shared: JoiningCluster, writes: list[str]) -> None:
    assert find_problems(lambda: Joining(shared), writes, list(SAMPLE)) == []


@pytest.mark.long
@pytest.mark.limit(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_machines_with_each_fault_at_each_write_join(
    shared: JoiningCluster, writes: list[str], family: str
) -> None:
    check_family(
        lambda: Joining(shared),
        writes,
        family,
        where="the joining of four machines",
        result="all join their pool, and no machine without a permitting token",
        command=COMMAND,
    )
