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

import logging

import pytest

from tests.records import write_record
from tests.simulation.faults import AFTER, BEFORE, FAULTS, FaultAt
from tests.simulation.rollout import Rollout, SimulatedCluster
from treenail.controllers.rollout.controller import RESTORED_WAIT_S

log = logging.getLogger(__name__)

COMMAND = "make test-long ARGS=tests/simulation/test_lying_cluster.py"
START_S, END_S, LIMIT_S = 20.0, 15.0, 1800.0
RESYNC_S = max(61.0, RESTORED_WAIT_S + 5.0)
WRITES_FACTOR = 2
WRITES_MORE = 20

FAMILIES = {
    "crash or power cut": [name for name in FAULTS if name.startswith(("crash", "power"))],
    "lost request or answer": ["connection refused", "answer lost", "504 after the write",
                               "garbage after the write"],
    "rejected request": ["409", "410", "422", "500", "503", "429 for 7 s",
                         "another client writes first"],
    "outage": ["outage of 15 s", "outage of 100 s", "process is cut off for 100 s",
               "429 for all for 30 s", "500 for all for 30 s"],
    "expired credentials": ["credentials expired for 90 s", "forbidden for 90 s"],
    "stopped process, two leaders": [name for name in FAULTS if name.startswith("process stops")],
    "etcd restored": [name for name in FAULTS if name.startswith("etcd")],
    "clock jump": [name for name in FAULTS if name.startswith("clock")],
    "stale, late, missed and repeated events": [
        "watches held for 60 s", "all watches held for 200 s", "events up to 20 s late",
        "all events up to 20 s late", "events twice",
        "changes of 60 s never seen", "history compacted", "stale reads for 20 s",
    ],
}  # fmt: skip

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
    points, problems = roll_out(shared)
    assert problems == []
    return points


def roll_out(
    shared: SimulatedCluster, fault: str = "", number: int = -1, *, usual: int = 1000
) -> tuple[list[str], list[str]]:
    """Run a rollout with a fault at a write; return its writes, and what did not hold."""
    run = Rollout(shared)
    with run:
        run.simulation.run_for(START_S)
        injected = FaultAt(run, fault, number)
        run.change_config()
        if not run.settle(limit_s=LIMIT_S):
            return injected.points, ["it did not converge", *run.list_unsettled(), *run.broken]
        # Agents report again what a list of their Node put in doubt, within a minute. The rollout
        # shows for some time that etcd was restored.
        run.simulation.run_for(RESYNC_S)
        written = len(injected.points)
        run.simulation.run_for(END_S)
        problems = [*run.broken, *run.list_unsettled()]
        problems += [f"{name} died: {error!r}" for name, error in run.simulation.deaths]
        if written > WRITES_FACTOR * usual + WRITES_MORE:
            problems.append(f"{written} writes instead of {usual}")
        problems += [f"written after the end: {each}" for each in injected.points[written:]]
        return injected.points[:written], problems


def find_problems(
    shared: SimulatedCluster, writes: list[str], cases: list[tuple[str, int]]
) -> list[str]:
    found = []
    for fault, number in cases:
        _, problems = roll_out(shared, fault, number, usual=len(writes))
        if problems:
            found.append(f"{fault} at write {number} ({writes[number]}): {'; '.join(problems)}")
    return found


def test_rollout_with_sampled_faults_converges(shared: SimulatedCluster, writes: list[str]) -> None:
    cases = [(fault, int(at * len(writes))) for fault, at in SAMPLE]

    assert find_problems(shared, writes, cases) == []


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
    cases = [(fault, number) for fault in FAMILIES[family] for number in range(len(writes))]
    problems = find_problems(shared, writes, cases)
    log.info(
        "%s: %d faults at %d writes: %d runs, %d with a problem",
        family,
        len(FAMILIES[family]),
        len(writes),
        len(cases),
        len(problems),
    )

    assert problems == []
    write_record(
        "cluster",
        what=f"{family}, at each write of a rollout over three nodes",
        count=len(cases),
        result="converged within maxUnavailable, with a true status and bounded writes",
        command=COMMAND,
    )
