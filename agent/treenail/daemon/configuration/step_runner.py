"""Each step as calls of the adapters, its inverse in the undo log first."""

import json
import logging
from collections.abc import Sequence
from typing import Protocol, assert_never

from treenail.api.contents import Contents
from treenail.config import names
from treenail.daemon.configuration.inspect import OWNERSHIP_FILE
from treenail.errors import FileError, HostError, UnitError
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.entries import (
    AbsentEntry,
    DirectoryEntry,
    Entry,
    FileEntry,
    HardlinkEntry,
    SymlinkEntry,
)
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.path_stat import DIRECTORY, FILE, LINK, find_directories, stat_paths
from treenail.host.filesystem.root import Root
from treenail.host.rollback.backups import FileBackups
from treenail.host.rollback.pending import PendingChange
from treenail.host.rollback.prepare import PathChange
from treenail.host.rollback.transaction import UndoTransaction
from treenail.host.system.users import Accounts, ShadowFile
from treenail.host.systemd.unit_files import UnitFileReader, UnitLinks
from treenail.update.steps import ownership as records
from treenail.update.steps.inventory import KEY_DIRECTORIES
from treenail.update.steps.ssh_keys import KEY_DIRECTORY_MODE, KEYS_MODE, format_key_file
from treenail.update.steps.steps import (
    BackUpEntry,
    ConfigStep,
    DisableUnits,
    EnablementStep,
    EnableUnits,
    FileStep,
    MakeDirectory,
    MakeLink,
    PresetUnits,
    RecordOwnership,
    RelabelEntry,
    ReloadDaemon,
    ReloadUnit,
    RemoveEntry,
    RestartUnit,
    RestoreEntry,
    ServiceStep,
    SetPassword,
    SetSshKeys,
    WriteFile,
)

Json = dict[str, object]
_LIMIT = 256 * 1024 * 1024

log = logging.getLogger(__name__)


class ServiceManager(Protocol):
    """systemd, as it runs; raises `UnitError` and `BusError`."""

    def enable_units(self, *units: str) -> None: ...
    def disable_units(self, *units: str) -> None: ...
    def preset_units(self, *units: str) -> None: ...
    def reload_daemon(self) -> None: ...
    def reload_unit(self, unit: str) -> None: ...
    def restart_unit(self, unit: str) -> None: ...
    def start_default_target(self) -> None: ...


