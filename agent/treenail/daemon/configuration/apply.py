"""Every step of a plan, or none: also when the power goes in between."""

import logging
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from itertools import pairwise

from treenail.daemon.configuration.step_runner import Runner
from treenail.errors import RollbackError, StepError, TreenailError
from treenail.host.rollback.prepare import Change
from treenail.update.steps.steps import (
    Disable,
    Enable,
    MakeLink,
    Placing,
    Preset,
    ReloadDaemon,
    ReloadUnit,
    Remove,
    RestartUnit,
    Restore,
    SetPassword,
    Step,
    undoing,
)

log = logging.getLogger(__name__)

_UNITS = "/etc/systemd/"


class Recovery(StrEnum):
    """What became of a plan that was cut short."""

    UNDONE = "undone"
    CONFIRMED = "confirmed"


def apply(
    steps: Sequence[Step],
    runner: Runner,
    *,
    verify: Callable[[], None] = lambda: None,
    owner: str = "",
) -> None:
    """Return once all of it is done and verified, for good.

    With an ``owner`` it is held instead: done, and the owner says later what becomes of it.

    Raises `StepError` that names the step which failed, all others being undone; `RollbackError`
    that lists what is left when undoing failed, too; `recover` then tries that again. While that
    is to be done, `LedgerError`.
    """
    if not steps:
        return
    runner.undo.check()
    runner.check(steps)
    progress = _Progress(steps[0])
    try:
        for batch in _batches(steps):
            _carry_out(batch, runner, progress)
        progress.what = "verify what was done"
        verify()
        if owner:
            runner.undo.hold(owner)
        else:
            runner.undo.commit()
    except TreenailError as error:
        begun = steps[: steps.index(progress.step) + 1]
        log.warning("undoing %d steps: can't %s", len(begun), progress)
        for each in undoing(begun):
            log.debug("undoing: %s", each)
        _undo(progress, error, runner)


def recover(runner: Runner) -> Recovery | None:
    """Finish what a crash cut short: all is as before the plan, or as after it.

    None when nothing was cut short. Raises `RollbackError`, and `LedgerError` when the log can't be
    read. To be called before anything else is done to the machine.
    """
    runner.held.clean()
    left = runner.undo.left()
    if left is None:
        return None
    _refuse_if(_put_back(runner))
    if left.committed:
        return Recovery.CONFIRMED
    log.info("undid a change that was cut short")
    return Recovery.UNDONE


def put_back(runner: Runner, *, booted: bool = False) -> None:
    """Undo what is held, for good; nothing happens when nothing is.

    ``booted``: with what is held, so that systemd has read its units. Raises `RollbackError`, and
    what `Runner.boot_anew` raises; it can be called again.
    """
    left = runner.held.left()
    if left is None:
        return
    failed = runner.held.put_back() + runner.take_back(left.notes)
    _refuse_if(failed)
    # What is wanted and not running is started, also what has run to its end: only where it must.
    if booted and any(place.startswith(_UNITS) for place in left.places):
        runner.boot_anew()
    runner.held.forget()
    log.info("files, units and users are as they were before")


class _Progress:
    """Which step is being carried out, or what comes after the last one."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.what = ""

    def __str__(self) -> str:
        return self.what or str(self.step)


def _carry_out(batch: Sequence[Step], runner: Runner, progress: _Progress) -> None:
    progress.step = step = batch[0]
    match step:
        case Enable() | Disable() | Preset():
            _place([(step, change) for change in runner.enabling(step)], runner, progress)
            runner.enable(step)
        case SetPassword():
            runner.set_password(step)
        case ReloadDaemon() | ReloadUnit() | RestartUnit():
            runner.serve(step)
        case _:
            changes = []
            for each in batch:
                if isinstance(each, Placing):
                    progress.step = each
                    changes += [(each, change) for change in runner.changes(each)]
            _place(changes, runner, progress)
    for each in batch:
        log.debug("done: %s", each)


def _place(changes: Sequence[tuple[Step, Change]], runner: Runner, progress: _Progress) -> None:
    if not changes:
        return
    undo = runner.undo
    try:
        undo.place([change for _, change in changes])
    except TreenailError:
        steps = {change.path: step for step, change in changes}
        progress.step = steps.get(undo.at, progress.step)
        raise


def _batches(steps: Sequence[Step]) -> Iterator[Sequence[Step]]:
    """Steps that change paths together, but what makes room before what needs it.

    A hard link comes after its file, which may be new.
    """
    begun = 0
    for number, (step, following) in enumerate(pairwise([*steps, None]), start=1):
        together = isinstance(step, Placing) and isinstance(following, Placing)
        room_made = isinstance(step, Remove | Restore) and not isinstance(
            following, Remove | Restore
        )
        linked = isinstance(following, MakeLink) and following.hard
        if not together or room_made or linked:
            yield steps[begun:number]
            begun = number


def _undo(progress: _Progress, error: TreenailError, runner: Runner) -> None:
    left = runner.undo.left()
    if left is not None and left.committed:
        # It failed after the last line had been written: nothing is undone any more.
        log.warning("done, though the end of it failed: %s", error)
        _put_back(runner)
        return
    failed = _put_back(runner)
    if failed:
        raise RollbackError(
            f"can't {progress}: {error}; undoing what was done before failed, too, and this is "
            f"left: {'; '.join(failed)}",
            remedy=error.remedy or "mend what is listed; the next start tries again",
        ) from error
    raise StepError(
        f"can't {progress}: {error}; nothing is changed: the machine is as it was before",
        step=None if progress.what else progress.step,
        remedy=error.remedy,
    ) from error


def _refuse_if(failed: Sequence[str]) -> None:
    if failed:
        raise RollbackError(
            f"undoing a change that was cut short failed: {'; '.join(failed)}",
            remedy="mend what is listed; it is tried again",
        )


def _put_back(runner: Runner) -> tuple[str, ...]:
    """What could not be put back; when that is nothing, no later start tries it again."""
    left = runner.undo.left()
    if left is None:
        runner.undo.forget()
        return ()
    failed = runner.undo.put_back()
    if left.committed:
        return failed
    failed += runner.take_back(left.notes)
    if not failed:
        runner.undo.forget()
    return failed
