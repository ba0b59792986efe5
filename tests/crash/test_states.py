"""Every state that a crash of the agent may leave is recovered.

`make test` starts the agent on a sample of the states, `make test-long ARGS=tests/crash` on all of
them, at most `LONG_LIMIT` states of a power cut at each call. There each machine runs until it is
at rest, and the agent is then started again; a start on a machine that was well before ends that.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.crash.runs import NAMES, make_run
from tests.crash.scenarios import SCENARIOS
from tests.crash.states import CrashRun, CrashState
from tests.crash.stored import make_scratch_directory
from tests.daemon.walk_budget import spread
from tests.records import write_record

pytestmark = pytest.mark.limit(7200.0)

QUICK_LIMIT, QUICK_STARTS, QUICK_RUNS = 2, 30, 2
LONG_LIMIT = 160
TWIST_LIMIT, TWIST_RUNS = 12, 400
TWISTED = [name for name, scenario in SCENARIOS.items() if scenario.twists]


@cache
def open_run(name: str) -> tuple[CrashRun, TemporaryDirectory[str]]:
    # Unlike those of pytest, removed with the last reference.
    folder = make_scratch_directory()
    return make_run(name, Path(folder.name)), folder


def find_states(run: CrashRun, limit: int) -> list[CrashState]:
    states: list[CrashState] = []
    run.run(states.append, limit=limit)
    return states


def select_evenly(states: list[CrashState], count: int) -> Iterator[CrashState]:
    for index, number in enumerate(spread(len(states))):
        if index < count:
            yield states[number]


@pytest.mark.long("cancelled in its boot trial", "rolled back", "crashing agent", "two files")
@pytest.mark.parametrize("name", NAMES)
def test_sample_of_crash_states_is_recovered(name: str) -> None:
    run, _ = open_run(name)
    states = find_states(run, QUICK_LIMIT)
    assert len(states) > QUICK_STARTS
    wrong = {
        state.story: found
        for number, state in enumerate(select_evenly(states, QUICK_STARTS))
        if (found := run.check_state(state, until_rest=number < QUICK_RUNS))
    }
    assert wrong == {}


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_crash_state_is_recovered(name: str) -> None:
    run, _ = open_run(name)
    states = find_states(run, LONG_LIMIT)
    wrong = {
        state.story: found
        for state in select_evenly(states, len(states))
        if (found := run.check_state(state))
    }
    assert wrong == {}
    write_record(
        "crash",
        what=f"crash states of the agent: {name}",
        count=len(states),
        result="each start leaves the old or the new tree; all of them come to rest",
        command="make test-long ARGS=tests/crash/test_states.py",
    )


@pytest.mark.long
@pytest.mark.parametrize("name", TWISTED)
def test_machine_whose_checks_change_with_the_crash_keeps_one_target(name: str) -> None:
    run, _ = open_run(name)
    states = list(select_evenly(find_states(run, TWIST_LIMIT), TWIST_RUNS))
    wrong = {
        f"{state.story}, {twist.name}": found
        for twist in run.twists
        for state in states
        if (found := run.check_state(state, twist=twist))
    }
    assert wrong == {}
    write_record(
        "crash",
        what=f"crash states after which health checks change: {name}",
        count=len(states) * len(run.twists),
        result="each machine ends at one target, and keeps it in a reboot",
        command="make test-long ARGS=tests/crash/test_states.py",
    )
