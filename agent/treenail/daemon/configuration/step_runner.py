"""Run each step through the host adapters, after writing its inverse to the undo log."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from treenail import errors, observations
from treenail.api.ignition.model import Contents
from treenail.config import node_paths
from treenail.daemon.configuration import trust_store
from treenail.host.filesystem import entries, path_stat
from treenail.host.machine import Machine
from treenail.host.rollback import undo_log
from treenail.units import unit_files
from treenail.update.steps import inventory, plan, step_types

if TYPE_CHECKING:
    # A directory has no systemd.
    from treenail.host.systemd.systemd import Systemd

Json = dict[str, object]
_LIMIT = 256 * 1024 * 1024

log = logging.getLogger(__name__)


class StepRunner:
    """Runs steps on a machine. Without ``services`` it makes the links of units itself."""

    def __init__(self, machine: Machine, services: "Systemd | None" = None) -> None:
        self.undo = machine.undo
        self.pending = machine.pending_change
        self._root = machine.root
        self._disk = machine.disk
        self._shadow = machine.shadow
        self._files = machine.labelled_files
        self._backups = machine.backups
        self._units = unit_files.UnitFileReader(self._files)
        self._accounts = path_stat.Accounts(self._files)
        self._services = services
        self._trust_store = trust_store.TrustStore(machine)

    def check_owners(self, steps: Sequence[step_types.ConfigStep]) -> None:
        """Raise `FileError` for owners that the machine has no account for."""
        self._accounts = path_stat.Accounts(self._files)
        for step in steps:
            if isinstance(
                step, step_types.WriteFile | step_types.MakeDirectory | step_types.MakeLink
            ):
                self._accounts.find_uid(step.user)
                self._accounts.find_gid(step.group)
            elif isinstance(step, step_types.SetSshKeys):
                self._resolve_owner(step.user, step.user)

    def check_path_kinds(self, steps: Sequence[step_types.ConfigStep]) -> None:
        """Raise `FileError` for a path that the wanted entry cannot take, or that is unsafe.

        No directory is replaced, not even one that the plan empties: directories are removed last.
        """
        # A path below a symlink that this plan removes will not be in the target of that link.
        removed = tuple(
            f"{step.path}/"
            for step in steps
            if isinstance(step, step_types.RemoveEntry | step_types.RestoreEntry)
        )
        paths = [
            step.path
            for step in steps
            if isinstance(step, step_types.WriteFile | step_types.MakeLink)
        ]
        if any(isinstance(step, step_types.SetSshKeys) for step in steps):
            paths.append(node_paths.AUTHORIZED_KEYS)
        kept_paths = [path for path in paths if not path.startswith(removed)]
        changed = [step.path for step in steps if isinstance(step, step_types.EntryStep)]
        parents = {
            path.rpartition("/")[0] or "/": path
            for path in reversed(changed)
            if not path.startswith(removed)
        }
        for parent, path in parents.items():
            self._refuse_read_only(path, self._root.resolve_safely(parent))
        for path, kind in path_stat.find_irreplaceable(self._root, self._disk, kept_paths):
            is_emptied = any(entry.startswith(f"{path}/") for entry in removed)
            raise errors.FileError(
                f"cannot write {path}: a {kind} exists at this path",
                remedy=f"use another path in the MachineConfig; or apply one without {path} and "
                f"everything below it, and then run: rmdir {path}"
                if is_emptied
                else f"move {path} away, or use another path in the MachineConfig",
            )
        for step in steps:
            if isinstance(
                step,
                step_types.WriteFile
                | step_types.MakeDirectory
                | step_types.MakeLink
                | step_types.SetSshKeys,
            ):
                changes = self.compute_changes(step)
                remaining = [change for change in changes if not change.path.startswith(removed)]
                # A rehearsal, one step at a time: no other step has made its entries yet.
                undo_log.ChangeRecorder(self._root, self._disk, 0).record_changes(remaining)

    def _refuse_read_only(self, path: str, parent: Path) -> None:
        """Raise `FileError` for a path below the read-only /usr of a host with OSTree."""
        usr = self._root.prefix / "usr"
        if usr in (parent, *parent.parents) and self._files.has_entry("/run/ostree-booted"):
            raise errors.FileError(
                f"cannot write {path}: /usr is read-only on this machine",
                remedy="build it into the image, and request the image beside the config; or "
                "write it below /etc or /var",
            )

    def compute_changes(self, step: step_types.FileStep) -> tuple[undo_log.PathChange, ...]:
        """Return the changes of paths that the step makes."""
        match step:
            case step_types.WriteFile(path=path, contents=contents, mode=mode):
                uid, gid = self._resolve_owner(step.user, step.group)
                return (
                    undo_log.PathChange(
                        path, entries.FileEntry(lambda: _decode_contents(contents), mode, uid, gid)
                    ),
                )
            case step_types.MakeDirectory(path=path, mode=mode):
                return (
                    undo_log.PathChange(
                        path,
                        entries.DirectoryEntry(mode, *self._resolve_owner(step.user, step.group)),
                    ),
                )
            case step_types.MakeLink(path=path, target=target, is_hard=is_hard):
                owner = self._resolve_owner(step.user, step.group)
                return (
                    undo_log.PathChange(
                        path,
                        entries.HardlinkEntry(target)
                        if is_hard
                        else entries.SymlinkEntry(target, *owner),
                    ),
                )
            case step_types.RelabelEntry(path=path):
                return (undo_log.PathChange(path, self._build_relabelled_entry(path)),)
            case step_types.RemoveEntry(path=path):
                return (undo_log.PathChange(path, entries.AbsentEntry()),)
            case step_types.BackUpEntry(path=path):
                return self._backups.plan_backup(path)
            case step_types.RestoreEntry(path=path):
                return self._backups.plan_restore(path)
            case step_types.SetSshKeys(user=user, keys=keys):
                return self._compute_key_changes(user, keys)
            case step_types.RecordOwnership(ownership=ownership):
                content = json.dumps(inventory.to_json(ownership), indent=1).encode() + b"\n"
                return (
                    undo_log.PathChange(
                        inventory.OWNERSHIP_FILE, entries.FileEntry(lambda: content, 0o600)
                    ),
                )
            case step_types.StoreConfig(path=path, encode=encode):
                return (undo_log.PathChange(path, entries.FileEntry(encode, 0o600)),)
            case _:
                assert_never(step)

    def compute_link_changes(
        self, step: step_types.EnablementStep
    ) -> tuple[undo_log.PathChange, ...]:
        """Return the links that the step makes and removes; none when systemd makes them."""
        if self._services is not None:
            return ()
        match step:
            case step_types.EnableUnits(units=units):
                return self._convert_links(self._units.plan_enable(*units))
            case step_types.DisableUnits(units=units):
                return self._convert_links(self._units.plan_disable(*units))
            case step_types.PresetUnits(units=units):
                return tuple(
                    c
                    for unit in units
                    for c in self._convert_links(self._compute_preset_links(unit))
                )
            case _:
                assert_never(step)

    def change_enablement(self, step: step_types.EnablementStep) -> None:
        """Let systemd make the links, and record them for undoing."""
        if self._services is None:
            return
        self.undo.record_links(node_paths.UNIT_DIRECTORY)
        match step:
            case step_types.EnableUnits(units=units):
                self._services.enable_units(*units)
            case step_types.DisableUnits(units=units):
                self._services.disable_units(*units)
            case step_types.PresetUnits(units=units):
                for unit in units:
                    try:
                        self._services.preset_units(unit)
                    except errors.UnitError as error:
                        # The MCD ignores errors of presets, too (update.go).
                        log.warning("cannot preset %s, leaving it as it is: %s", unit, error)
            case _:
                assert_never(step)
        self.undo.mark_links_changed(node_paths.UNIT_DIRECTORY)

    def set_password(self, step: step_types.SetPassword) -> None:
        self.undo.record_note({"password": step.user, "line": self._shadow.read_line(step.user)})
        self._shadow.set_password_hash(step.user, step.password_hash)

    def notify_service(self, step: step_types.ServiceStep) -> None:
        """Reload or restart what runs. The note makes recovery repeat it after a crash."""
        self.undo.record_note(_encode_service_note(step))
        self._call_service_manager(step)

    def start_default_target(self) -> None:
        """Start what the boot would have started, had it been enabled then."""
        if self._services is not None:
            self._services.start_default_target()

    def reload_and_start(self) -> None:
        """Reload and start units as a boot with the current files would have done."""
        if self._services is not None:
            self._services.reload_daemon()
        self.start_default_target()

    def undo_notes(self, notes: Sequence[Json]) -> tuple[str, ...]:
        """Undo the noted changes; return one sentence for each failure.

        Call it after restoring the files, so that services reload the restored ones.
        """
        failed: list[str] = []
        for note in reversed(notes):
            if "password" in note:
                try:
                    line = note["line"]
                    self._shadow.restore_line(
                        str(note["password"]), None if line is None else str(line)
                    )
                except errors.HostError as error:
                    failed.append(f"cannot restore the password of {note['password']}: {error}")
        for step in decode_service_notes(notes):
            try:
                self._call_service_manager(step)
            except errors.HostError as error:
                failed.append(f"cannot {step}: {error}")
        return tuple(failed)

    def _call_service_manager(self, step: step_types.ServiceStep) -> None:
        if self._services is None:
            return
        match step:
            case step_types.ReloadDaemon():
                self._services.reload_daemon()
            case step_types.ReloadUnit(unit=unit):
                self._services.reload_unit(unit)
            case step_types.RestartUnit(unit=unit) if unit == trust_store.UPDATE_UNIT:
                self._update_trust_store(self._services)
            case step_types.RestartUnit(unit=unit):
                self._services.restart_unit(unit)
            case _:
                assert_never(step)

    def _update_trust_store(self, services: "Systemd") -> None:
        """Restart the unit, and extract the store where the unit fails or does nothing.

        Its ConditionFirstBoot=true makes a restart succeed without a run.
        """
        try:
            services.restart_unit(trust_store.UPDATE_UNIT)
        except errors.UnitError as error:
            # The MCD runs the program, too, where the unit fails (update.go).
            log.warning("%s; updating the trust store without it", error)
        for problem in self._trust_store.update_store():
            log.warning("%s", problem)

    def _resolve_owner(self, user: int | str, group: int | str) -> tuple[int, int]:
        return self._accounts.find_uid(user), self._accounts.find_gid(group)

    def _build_relabelled_entry(self, path: str) -> entries.Entry:
        """Return the existing entry; creating it again gives it the policy's SELinux label."""
        stat = path_stat.stat_paths(self._root, self._disk, [path])[path]
        if stat.kind == observations.EntryKind.DIRECTORY:
            return entries.DirectoryEntry(stat.mode, stat.uid, stat.gid)
        if stat.kind == observations.EntryKind.LINK:
            return entries.SymlinkEntry(stat.target, stat.uid, stat.gid)
        content = self._files.read_file(path, limit=_LIMIT)
        if content is None or stat.kind != observations.EntryKind.FILE:
            raise errors.FileError(f"cannot relabel {path}: it is {stat.kind} now")
        return entries.FileEntry(lambda: content, stat.mode, stat.uid, stat.gid)

    def _compute_key_changes(
        self, user: str, keys: tuple[str, ...]
    ) -> tuple[undo_log.PathChange, ...]:
        uid, gid = self._resolve_owner(user, user)
        content = plan.format_key_file(keys).encode()
        return (
            *(
                undo_log.PathChange(path, entries.DirectoryEntry(plan.KEY_DIRECTORY_MODE, uid, gid))
                for path in (*self._find_missing_home(), *inventory.KEY_DIRECTORIES)
            ),
            undo_log.PathChange(
                node_paths.AUTHORIZED_KEYS,
                entries.FileEntry(lambda: content, plan.KEYS_MODE, uid, gid),
            ),
        )

    def _find_missing_home(self) -> tuple[str, ...]:
        home = inventory.KEY_DIRECTORIES[0].rpartition("/")[0]
        return () if self._files.has_entry(home) else (home,)

    def _compute_preset_links(self, unit: str) -> unit_files.UnitLinks:
        try:
            return self._units.plan_preset(unit)
        except errors.UnitError as error:
            log.warning("cannot preset %s, leaving it as it is: %s", unit, error)
            return unit_files.UnitLinks({})

    def _convert_links(self, links: unit_files.UnitLinks) -> tuple[undo_log.PathChange, ...]:
        """Return the changes for links that differ, and remove emptied directories."""
        emptied = dict.fromkeys(path.rpartition("/")[0] for path in links.removed)
        emptied.pop(node_paths.UNIT_DIRECTORY, None)
        return (
            *(undo_log.PathChange(path, entries.AbsentEntry()) for path in links.removed),
            *(undo_log.PathChange(path, entries.AbsentEntry()) for path in emptied),
            *(
                undo_log.PathChange(path, entries.SymlinkEntry(text))
                for path, text in links.made.items()
                if self._files.read_link(path) != text
            ),
        )


def decode_service_notes(notes: Sequence[Json]) -> tuple[step_types.ServiceStep, ...]:
    """Return the noted reloads and restarts of services, each once."""
    steps = (_decode_service_note(note) for note in notes if "serve" in note)
    return tuple(dict.fromkeys(steps))


def _decode_contents(contents: Contents | str) -> bytes:
    return contents.encode() if isinstance(contents, str) else contents.decode_bytes()


def _encode_service_note(step: step_types.ServiceStep) -> Json:
    match step:
        case step_types.ReloadDaemon():
            return {"serve": "daemon-reload"}
        case step_types.ReloadUnit(unit=unit):
            return {"serve": "reload", "unit": unit}
        case step_types.RestartUnit(unit=unit):
            return {"serve": "restart", "unit": unit}
        case _:
            assert_never(step)


def _decode_service_note(note: Json) -> step_types.ServiceStep:
    match note["serve"]:
        case "reload":
            return step_types.ReloadUnit(str(note["unit"]))
        case "restart":
            return step_types.RestartUnit(str(note["unit"]))
        case _:
            return step_types.ReloadDaemon()
