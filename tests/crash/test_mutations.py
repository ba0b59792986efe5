"""Calls of the agent whose omission a crash state shows.

Each flush, rename and ledger write of the runs in `TRIED` is left out once. A state shows it, or
a table says why none can. A call that changes no state at all has nothing to flush in that
scenario: an earlier one flushed it. `tests.daemon.configuration.test_once_power_cut` takes out the
calls of the undo transaction alone, without the agent that repairs and repeats much of it.
"""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.crash.mutations import Trial, list_known_states, list_mutations, try_mutation
from tests.crash.runs import make_run
from tests.crash.stored import make_scratch_directory
from tests.records import write_record

LIMIT = 12
TRIED = (
    "first boot",
    "first boot in image mode",
    "first boot with a repair",
    "drift",
    "live config",
)
"""The runs whose calls are all noticed or explained; the others were not tried to the end."""
UNOBSERVED = {
    "*NodeMetrics._write_samples > *": "each update writes the metrics again",
    "*StatusFile._write_document > *": "/run is empty after a power cut, and a start writes it",
    "*record_start > *": "/run is empty after a power cut",
    "*ConfigCache.fetch_config > *": "a lost or damaged config is read from the cluster again",
    "*ConfigCache.prune_cache > *": "the next update prunes the cache again",
    "*CrashRecordFile.remove_document > *": "the record of an update that ended is ignored",
    "*CrashRecordFile.write_document > *": (
        "it disarms the crash counter for one boot, and no agent here crashes at each start; "
        "tests.daemon.reconcile.test_bad_boots has those"
    ),
    "fsync in HostFiles.write_files > HostFiles._ensure_directory > *": (
        "what is lost with a new directory is written again; the undo log makes its directories "
        "with HostFiles.make_directory"
    ),
    "fsync in FirstBootRunner._reboot_into_staged > HostFiles.write_files > *": (
        "without its state the first boot stages again"
    ),
    "fsync in PendingChange.confirm_change > UndoLog.move_log > *": (
        "the ledger is at the commit before, so the next start confirms the change again"
    ),
    "ledger write in phase [!rv]*": (
        "the ledger is one write behind, and the start decides the same from machine and Node"
    ),
}
"""Calls, as patterns of their names, and why leaving one out shows in no state."""
NOTICED_IN = {
    "exchange in UndoTransaction.apply_changes > *": (
        "live config",
        "an update that fails or is rolled back ends with the old files in any case",
    ),
    "fsync in Ledger.write_document > HostFiles.write_files > HostFiles._fsync_path": (
        "rolled back config",
        "all phases but the rollback are decided again from the machine",
    ),
    "fsync in UndoTransaction.apply_changes > UndoTransaction._make_entry > *": (
        "live config",
        "a power cut before the reboot of an update undoes it, and a clean reboot flushes",
    ),
    "fsync in UndoTransaction.apply_changes > UndoTransaction._record_changes > *": (
        "config",
        "the flush of the next record flushes this one too, before a file is put to its path",
    ),
    "fsync in UndoTransaction._record_changes > UndoLog.append_record > *": (
        "live config",
        "nothing is in place yet that must be undone",
    ),
    "fsync in UndoTransaction.commit_changes > FsyncQueue.fsync_directories > *": (
        "first boot",
        "the replaced entries are removed, and their directories flushed, before the log goes",
    ),
    "fsync in UndoTransaction.commit_changes > UndoLog.append_commit > *": (
        "first boot",
        "without the last record the start undoes the change, and the agent applies it again",
    ),
    "fsync in _place_changes > UndoTransaction.apply_changes > UndoLog.append_record": (
        "config",
        "one changed file alone is old or new",
    ),
}
"""Calls that one scenario needs, and why others may not show it."""


def is_explained(name: str, call: str) -> bool:
    """Return whether a table says why no state of this scenario shows that the call is missing."""
    elsewhere = (pattern for pattern, (shown, _) in NOTICED_IN.items() if shown != name)
    return any(fnmatchcase(call, pattern) for pattern in (*UNOBSERVED, *elsewhere))


@pytest.mark.long
@pytest.mark.limit(7200.0)
@pytest.mark.parametrize("name", TRIED)
def test_omitted_call_is_noticed_or_explained(name: str) -> None:
    with make_scratch_directory() as folder:
        run = make_run(name, Path(folder))
        known = list_known_states(run, LIMIT)
        trials = [
            (str(each), try_mutation(run, each, known, limit=LIMIT)) for each in list_mutations(run)
        ]
    missed = {call: trial.states for call, trial in trials if is_missed(trial)}
    assert {call: n for call, n in missed.items() if not is_explained(name, call)} == {}
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
