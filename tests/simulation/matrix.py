"""The matrix of faults and writes: each fault at each write of a run.

In each run:

* the run settles: objects, statuses and machines are as the configuration says;
* at no event a rule of the run is broken;
* the fault costs a bounded number of writes, and after the end nothing is written.
"""

import logging
from collections.abc import Callable

from tests.records import write_record
from tests.simulation.faults import FAULTS, FaultAt
from tests.simulation.run import ClusterRun
from treenail.controllers.runtime.informer_set import RESTORED_WAIT_S

log = logging.getLogger(__name__)

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

MakeRun = Callable[[], ClusterRun]


def run_story(
    make_run: MakeRun, fault: str = "", number: int = -1, *, usual: int = 1000
) -> tuple[list[str], list[str]]:
    """Run a story with a fault at a write; return its writes, and what did not hold."""
    with make_run() as run:
        run.simulation.run_for(START_S)
        injected = FaultAt(run, fault, number)
        run.begin_story()
        if not run.settle(limit_s=LIMIT_S):
            return injected.points, ["it did not converge", *run.list_unsettled(), *run.broken]
        # Agents report again what a list of their Node put in doubt, within a minute. The rollout
        # shows for some time that etcd was restored. A process may lead for the first time then.
        run.simulation.run_for(run.cluster.faults.left_s + RESYNC_S)
        written = len(injected.points)
        run.simulation.run_for(END_S)
        problems = [*run.broken, *run.list_unsettled()]
        problems += [f"{name} died: {error!r}" for name, error in run.simulation.deaths]
        if written > WRITES_FACTOR * usual + WRITES_MORE:
            problems.append(f"{written} writes instead of {usual}")
        problems += [f"written after the end: {each}" for each in injected.points[written:]]
        return injected.points[:written], problems


def list_writes(make_run: MakeRun) -> list[str]:
    """Return the writes of a run without a fault, in which everything holds."""
    points, problems = run_story(make_run)
    assert not problems, "\n".join(problems)
    return points


def find_problems(make_run: MakeRun, writes: list[str], cases: list[tuple[str, int]]) -> list[str]:
    """Return what did not hold in runs with one fault at the write of a number each."""
    found = []
    for fault, number in cases:
        _, problems = run_story(make_run, fault, number, usual=len(writes))
        if problems:
            found.append(f"{fault} at write {number} ({writes[number]}): {'; '.join(problems)}")
    return found


def check_family(
    make_run: MakeRun, writes: list[str], family: str, *, where: str, result: str, command: str
) -> None:
    """Try each fault of a family at each write, and record that everything held."""
    cases = [(fault, number) for fault in FAMILIES[family] for number in range(len(writes))]
    problems = find_problems(make_run, writes, cases)
    log.info(
        "%s: %d faults at %d writes of %s: %d runs, %d with a problem",
        family, len(FAMILIES[family]), len(writes), where, len(cases), len(problems),
    )  # fmt: skip

    assert not problems, "\n".join(problems)
    write_record(
        "cluster", what=f"{family}, at each write of {where}", count=len(cases), result=result,
        command=command,
    )  # fmt: skip
