"""Plan the files, units and users of this machine, and apply all steps of a plan or none.

That holds across a power cut.
"""

import errno
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from operator import attrgetter

from treenail import errors, observations
from treenail.api import decode, machineconfig
from treenail.config import image_content, node_paths, wanted_state
from treenail.daemon.configuration import mcd_state, step_runner
from treenail.encoding import json_text
from treenail.host.filesystem import atomic_files, disk, entries, path_stat, root_directory
from treenail.host.machine import Machine
from treenail.host.rollback.undo_log import PathChange
from treenail.units import unit_files
from treenail.update.steps import inventory, step_types
from treenail.update.steps.plan import StepPlan, plan_steps

log = logging.getLogger(__name__)

_READ_ONLY = os.strerror(errno.EROFS)
# A remount for writing does not reach the mount namespace of a unit that started before it.
_RESTART_REMEDY = "; after a remount for writing run: systemctl restart treenail"

_SYSTEMD_DIRECTORY = "/etc/systemd/"
_UNLABELLED = attrgetter("kind", "mode", "uid", "gid", "sha256", "target")


class MachineInspector:
    """Inspects a machine. Raises `FileError` and `UnitError`."""

    def __init__(
        self, machine: Machine, unit_states: unit_files.UnitStateSource | None = None
    ) -> None:
        """Without ``unit_states``, read the states of units from their files."""
        self._root = machine.root
        self._disk = machine.disk
        self._files = machine.labelled_files
        self._shadow = machine.shadow
        self._backups = machine.backups
        self._units = unit_files.UnitFileReader(self._files)
        self._unit_states: unit_files.UnitStateSource = unit_states or self._units
        self._mcd_ownership = (b"", inventory.Ownership())
        """The digest of the MCD's config as last read, and what it owns."""

    def read_ownership(self) -> inventory.Ownership:
        """Read what the machine's config owns; without a record, what the MCD's config owns.

        Raises `LedgerError` and `ConfigError` when the record cannot be read.
        """
        content = self._files.read_file(inventory.OWNERSHIP_FILE, limit=inventory.OWNERSHIP_LIMIT)
        if content is None:
            return self._read_mcd_ownership()
        try:
            return inventory.from_json(json_text.parse_json(content))
        except ValueError as error:
            path = self._root.resolve_path(inventory.OWNERSHIP_FILE)
            raise errors.LedgerError(
                f"cannot read {path}: it is damaged: {error}",
                remedy=f"move {path} away; files that a config no longer lists then stay",
            ) from error

    def inspect_machine(
        self,
        old: inventory.Ownership,
        new: wanted_state.WantedState,
        provided: frozenset[str] = frozenset(),
    ) -> inventory.Inventory:
        """Collect everything that a plan from the old to the new state depends on.

        ``provided`` are the paths and units of the new state that an image provides.
        """
        accounts = path_stat.Accounts(self._files)
        stats = path_stat.stat_paths(
            self._root, self._disk, inventory.list_inspected_paths(old, new)
        )
        units = sorted({*old.units, *new.units})
        users = old.users | new.users.keys()
        owned = inventory.compute_ownership("", new).paths
        dropped = old.paths - owned
        restorable = self._backups.list_paths() | self._backups.find_vendor_paths(dropped)
        # A path below a symlink that this plan removes will not be in the target of that link.
        removed_links = tuple(
            f"{path}/" for path in dropped if stats[path].kind == observations.EntryKind.LINK
        )
        resolved = {
            path
            for path in {*stats, *restorable}
            if not (path in owned and path.startswith(removed_links))
        }
        return inventory.Inventory(
            entries={path: accounts.name_owner(stat) for path, stat in stats.items()},
            restorable=restorable,
            resolved_paths=self._find_relocated(resolved),
            units=self._units,
            restored_units={
                path: self._read_restored(path)
                for path in dropped & restorable
                if unit_files.is_unit_path(path)
            },
            pristine=self._find_pristine(stats, units, provided),
            has_core_user=accounts.has_user(node_paths.CORE_USER),
            password_hash=self._shadow.read_password_hash(node_paths.CORE_USER) if users else None,
            intact_hard_links=self._find_hard_links(new, stats),
        )

    def _read_mcd_ownership(self) -> inventory.Ownership:
        content = self._files.read_file(mcd_state.CURRENT_CONFIG, limit=inventory.OWNERSHIP_LIMIT)
        if content is None:
            return inventory.Ownership()
        digest = hashlib.sha256(content).digest()
        if digest != self._mcd_ownership[0]:
            where = str(self._root.resolve_path(mcd_state.CURRENT_CONFIG))
            config = machineconfig.MachineConfig.from_json(decode.load_json(content, where=where))
            wanted = wanted_state.read_wanted_state(config)
            self._mcd_ownership = digest, inventory.compute_ownership(config.name, wanted)
        return self._mcd_ownership[1]

    def _find_pristine(
        self,
        stats: Mapping[str, observations.PathEntry],
        names: Iterable[str],
        provided: frozenset[str],
    ) -> frozenset[str]:
        """Find the provided paths and units that are as the booted image has them."""
        if not provided:
            return frozenset()
        image = root_directory.open_booted_tree(self._root)
        # Nothing but the next image changes /usr: what differs there needs no step either.
        carried = ("/etc/", "/usr/")
        paths = [path for path in stats if path in provided and path.startswith(carried)]
        originals = path_stat.stat_paths(image, disk.Disk(), paths)
        units = [name for name in names if name in provided]
        states = self._unit_states.read_states(*units)
        original_states = unit_files.UnitFileReader(atomic_files.HostFiles(image)).read_states(
            *units
        )
        return frozenset(
            (
                *(
                    path
                    for path in paths
                    if _UNLABELLED(stats[path]) == _UNLABELLED(originals[path])
                ),
                *(unit for unit in units if states[unit] == original_states.get(unit, "")),
            )
        )

    def _read_restored(self, path: str) -> unit_files.FileChange:
        match self._backups.plan_restore(path)[0].entry:
            case entries.FileEntry(content=read):
                content = read()
                return content if isinstance(content, bytes) else b"".join(content)
            case entries.SymlinkEntry(text=text):
                return unit_files.SymbolicLink(text)
            case _:
                return None

    def _find_relocated(self, paths: Iterable[str]) -> dict[str, str]:
        prefix = os.fspath(self._root.prefix)
        entries = {
            path: root_directory.strip_prefix(entry, prefix)
            for path, entry in path_stat.resolve_entries(self._root, paths).items()
        }
        return {path: entry for path, entry in entries.items() if entry != path}

    def _find_hard_links(
        self, new: wanted_state.WantedState, stats: Mapping[str, observations.PathEntry]
    ) -> frozenset[str]:
        links = [link for link in new.links.values() if link.is_hard]
        targets = path_stat.stat_paths(self._root, self._disk, [link.target for link in links])
        return frozenset(
            link.path
            for link in links
            if stats[link.path].inode == targets[link.target].inode != (0, 0)
        )


