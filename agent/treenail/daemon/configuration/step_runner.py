"""Each step as calls of the adapters, its inverse in the undo log first."""

import json
import logging
from collections.abc import Sequence
from typing import Protocol, assert_never

from treenail.api.contents import Contents
from treenail.config import names
from treenail.daemon.configuration.inspect import RECORD
from treenail.errors import FileError, HostError, UnitError
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.entries import Absent, Directory, Entry, Hardlink, Regular, Symlink
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.path_stat import DIRECTORY, FILE, LINK, directories, standing
from treenail.host.filesystem.root import Root
from treenail.host.rollback.backups import Originals
from treenail.host.rollback.pending import Held
from treenail.host.rollback.prepare import Change
from treenail.host.rollback.transaction import Undo
from treenail.host.system.users import Accounts, Shadow
from treenail.host.systemd.unit_files import Links, Units
from treenail.update.steps import ownership as records
from treenail.update.steps.inventory import KEY_DIRECTORIES
from treenail.update.steps.ssh_keys import KEY_DIRECTORY_MODE, KEYS_MODE, key_file
from treenail.update.steps.steps import (
    Disable,
    Enable,
    Enabling,
    Keep,
    MakeDirectory,
    MakeLink,
    Placing,
    Preset,
    Relabel,
    ReloadDaemon,
    ReloadUnit,
    Remember,
    Remove,
    RestartUnit,
    Restore,
    Serving,
    SetKeys,
    SetPassword,
    Step,
    WriteFile,
)

Json = dict[str, object]
_LIMIT = 256 * 1024 * 1024

log = logging.getLogger(__name__)


class Services(Protocol):
    """systemd, as it runs; raises `UnitError` and `BusError`."""

    def enable(self, *units: str) -> None: ...
    def disable(self, *units: str) -> None: ...
    def preset(self, *units: str) -> None: ...
    def reload(self) -> None: ...
    def reload_unit(self, unit: str) -> None: ...
    def restart(self, unit: str) -> None: ...
    def start_default(self) -> None: ...


