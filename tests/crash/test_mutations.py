"""Calls of the agent whose omission a crash state shows.

Each flush, rename and ledger write of each scenario is left out once. A state shows it, or
`UNOBSERVED` says why no state can. A call that changes no state at all has nothing to flush in that
scenario: an earlier one flushed it. `tests.daemon.configuration.test_once_power_cut` takes out the
calls of the undo transaction alone, without the agent that repairs and repeats much of it.
"""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.crash.mutations import Trial, list_known_states, list_mutations, try_mutation
from tests.crash.runs import NAMES, make_run
from tests.crash.stored import make_scratch_directory
from tests.records import write_record

LIMIT = 12
UNOBSERVED: dict[str, str] = {}
"""Calls, as patterns of their names, and why leaving one out may show nowhere."""


def explain(name: str) -> str:
    """Return why no state needs to show that this call was left out; empty without a reason."""
    return next((why for pattern, why in UNOBSERVED.items() if fnmatchcase(name, pattern)), "")


@pytest.mark.long
@pytest.mark.limit(7200.0)
@pytest.mark.parametrize("name", NAMES)
def test_omitted_call_is_noticed_or_explained(name: str) -> None:
    with make_scratch_directory() as folder:
        run = make_run(name, Path(folder))
        known = list_known_states(run, LIMIT)
        trials = [
            (str(each), try_mutation(run, each, known, limit=LIMIT)) for each in list_mutations(run)
        ]
    missed = {call for call, trial in trials if is_missed(trial)}
    assert {call for call in missed if not explain(call)} == set()
    noticed = sum(bool(trial.notice) for _, trial in trials)
    without = sum(not trial.notice and not trial.states for _, trial in trials)
    write_record(
        "crash",
        what=f"flushes, renames and ledger writes, each left out: {name}",
        count=len(trials),
        result=f"{noticed} noticed, {without} had nothing to flush, "
        f"{len(trials) - noticed - without} explained in the test",
        command="make test-long ARGS=tests/crash/test_mutations.py",
    )


def is_missed(trial: Trial) -> bool:
    return bool(trial.states) and not trial.notice
