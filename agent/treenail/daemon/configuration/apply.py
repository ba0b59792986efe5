"""Every step of a plan, or none: also when the power goes in between."""

import logging
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from itertools import pairwise

from treenail.daemon.configuration.step_runner import StepRunner
from treenail.errors import RollbackError, StepError, TreenailError
from treenail.host.rollback.prepare import PathChange
from treenail.update.steps.steps import (
    ConfigStep,
    DisableUnits,
    EnableUnits,
    FileStep,
    MakeLink,
    PresetUnits,
    ReloadDaemon,
    ReloadUnit,
    RemoveEntry,
    RestartUnit,
    RestoreEntry,
    SetPassword,
    list_undo_steps,
)

log = logging.getLogger(__name__)

_SYSTEMD_DIRECTORY = "/etc/systemd/"


class RecoveryOutcome(StrEnum):
    """What became of a plan that was cut short."""

    UNDONE = "undone"
    CONFIRMED = "confirmed"


def apply_steps(
    steps: Sequence[ConfigStep],
    runner: StepRunner,
    *,
    verify: Callable[[], None] = lambda: None,
    owner: str = "",
) -> None:
    """Return once all of it is done and verified, for good.

    With an ``owner`` it is held instead: done, and the owner says later what becomes of it.

    Raises `StepError` that names the step which failed, all others being undone; `RollbackError`
    that lists what is left when undoing failed, too; `recover_interrupted` then tries that again. While that
    is to be done, `LedgerError`.
    """
    if not steps:
        return
    runner.undo.ensure_none_interrupted()
    runner.check_owners(steps)
    progress = _ApplyProgress(steps[0])
    try:
        for batch in _split_batches(steps):
            _run_batch(batch, runner, progress)
        progress.description = "verify what was done"
        verify()
        if owner:
            runner.undo.mark_pending(owner)
        else:
            runner.undo.commit_changes()
    except TreenailError as error:
        begun = steps[: steps.index(progress.step) + 1]
        log.warning("undoing %d steps: can't %s", len(begun), progress)
        for each in list_undo_steps(begun):
            log.debug("undoing: %s", each)
        _undo_failed(progress, error, runner)


def recover_interrupted(runner: StepRunner) -> RecoveryOutcome | None:
    """Finish what a crash cut short: all is as before the plan, or as after it.

    None when nothing was cut short. Raises `RollbackError`, and `LedgerError` when the log can't be
    read. To be called before anything else is done to the machine.
    """
    runner.pending.finish_confirm()
    left = runner.undo.find_interrupted()
    if left is None:
        return None
    _raise_if_failed(_undo_logged(runner))
    if left.is_committed:
        return RecoveryOutcome.CONFIRMED
    log.info("undid a change that was cut short")
    return RecoveryOutcome.UNDONE


def restore_pending(runner: StepRunner, *, is_booted: bool = False) -> None:
    """Undo what is held, for good; nothing happens when nothing is.

    ``is_booted``: with what is held, so that systemd has read its units. Raises `RollbackError`, and
    what `StepRunner.reload_and_start` raises; it can be called again.
    """
    left = runner.pending.find_interrupted()
    if left is None:
        return
    failed = runner.pending.undo_changes() + runner.undo_notes(left.notes)
    _raise_if_failed(failed)
    # What is wanted and not running is started, also what has run to its end: only where it must.
    if is_booted and any(place.startswith(_SYSTEMD_DIRECTORY) for place in left.paths):
        runner.reload_and_start()
    runner.pending.discard_log()
    log.info("files, units and users are as they were before")


class _ApplyProgress:
    """Which step is being carried out, or what comes after the last one."""

    def __init__(self, step: ConfigStep) -> None:
        self.step = step
        self.description = ""

    def __str__(self) -> str:
        return self.description or str(self.step)


def _run_batch(batch: Sequence[ConfigStep], runner: StepRunner, progress: _ApplyProgress) -> None:
    progress.step = step = batch[0]
    match step:
        case EnableUnits() | DisableUnits() | PresetUnits():
            _place_changes(
                [(step, change) for change in runner.compute_link_changes(step)], runner, progress
            )
            runner.change_enablement(step)
        case SetPassword():
            runner.set_password(step)
        case ReloadDaemon() | ReloadUnit() | RestartUnit():
            runner.notify_service(step)
        case _:
            changes = []
            for each in batch:
                if isinstance(each, FileStep):
                    progress.step = each
                    changes += [(each, change) for change in runner.compute_changes(each)]
            _place_changes(changes, runner, progress)
    for each in batch:
        log.debug("done: %s", each)


def _place_changes(
    changes: Sequence[tuple[ConfigStep, PathChange]], runner: StepRunner, progress: _ApplyProgress
) -> None:
    if not changes:
        return
    undo = runner.undo
    try:
        undo.apply_changes([change for _, change in changes])
    except TreenailError:
        steps = {change.path: step for step, change in changes}
        progress.step = steps.get(undo.current_path, progress.step)
        raise


def _split_batches(steps: Sequence[ConfigStep]) -> Iterator[Sequence[ConfigStep]]:
    """Steps that change paths together, but what makes room before what needs it.

    A hard link comes after its file, which may be new.
    """
    begun = 0
    for number, (step, following) in enumerate(pairwise([*steps, None]), start=1):
        together = isinstance(step, FileStep) and isinstance(following, FileStep)
        room_made = isinstance(step, RemoveEntry | RestoreEntry) and not isinstance(
            following, RemoveEntry | RestoreEntry
        )
        linked = isinstance(following, MakeLink) and following.is_hard
        if not together or room_made or linked:
            yield steps[begun:number]
            begun = number


def _undo_failed(progress: _ApplyProgress, error: TreenailError, runner: StepRunner) -> None:
    left = runner.undo.find_interrupted()
    if left is not None and left.is_committed:
        # It failed after the last line had been written: nothing is undone any more.
        log.warning("done, though the end of it failed: %s", error)
        _undo_logged(runner)
        return
    failed = _undo_logged(runner)
    if failed:
        raise RollbackError(
            f"can't {progress}: {error}; undoing what was done before failed, too, and this is "
            f"left: {'; '.join(failed)}",
            remedy=error.remedy or "mend what is listed; the next start tries again",
        ) from error
    raise StepError(
        f"can't {progress}: {error}; nothing is changed: the machine is as it was before",
        step=None if progress.description else progress.step,
        remedy=error.remedy,
    ) from error


def _raise_if_failed(failed: Sequence[str]) -> None:
    if failed:
        raise RollbackError(
            f"undoing a change that was cut short failed: {'; '.join(failed)}",
            remedy="mend what is listed; it is tried again",
        )


def _undo_logged(runner: StepRunner) -> tuple[str, ...]:
    """What could not be put back; when that is nothing, no later start tries it again."""
    left = runner.undo.find_interrupted()
    if left is None:
        runner.undo.discard_log()
        return ()
    failed = runner.undo.undo_changes()
    if left.is_committed:
        return failed
    failed += runner.undo_notes(left.notes)
    if not failed:
        runner.undo.discard_log()
    return failed