class RecoveryOutcome(StrEnum):
    """The outcome of recovering an interrupted change."""

    UNDONE = "undone"
    CONFIRMED = "confirmed"


def apply_steps(
    steps: Sequence[step_types.ConfigStep],
    runner: step_runner.StepRunner,
    *,
    verify: Callable[[], None] = lambda: None,
    owner: str = "",
) -> None:
    """Apply and verify all steps, then commit them durably.

    With an ``owner`` the change stays pending instead, and the owner confirms or undoes it later.

    Raises `StepError` with the failed step after undoing all others. Raises `RollbackError` with a
    list of what is left when undoing failed; until `recover_interrupted` has undone that, every
    further call raises `LedgerError`.
    """
    if not steps:
        return
    runner.undo.ensure_none_interrupted()
    runner.check_owners(steps)
    progress = _ApplyProgress(steps[0])
    try:
        for batch in _split_batches(steps):
            _run_batch(batch, runner, progress)
        progress.description = "verify the applied steps"
        verify()
        if owner:
            runner.undo.mark_pending(owner)
        else:
            runner.undo.commit_changes()
    except errors.TreenailError as error:
        started = steps[: steps.index(progress.step) + 1]
        log.warning("cannot %s; undoing the %d steps done so far", progress, len(started))
        for undo_step in step_types.list_undo_steps(started):
            log.debug("undoing: %s", undo_step)
        _undo_failed(progress, error, runner)