class StepRunner:
    """Carries steps out below a root. Without ``services`` it makes the links of units itself."""

    def __init__(
        self,
        root: Root,
        shadow: ShadowFile,
        disk: Disk | None = None,
        services: ServiceManager | None = None,
    ) -> None:
        self.undo = UndoTransaction(root, disk)
        self.pending = PendingChange(root, disk)
        self._root = root
        self._disk = disk or Disk()
        self._shadow = shadow
        self._files = HostFiles(root, disk)
        self._originals = FileBackups(root, disk)
        self._units = UnitFileReader(self._files)
        self._accounts = Accounts(self._files)
        self._services = services

    def check_owners(self, steps: Sequence[ConfigStep]) -> None:
        """Refuse, before anything is touched, owners whom the machine does not know by now."""
        self._accounts = Accounts(self._files)
        for step in steps:
            if isinstance(step, WriteFile | MakeDirectory | MakeLink):
                self._accounts.find_uid(step.user)
                self._accounts.find_gid(step.group)

    def check_path_kinds(self, steps: Sequence[ConfigStep]) -> None:
        """Refuse, before anything is touched, what is to take the place of a directory.

        None is replaced, not even one that the config leaves empty: that goes last.
        """
        # What is below a link that goes will not be where that link leads.
        going = tuple(
            f"{step.path}/" for step in steps if isinstance(step, RemoveEntry | RestoreEntry)
        )
        paths = [step.path for step in steps if isinstance(step, WriteFile | MakeLink)]
        staying = [path for path in paths if not path.startswith(going)]
        for path in find_directories(self._root, self._disk, staying):
            raise FileError(
                f"{path} is a directory, and is to be none",
                remedy=f"move {path} away, or have the config use another path",
            )

    def compute_changes(self, step: FileStep) -> tuple[PathChange, ...]:
        """What the step changes, by path."""
        match step:
            case WriteFile(path=path, contents=contents, mode=mode):
                uid, gid = self._resolve_owner(step.user, step.group)
                return (
                    PathChange(path, FileEntry(lambda: _decode_contents(contents), mode, uid, gid)),
                )
            case MakeDirectory(path=path, mode=mode):
                return (
                    PathChange(
                        path, DirectoryEntry(mode, *self._resolve_owner(step.user, step.group))
                    ),
                )
            case MakeLink(path=path, target=target, is_hard=hard):
                owner = self._resolve_owner(step.user, step.group)
                return (
                    PathChange(
                        path, HardlinkEntry(target) if hard else SymlinkEntry(target, *owner)
                    ),
                )
            case RelabelEntry(path=path):
                return (PathChange(path, self._build_relabelled_entry(path)),)
            case RemoveEntry(path=path):
                return (PathChange(path, AbsentEntry()),)
            case BackUpEntry(path=path):
                return self._originals.plan_backup(path)
            case RestoreEntry(path=path):
                return self._originals.plan_restore(path)
            case SetSshKeys(user=user, keys=keys):
                return self._compute_key_changes(user, keys)
            case RecordOwnership(ownership=managed):
                content = json.dumps(records.to_json(managed), indent=1).encode() + b"\n"
                return (PathChange(OWNERSHIP_FILE, FileEntry(lambda: content, 0o600)),)
            case _:
                assert_never(step)

    def compute_link_changes(self, step: EnablementStep) -> tuple[PathChange, ...]:
        """The links that the step makes and removes; none when systemd does that."""
        if self._services is not None:
            return ()
        match step:
            case EnableUnits(units=units):
                return self._convert_links(self._units.plan_enable(*units))
            case DisableUnits(units=units):
                return self._convert_links(self._units.plan_disable(*units))
            case PresetUnits(units=units):
                return tuple(
                    c
                    for unit in units
                    for c in self._convert_links(self._compute_preset_links(unit))
                )
            case _:
                assert_never(step)

    def change_enablement(self, step: EnablementStep) -> None:
        """Have systemd do it."""
        if self._services is None:
            return
        self.undo.record_links(names.UNIT_DIRECTORY)
        match step:
            case EnableUnits(units=units):
                self._services.enable_units(*units)
            case DisableUnits(units=units):
                self._services.disable_units(*units)
            case PresetUnits(units=units):
                for unit in units:
                    try:
                        self._services.preset_units(unit)
                    except UnitError as error:
                        log.warning("left alone: %s", error)
            case _:
                assert_never(step)
        self.undo.mark_links_changed(names.UNIT_DIRECTORY)

    def set_password(self, step: SetPassword) -> None:
        self.undo.record_note({"password": step.user, "line": self._shadow.read_line(step.user)})
        self._shadow.set_password_hash(step.user, step.password_hash)

    def notify_service(self, step: ServiceStep) -> None:
        """Have what runs take notice; the note is what a restart after a crash repeats."""
        self.undo.record_note(_encode_service_note(step))
        self._call_service_manager(step)

    def start_default_target(self) -> None:
        """Have started what a boot would have, had it been enabled by then."""
        if self._services is not None:
            self._services.start_default_target()

    def reload_and_start(self) -> None:
        """Have units as a boot with the files as they are now would have read and started them."""
        if self._services is not None:
            self._services.reload_daemon()
        self.start_default_target()

    def undo_notes(self, notes: Sequence[Json]) -> tuple[str, ...]:
        """Undo what the notes tell of; what could not be, one sentence for each.

        Called when the files are as they were, so that what runs notices that.
        """
        failed: list[str] = []
        for note in reversed(notes):
            if "password" in note:
                try:
                    line = note["line"]
                    self._shadow.restore_line(
                        str(note["password"]), None if line is None else str(line)
                    )
                except HostError as error:
                    failed.append(f"the password of {note['password']}: {error}")
        for step in dict.fromkeys(_decode_service_note(note) for note in notes if "serve" in note):
            try:
                self._call_service_manager(step)
            except HostError as error:
                failed.append(f"{step}: {error}")
        return tuple(failed)

    def _call_service_manager(self, step: ServiceStep) -> None:
        if self._services is None:
            return
        match step:
            case ReloadDaemon():
                self._services.reload_daemon()
            case ReloadUnit(unit=unit):
                self._services.reload_unit(unit)
            case RestartUnit(unit=unit):
                self._services.restart_unit(unit)
            case _:
                assert_never(step)

    def _resolve_owner(self, user: int | str, group: int | str) -> tuple[int, int]:
        return self._accounts.find_uid(user), self._accounts.find_gid(group)

    def _build_relabelled_entry(self, path: str) -> Entry:
        """What stands there, to be made with the label that it ought to have."""
        found = stat_paths(self._root, self._disk, [path])[path]
        if found.kind == DIRECTORY:
            return DirectoryEntry(found.mode, found.uid, found.gid)
        if found.kind == LINK:
            return SymlinkEntry(found.target, found.uid, found.gid)
        content = self._files.read_file(path, limit=_LIMIT)
        if content is None or found.kind != FILE:
            raise FileError(f"can't give {path} another label: it is {found.kind} now")
        return FileEntry(lambda: content, found.mode, found.uid, found.gid)

    def _compute_key_changes(self, user: str, keys: tuple[str, ...]) -> tuple[PathChange, ...]:
        uid, gid = self._resolve_owner(user, user)
        content = format_key_file(keys).encode()
        return (
            *(
                PathChange(path, DirectoryEntry(KEY_DIRECTORY_MODE, uid, gid))
                for path in (*self._find_missing_home(), *KEY_DIRECTORIES)
            ),
            PathChange(names.AUTHORIZED_KEYS, FileEntry(lambda: content, KEYS_MODE, uid, gid)),
        )

    def _find_missing_home(self) -> tuple[str, ...]:
        home = KEY_DIRECTORIES[0].rpartition("/")[0]
        return () if self._files.has_entry(home) else (home,)

    def _compute_preset_links(self, unit: str) -> UnitLinks:
        try:
            return self._units.plan_preset(unit)
        except UnitError as error:
            log.warning("left alone: %s", error)
            return UnitLinks({})

    def _convert_links(self, links: UnitLinks) -> tuple[PathChange, ...]:
        """Links that are there as they should be are left alone; emptied directories go."""
        emptied = dict.fromkeys(path.rpartition("/")[0] for path in links.removed)
        emptied.pop(names.UNIT_DIRECTORY, None)
        return (
            *(PathChange(path, AbsentEntry()) for path in links.removed),
            *(PathChange(path, AbsentEntry()) for path in emptied),
            *(
                PathChange(path, SymlinkEntry(text))
                for path, text in links.made.items()
                if self._files.read_link(path) != text
            ),
        )


def _decode_contents(contents: Contents | str) -> bytes:
    return contents.encode() if isinstance(contents, str) else contents.decode_bytes()


def _encode_service_note(step: ServiceStep) -> Json:
    match step:
        case ReloadDaemon():
            return {"serve": "daemon-reload"}
        case ReloadUnit(unit=unit):
            return {"serve": "reload", "unit": unit}
        case RestartUnit(unit=unit):
            return {"serve": "restart", "unit": unit}
        case _:
            assert_never(step)


def _decode_service_note(note: Json) -> ServiceStep:
    match note["serve"]:
        case "reload":
            return ReloadUnit(str(note["unit"]))
        case "restart":
            return RestartUnit(str(note["unit"]))
        case _:
            return ReloadDaemon()
