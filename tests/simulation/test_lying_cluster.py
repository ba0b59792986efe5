"""A cluster that lies: each fault at each write of a rollout.

The matrix has each pair of one fault of `tests.simulation.faults` and one write of agents and
controllers during a rollout over three nodes. In each run:

* the rollout converges: objects, statuses and machines are as the config says;
* at no event more nodes are out of service than ``maxUnavailable``;
* no status is untrue: neither that of an updated node nor that of an updated pool;
* the fault costs a bounded number of writes, and after the rollout nothing is written.

Events of one kind are never reordered and never lost in an open watch, because the API server does
neither: the watches of different kinds and processes overtake each other, and changes are missed
between a watch and the next list.
"""

import pytest

from tests.simulation.faults import AFTER, BEFORE
from tests.simulation.matrix import FAMILIES, check_family, find_problems, list_writes
from tests.simulation.rollout import Rollout, SimulatedCluster

COMMAND = "make test-long ARGS=tests/simulation/test_lying_cluster.py"

SAMPLE = (
    ("crash after the write", 0.33),
    ("answer lost", 0.06),
    ("process is cut off for 100 s", 0.15),
    ("etcd restored 3 writes back", 0.37),
    ("changes of 60 s never seen", 0.3),
)
"""Faults, and where in the sequence of writes."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> SimulatedCluster:
    return SimulatedCluster(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def writes(shared: SimulatedCluster) -> list[str]:
    """The writes of a rollout without a fault."""
    return list_writes(lambda: Rollout(shared))


def test_rollout_with_sampled_faults_converges(shared: SimulatedCluster, writes: list[str]) -> None:
    cases = [(fault, int(at * len(writes))) for fault, at in SAMPLE]

    assert find_problems(lambda: Rollout(shared), writes, cases) == []


def test_families_have_each_fault_once() -> None:
    assert sorted(name for names in FAMILIES.values() for name in names) == sorted(
        {*BEFORE, *AFTER}
    )


@pytest.mark.long
@pytest.mark.limit(86_400)
@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_with_each_fault_at_each_write_converges(
    shared: SimulatedCluster, writes: list[str], family: str
) -> None:
    check_family(
        lambda: Rollout(shared),
        writes,
        family,
        where="a rollout over three nodes",
        result="converged within maxUnavailable, with a true status and bounded writes",
        command=COMMAND,
    )