def recover_interrupted(runner: step_runner.StepRunner) -> RecoveryOutcome | None:
    """Undo an interrupted change, or finish it when it was already committed.

    Returns None when nothing was interrupted. Call it before any other change of the machine.
    Raises `RollbackError`, and `LedgerError` when the undo log cannot be read.
    """
    runner.pending.finish_confirm()
    interrupted = runner.undo.find_interrupted()
    if interrupted is None:
        return None
    _raise_if_failed(_undo_logged(runner))
    if interrupted.is_committed:
        return RecoveryOutcome.CONFIRMED
    log.info("undid an interrupted change")
    return RecoveryOutcome.UNDONE


def restore_pending(runner: step_runner.StepRunner, *, is_booted: bool = False) -> None:
    """Undo the pending change durably, if there is one; idempotent.

    ``is_booted``: the machine booted with the change, so that systemd has read its units. Raises
    `RollbackError`, and what `StepRunner.reload_and_start` raises.
    """
    interrupted = runner.pending.find_interrupted()
    if interrupted is None:
        return
    failed = runner.pending.undo_changes() + runner.undo_notes(interrupted.notes)
    _raise_if_failed(failed)
    # Starting default.target also starts oneshot units that have already ended. Do it only when
    # units changed.
    if is_booted and any(path.startswith(_SYSTEMD_DIRECTORY) for path in interrupted.paths):
        runner.reload_and_start()
    runner.pending.discard_log()
    log.info("restored files, units and users")


class _ApplyProgress:
    """The step that is running, or the description of what follows the last one."""

    def __init__(self, step: step_types.ConfigStep) -> None:
        self.step = step
        self.description = ""

    def __str__(self) -> str:
        return self.description or str(self.step)


def _run_batch(
    batch: Sequence[step_types.ConfigStep], runner: step_runner.StepRunner, progress: _ApplyProgress
) -> None:
    progress.step = step = batch[0]
    match step:
        case step_types.EnableUnits() | step_types.DisableUnits() | step_types.PresetUnits():
            _place_changes(
                [(step, change) for change in runner.compute_link_changes(step)], runner, progress
            )
            runner.change_enablement(step)
        case step_types.SetPassword():
            runner.set_password(step)
        case step_types.ReloadDaemon() | step_types.ReloadUnit() | step_types.RestartUnit():
            runner.notify_service(step)
        case _:
            changes = []
            for file_step in batch:
                if isinstance(file_step, step_types.FileStep):
                    progress.step = file_step
                    changes += [(file_step, change) for change in runner.compute_changes(file_step)]
            _place_changes(changes, runner, progress)
    if log.isEnabledFor(logging.DEBUG):
        for done in batch:
            log.debug("done: %s", done)


def _place_changes(
    changes: Sequence[tuple[step_types.ConfigStep, PathChange]],
    runner: step_runner.StepRunner,
    progress: _ApplyProgress,
) -> None:
    if not changes:
        return
    undo = runner.undo
    try:
        undo.apply_changes([change for _, change in changes])
    except errors.TreenailError:
        steps = {change.path: step for step, change in changes}
        progress.step = steps.get(undo.current_path, progress.step)
        raise


