"""Calls of the agent whose omission a crash state shows.

Each flush, rename and ledger write of each run is left out once. A state shows it, or a table says
why none can. A call that changes no state at all has nothing to flush in that
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
UNOBSERVED = {
    "*NodeMetrics._write_samples > *": "each update writes the metrics again",
    "*StatusFile._write_document > *": "/run is empty after a power cut, and a start writes it",
    "*record_start > *": "/run is empty after a power cut",
    "*ConfigCache.fetch_config > *": "a lost or damaged config is read from the cluster again",
    "*ConfigCache.prune_cache > *": "the next update prunes the cache again",
    "*CrashRecordFile.remove_document > *": "the record of an update that ended is ignored",
    "fsync in CrashRecordFile.write_document > *": (
        "the ledger stands in for a lost record; only an agent that cannot read the ledger needs "
        "it, as in tests.daemon.reconcile.test_boot_trials"
    ),
    "replace in arm_crash_record > *": (
        "the ledger stands in for a missing record; only an agent that cannot read the ledger "
        "needs it, as in tests.daemon.reconcile.test_boot_trials"
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
    "replace in NodeConfiguration.confirm_pending > PendingChange.confirm_change > UndoLog.*": (
        "nothing undoes the change after the verdict, and NodeConfiguration.recover_interrupted "
        "confirms the change of an update that ended, with the same rename"
    ),
    "ledger write in phase staging in ActionRunner._plan_update > ActionRunner._begin_update": (
        "the Node still requests the target, so the start begins the update"
    ),
    "ledger write in phase staging in ActionRunner._plan_update > UpdateLedger.enter_phase": (
        "an update without its impact is planned again"
    ),
    "ledger write in phase staging in ActionRunner._run_update_action > *._stage_target": (
        "without its ID the staged deployment is known by its content"
    ),
    "ledger write in phase staging in ActionRunner._run_update_action > *._check_image": (
        "the start checks the image again"
    ),
    "ledger write in phase draining in ActionRunner._request_drain > UpdateLedger.enter_phase": (
        "the start requests the drain again, with the same token"
    ),
    "ledger write in phase applying in ActionRunner._apply_config > UpdateLedger.enter_phase": (
        "undo log and plan show whether the files are written"
    ),
    "ledger write in phase verifying in BootTrialRunner.verify_boot > UpdateLedger.enter_phase": (
        "a start in the phase before finds the target booted, and begins the trial again"
    ),
    "ledger write in phase verifying in ActionRunner.run_action > BootTrialRunner.verify_boot": (
        "it says that the API server answered, and there is no outage here; "
        "tests.daemon.reconcile.test_boot_trials has one after a restart"
    ),
    "ledger write in phase rolling-back in BootTrialRunner.roll_back > *._count_rollback": (
        "the count ends rollbacks that boot the target again; here each succeeds, and "
        "tests.daemon.reconcile.test_boot_trials has one that does not"
    ),
    "ledger write in phase rolling-back in *.count_start > CrashCounter._roll_back (2)": (
        "the count ends rollbacks that boot the target again; here each succeeds"
    ),
    "ledger write in phase cancelling in cancel_update > UpdateLedger.enter_phase": (
        "the start finds the same reason to cancel the update"
    ),
    "ledger write in phase uncordoning in ActionRunner._finish_verification > *": (
        "the start commits or applies again, which finds nothing left to do"
    ),
    "ledger write in phase none in ActionRunner._run_update_action > close_update": (
        "the start finds the Node uncordoned, and closes the update"
    ),
    "ledger write in phase none in ActionRunner._clear_record > unpin_retained": (
        "the deployment is unpinned again, which changes nothing"
    ),
    "ledger write in phase none in ActionRunner._clear_record > UpdateLedger.change_quarantine": (
        "the start decides about the quarantine again"
    ),
}
"""Calls, as patterns of their names, and why leaving one out shows in no state."""
NOTICED_IN = {
    "exchange in UndoTransaction.apply_changes > *": (
        "live config",
        "an update that fails or is rolled back ends with the old files in any case",
    ),
    "replace in UndoTransaction.apply_changes > UndoTransaction._put_entry > *": (
        "password",
        "an update that fails ends with the old files in any case",
    ),
    "fsync in Ledger.write_document > HostFiles.write_files > HostFiles._fsync_path": (
        "rolled back config",
        "the ledger is one write behind, and the start decides the same from machine and Node",
    ),
    "fsync in ShadowFile._write_line > HostFiles.write_files > HostFiles._fsync_path": (
        "password",
        "a later flush of /etc, or of all, flushes the password too",
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
    "fsync in UndoTransaction.discard_log > UndoLog.remove_log > UndoLog._fsync_directory": (
        "failed step",
        "undoing again removes only what another program wrote since, and none does here",
    ),
    "fsync in UndoTransaction.mark_pending > FsyncQueue.fsync_directories > *": (
        "two files",
        "without its image the machine has the old files in any case",
    ),
    "fsync in UndoTransaction.mark_pending > UndoTransaction.record_note > *": (
        "two files",
        "with more directories one flush of the file system has the note too",
    ),
    "fsync in UndoTransaction.mark_pending > UndoLog.move_log > UndoLog._fsync_directory": (
        "two files",
        "without its image the start undoes the files, by whichever name the log has",
    ),
    "fsync in _place_changes > UndoTransaction.apply_changes > UndoLog.append_record": (
        "config",
        "one changed file alone is old or new",
    ),
    "replace in CrashCounter._write_crashes > *": (
        "crashing agent",
        "elsewhere no agent crashes at each start",
    ),
    "ledger write in phase rebooting in ActionRunner._reboot_machine > UpdateLedger.enter_phase": (
        "two files",
        "pin_booted writes the phase too, before the deployment is unlocked",
    ),
}
"""Calls that one scenario needs, and why others may not show it."""


def is_explained(name: str, call: str) -> bool:
    """Return whether a table says why no state of this scenario shows that the call is missing."""
    elsewhere = (pattern for pattern, (shown, _) in NOTICED_IN.items() if shown != name)
    return any(fnmatchcase(call, pattern) for pattern in (*UNOBSERVED, *elsewhere))


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
    for pattern, (shown, _) in NOTICED_IN.items():
        calls = [trial for call, trial in trials if fnmatchcase(call, pattern)]
        assert shown != name or any(each.notice for each in calls), f"not noticed: {pattern}"
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