class Runner:
    """Carries steps out below a root. Without ``services`` it makes the links of units itself."""

    def __init__(
        self, root: Root, shadow: Shadow, disk: Disk | None = None, services: Services | None = None
    ) -> None:
        self.undo = Undo(root, disk)
        self.held = Held(root, disk)
        self._root = root
        self._disk = disk or Disk()
        self._shadow = shadow
        self._files = Files(root, disk)
        self._originals = Originals(root, disk)
        self._units = Units(self._files)
        self._accounts = Accounts(self._files)
        self._services = services

    def check(self, steps: Sequence[Step]) -> None:
        """Refuse, before anything is touched, owners whom the machine does not know by now."""
        self._accounts = Accounts(self._files)
        for step in steps:
            if isinstance(step, WriteFile | MakeDirectory | MakeLink):
                self._accounts.uid(step.user)
                self._accounts.gid(step.group)

    def check_kinds(self, steps: Sequence[Step]) -> None:
        """Refuse, before anything is touched, what is to take the place of a directory.

        None is replaced, not even one that the config leaves empty: that goes last.
        """
        # What is below a link that goes will not be where that link leads.
        going = tuple(f"{step.path}/" for step in steps if isinstance(step, Remove | Restore))
        paths = [step.path for step in steps if isinstance(step, WriteFile | MakeLink)]
        staying = [path for path in paths if not path.startswith(going)]
        for path in directories(self._root, self._disk, staying):
            raise FileError(
                f"{path} is a directory, and is to be none",
                remedy=f"move {path} away, or have the config use another path",
            )

    def changes(self, step: Placing) -> tuple[Change, ...]:
        """What the step changes, by path."""
        match step:
            case WriteFile(path=path, contents=contents, mode=mode):
                uid, gid = self._owner(step.user, step.group)
                return (Change(path, Regular(lambda: _decoded(contents), mode, uid, gid)),)
            case MakeDirectory(path=path, mode=mode):
                return (Change(path, Directory(mode, *self._owner(step.user, step.group))),)
            case MakeLink(path=path, target=target, hard=hard):
                owner = self._owner(step.user, step.group)
                return (Change(path, Hardlink(target) if hard else Symlink(target, *owner)),)
            case Relabel(path=path):
                return (Change(path, self._made_anew(path)),)
            case Remove(path=path):
                return (Change(path, Absent()),)
            case Keep(path=path):
                return self._originals.keeping(path)
            case Restore(path=path):
                return self._originals.restoring(path)
            case SetKeys(user=user, keys=keys):
                return self._keys(user, keys)
            case Remember(managed=managed):
                content = json.dumps(records.to_json(managed), indent=1).encode() + b"\n"
                return (Change(RECORD, Regular(lambda: content, 0o600)),)
            case _:
                assert_never(step)

    def enabling(self, step: Enabling) -> tuple[Change, ...]:
        """The links that the step makes and removes; none when systemd does that."""
        if self._services is not None:
            return ()
        match step:
            case Enable(units=units):
                return self._linking(self._units.enabling(*units))
            case Disable(units=units):
                return self._linking(self._units.disabling(*units))
            case Preset(units=units):
                return tuple(c for unit in units for c in self._linking(self._preset(unit)))
            case _:
                assert_never(step)

    def enable(self, step: Enabling) -> None:
        """Have systemd do it."""
        if self._services is None:
            return
        self.undo.keep_links(names.UNITS)
        match step:
            case Enable(units=units):
                self._services.enable(*units)
            case Disable(units=units):
                self._services.disable(*units)
            case Preset(units=units):
                for unit in units:
                    try:
                        self._services.preset(unit)
                    except UnitError as error:
                        log.warning("left alone: %s", error)
            case _:
                assert_never(step)
        self.undo.links_changed(names.UNITS)

    def set_password(self, step: SetPassword) -> None:
        self.undo.note({"password": step.user, "line": self._shadow.line(step.user)})
        self._shadow.change(step.user, step.password_hash)

    def serve(self, step: Serving) -> None:
        """Have what runs take notice; the note is what a restart after a crash repeats."""
        self.undo.note(_note(step))
        self._serve(step)

    def start_enabled(self) -> None:
        """Have started what a boot would have, had it been enabled by then."""
        if self._services is not None:
            self._services.start_default()

    def boot_anew(self) -> None:
        """Have units as a boot with the files as they are now would have read and started them."""
        if self._services is not None:
            self._services.reload()
        self.start_enabled()

    def take_back(self, notes: Sequence[Json]) -> tuple[str, ...]:
        """Undo what the notes tell of; what could not be, one sentence for each.

        Called when the files are as they were, so that what runs notices that.
        """
        failed: list[str] = []
        for note in reversed(notes):
            if "password" in note:
                try:
                    line = note["line"]
                    self._shadow.put_back(
                        str(note["password"]), None if line is None else str(line)
                    )
                except HostError as error:
                    failed.append(f"the password of {note['password']}: {error}")
        for step in dict.fromkeys(_serving(note) for note in notes if "serve" in note):
            try:
                self._serve(step)
            except HostError as error:
                failed.append(f"{step}: {error}")
        return tuple(failed)

    def _serve(self, step: Serving) -> None:
        if self._services is None:
            return
        match step:
            case ReloadDaemon():
                self._services.reload()
            case ReloadUnit(unit=unit):
                self._services.reload_unit(unit)
            case RestartUnit(unit=unit):
                self._services.restart(unit)
            case _:
                assert_never(step)

    def _owner(self, user: int | str, group: int | str) -> tuple[int, int]:
        return self._accounts.uid(user), self._accounts.gid(group)

    def _made_anew(self, path: str) -> Entry:
        """What stands there, to be made with the label that it ought to have."""
        found = standing(self._root, self._disk, [path])[path]
        if found.kind == DIRECTORY:
            return Directory(found.mode, found.uid, found.gid)
        if found.kind == LINK:
            return Symlink(found.target, found.uid, found.gid)
        content = self._files.read(path, limit=_LIMIT)
        if content is None or found.kind != FILE:
            raise FileError(f"can't give {path} another label: it is {found.kind} now")
        return Regular(lambda: content, found.mode, found.uid, found.gid)

    def _keys(self, user: str, keys: tuple[str, ...]) -> tuple[Change, ...]:
        uid, gid = self._owner(user, user)
        content = key_file(keys).encode()
        return (
            *(
                Change(path, Directory(KEY_DIRECTORY_MODE, uid, gid))
                for path in (*self._missing_home(), *KEY_DIRECTORIES)
            ),
            Change(names.AUTHORIZED_KEYS, Regular(lambda: content, KEYS_MODE, uid, gid)),
        )

    def _missing_home(self) -> tuple[str, ...]:
        home = KEY_DIRECTORIES[0].rpartition("/")[0]
        return () if self._files.is_there(home) else (home,)

    def _preset(self, unit: str) -> Links:
        try:
            return self._units.presetting(unit)
        except UnitError as error:
            log.warning("left alone: %s", error)
            return Links({})

    def _linking(self, links: Links) -> tuple[Change, ...]:
        """Links that are there as they should be are left alone; emptied directories go."""
        emptied = dict.fromkeys(path.rpartition("/")[0] for path in links.removed)
        emptied.pop(names.UNITS, None)
        return (
            *(Change(path, Absent()) for path in links.removed),
            *(Change(path, Absent()) for path in emptied),
            *(
                Change(path, Symlink(text))
                for path, text in links.made.items()
                if self._files.link_text(path) != text
            ),
        )


def _decoded(contents: Contents | str) -> bytes:
    return contents.encode() if isinstance(contents, str) else contents.decode()


def _note(step: Serving) -> Json:
    match step:
        case ReloadDaemon():
            return {"serve": "daemon-reload"}
        case ReloadUnit(unit=unit):
            return {"serve": "reload", "unit": unit}
        case RestartUnit(unit=unit):
            return {"serve": "restart", "unit": unit}
        case _:
            assert_never(step)


def _serving(note: Json) -> Serving:
    match note["serve"]:
        case "reload":
            return ReloadUnit(str(note["unit"]))
        case "restart":
            return RestartUnit(str(note["unit"]))
        case _:
            return ReloadDaemon()