def _split_batches(
    steps: Sequence[step_types.ConfigStep],
) -> Iterator[Sequence[step_types.ConfigStep]]:
    """Yield batches of file steps that are applied together, and other steps one by one.

    Removals end a batch, because later steps may need the path. A hard link begins a batch,
    because its target may be new.
    """
    started = 0
    for number, (step, following) in enumerate(pairwise([*steps, None]), start=1):
        is_joined = isinstance(step, step_types.FileStep) and isinstance(
            following, step_types.FileStep
        )
        is_removal_end = isinstance(
            step, step_types.RemoveEntry | step_types.RestoreEntry
        ) and not isinstance(following, step_types.RemoveEntry | step_types.RestoreEntry)
        is_hard_link = isinstance(following, step_types.MakeLink) and following.is_hard
        if not is_joined or is_removal_end or is_hard_link:
            yield steps[started:number]
            started = number


def _undo_failed(
    progress: _ApplyProgress, error: errors.TreenailError, runner: step_runner.StepRunner
) -> None:
    interrupted = runner.undo.find_interrupted()
    if interrupted is not None and interrupted.is_committed:
        # The log already has its commit line: the change is done and must not be undone.
        log.warning("committed the change, but its clean-up failed: %s", error)
        _undo_logged(runner)
        return
    failed = _undo_logged(runner)
    if failed:
        raise errors.RollbackError(
            f"cannot {progress}: {error}; undoing the earlier steps failed, too: "
            f"{'; '.join(failed)}",
            remedy=error.remedy or "fix what is listed; the next start tries again",
        ) from error
    # The errors of units begin with the step, too.
    cause = str(error).removeprefix(f"cannot {progress}: ")
    raise errors.StepError(
        f"cannot {progress}: {cause}; all steps were undone",
        step=None if progress.description else progress.step,
        remedy=error.remedy,
    ) from error


def _raise_if_failed(failed: Sequence[str]) -> None:
    if failed:
        raise errors.RollbackError(
            f"cannot undo an interrupted change: {'; '.join(failed)}",
            remedy="fix what is listed; treenail tries again"
            + _RESTART_REMEDY * any(_READ_ONLY in failure for failure in failed),
        )


def _undo_logged(runner: step_runner.StepRunner) -> tuple[str, ...]:
    """Undo the logged change; return what failed, and discard the log when nothing did."""
    interrupted = runner.undo.find_interrupted()
    if interrupted is None:
        runner.undo.discard_log()
        return ()
    failed = runner.undo.undo_changes()
    if interrupted.is_committed:
        return failed
    failed += runner.undo_notes(interrupted.notes)
    if not failed:
        runner.undo.discard_log()
    return failed


_MAX_SHOWN_STEPS = 3


@dataclass(frozen=True, slots=True)
class UnfinishedChanges:
    """Changes that an earlier process or action did not finish."""

    is_interrupted: bool = False
    """A change must be undone or cleaned up before anything else is done."""
    has_undo: bool = False
    """The owner has a pending change, which it may still undo."""


class NodeConfiguration:
    """Plans and applies steps. Raises `HostError`, and `ConfigError` for a damaged record."""

    def __init__(self, inspector: MachineInspector, runner: step_runner.StepRunner) -> None:
        self._inspector = inspector
        self._runner = runner

    def find_unfinished(self, owner: str) -> UnfinishedChanges:
        """Find unfinished changes. A pending change of another owner counts as interrupted."""
        pending_owner = self._runner.pending.find_owner()
        return UnfinishedChanges(
            is_interrupted=self._runner.undo.find_interrupted() is not None
            or self._runner.pending.needs_cleanup
            or pending_owner not in {"", owner},
            has_undo=bool(pending_owner) and pending_owner == owner,
        )

    def undo_interrupted(self) -> RecoveryOutcome | None:
        """Undo an interrupted change, or finish it; see `recover_interrupted` of this module."""
        return recover_interrupted(self._runner)

    def recover_interrupted(self, owner: str) -> None:
        """Undo an interrupted change, and confirm a pending change of another owner."""
        self.undo_interrupted()
        if self._runner.pending.find_owner() not in {"", owner}:
            self._runner.pending.confirm_change()

    def plan_steps(
        self, new: wanted_state.WantedState, config: str, provided: frozenset[str] = frozenset()
    ) -> StepPlan:
        """Plan the steps from the machine as it is to the wanted state of the named config.

        ``provided`` are the paths and units that an image provides.
        """
        old = self._inspector.read_ownership()
        state = self._inspector.inspect_machine(old, new, provided)
        return plan_steps(old, new, state, config=config, provided=provided)

    def check_steps(self, planned: StepPlan) -> None:
        """Raise `FileError` and `UnitError` for steps that this machine cannot make."""
        self._runner.check_owners(planned.steps)
        self._runner.check_path_kinds(planned.steps)
        for error in planned.refusals:
            raise error

    def apply_steps(
        self,
        steps: Sequence[step_types.ConfigStep],
        split: image_content.ImageSplit,
        config: str,
        *,
        owner: str = "",
    ) -> None:
        """Apply the steps, all or none, and verify that the new plan is empty.

        With an ``owner`` the change stays pending until `confirm_pending` or `restore_pending`.
        """

        def verify() -> None:
            remaining = self.plan_steps(split.wanted, config, split.provided).steps
            if remaining:
                shown = "; ".join(str(step) for step in remaining[:_MAX_SHOWN_STEPS])
                more = (
                    f" and {len(remaining) - _MAX_SHOWN_STEPS} more"
                    if len(remaining) > _MAX_SHOWN_STEPS
                    else ""
                )
                raise errors.FileError(f"steps are left after applying all: {shown}{more}")

        apply_steps(steps, self._runner, verify=verify, owner=owner)

    def record_ownership(self, new: wanted_state.WantedState, config: str) -> None:
        """Record what the config owns, unless the machine already has a record."""
        if self._inspector.read_ownership() == inventory.Ownership():
            apply_steps(
                (step_types.RecordOwnership(inventory.compute_ownership(config, new)),),
                self._runner,
            )

    def complete_steps(
        self, steps: Sequence[step_types.ConfigStep], split: image_content.ImageSplit, config: str
    ) -> None:
        """Apply the steps that are left after a boot, and start the units that they enable."""
        self.apply_steps(_add_reload(steps), split, config)
        if any(isinstance(step, step_types.EnablementStep) for step in steps):
            self._runner.start_default_target()

    def apply_repair(self, steps: Sequence[step_types.ConfigStep]) -> None:
        """Apply the steps, all or none, without verifying that no others are left."""
        apply_steps(steps, self._runner)

    def complete_early_steps(self, steps: Sequence[step_types.ConfigStep]) -> None:
        """Apply the steps that the boot needs before it is verified."""
        apply_steps(_add_reload(steps), self._runner)
        if any(isinstance(step, step_types.EnablementStep) for step in steps):
            self._runner.start_default_target()

    def list_pending_services(self) -> tuple[step_types.ServiceStep, ...]:
        """Return the reloads and restarts that were part of the pending change."""
        pending = self._runner.pending.find_interrupted()
        return step_runner.decode_service_notes(pending.notes) if pending else ()

    def confirm_pending(self) -> None:
        """Confirm the pending change, so that it can no longer be undone."""
        self._runner.pending.confirm_change()

    def restore_pending(self, *, is_booted: bool = False) -> None:
        """Undo the pending change; ``is_booted``: the machine booted with it."""
        restore_pending(self._runner, is_booted=is_booted)


def _add_reload(steps: Sequence[step_types.ConfigStep]) -> tuple[step_types.ConfigStep, ...]:
    """Add the reload of systemd if a unit changes."""
    # Imported late: 10 ms for policies, which no command needs.
    from treenail.update.impact.impact import plan_service_steps  # noqa: PLC0415

    return (*steps, *plan_service_steps(steps, ()))
