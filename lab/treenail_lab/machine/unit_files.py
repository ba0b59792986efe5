"""Unit files below a root directory, as systemd finds, enables, masks and presets them.

The rules for links are those of `treenail.units`, which are compared with systemctl.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.root_directory import Root
from treenail.units.unit_files import UnitFileError, UnitFileReader, UnitLinks, UnitProblem
from treenail_lab.machine.bus.objects import MethodCall, MethodCallback, MethodError, ReplyValues


def read_unit_settings(paths: Iterable[Path]) -> dict[str, str]:
    """The last value of every key, as ``Section.Key``; an empty one takes it back."""
    values = {f"{section}.{key}": value for section, key, value in parse_assignments(paths)}
    return {key: value for key, value in values.items() if value}


def parse_assignments(paths: Iterable[Path]) -> Iterator[tuple[str, str, str]]:
    """Section, key and value of each assignment; comments and continued lines are dealt with."""
    for path in paths:
        section = ""
        text = path.read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")
        for line in map(str.strip, text.splitlines()):
            if not line or line[0] in "#;":
                continue
            if line.startswith("["):
                section = line.strip("[]")
                continue
            key, equals, value = line.partition("=")
            if equals:
                yield section, key.strip(), value.strip()


NO_SUCH_UNIT = "org.freedesktop.systemd1.NoSuchUnit"
UNIT_EXISTS = "org.freedesktop.systemd1.UnitExists"
UNIT_MASKED = "org.freedesktop.systemd1.UnitMasked"
UNIT_LINKED = "org.freedesktop.systemd1.UnitLinked"
INVALID_ARGUMENTS = "org.freedesktop.DBus.Error.InvalidArgs"
FILE_NOT_FOUND = "org.freedesktop.DBus.Error.FileNotFound"

PERSISTENT = "etc/systemd/system"
RUNTIME = "run/systemd/system"
VENDOR = "usr/lib/systemd/system"
DIRECTORIES = (PERSISTENT, RUNTIME, "usr/local/lib/systemd/system", VENDOR)

_ERROR_NAMES = {
    UnitProblem.NOT_FOUND: NO_SUCH_UNIT,
    UnitProblem.MASKED: UNIT_MASKED,
    UnitProblem.ALIAS: UNIT_LINKED,
    UnitProblem.EXISTS: UNIT_EXISTS,
}

UnitFileChange = tuple[str, str, str]
"""A change as EnableUnitFiles reports it: symlink or unlink, the link and its target."""


@dataclass(slots=True)
class UnitFileChanges:
    """The changes of an operation, and whether a unit had an [Install] section."""

    changes: list[UnitFileChange] = field(default_factory=list)
    has_install_info: bool = False


class UnitFileTree:
    """The unit files of one machine; returned paths are those inside the machine."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._reader = UnitFileReader(HostFiles(Root(root)))

    def find_file(self, name: str) -> Path | None:
        """Return the file of the unit, of its template for an instance, or None."""
        for candidate in (name, _find_template(name)):
            for directory in DIRECTORIES:
                path = self._root / directory / candidate
                if candidate and (path.is_symlink() or path.exists()):
                    return path
        return None

    def find_source(self, name: str) -> Path | None:
        """Return the file of the unit, with links between unit files resolved."""
        path = self.find_file(name)
        if path is None or not path.is_symlink() or self.is_masked(name):
            return path
        target = self._resolve_link(path)
        return target if target.exists() else None

    def list_drop_ins(self, name: str) -> list[Path]:
        """Return the drop-ins of the unit in their order."""
        by_name: dict[str, Path] = {}
        for candidate in (_find_template(name), name):
            for directory in reversed(DIRECTORIES):
                for path in (self._root / directory / f"{candidate}.d").glob("*.conf"):
                    if candidate:
                        by_name[path.name] = path
        return [by_name[key] for key in sorted(by_name)]

    def list_names(self) -> list[str]:
        """Return every unit that has a file."""
        suffixes = (".service", ".socket", ".target", ".timer", ".path", ".mount", ".slice")
        return sorted(
            {
                path.name
                for directory in DIRECTORIES
                for path in (self._root / directory).glob("*")
                if path.name.endswith(suffixes)
            }
        )

    def list_wanted(self) -> list[str]:
        """Return the units that a target wants or requires, which a boot starts."""
        return sorted(
            {
                path.name
                for directory in DIRECTORIES
                for pattern in ("*.target.wants/*", "*.target.requires/*")
                for path in (self._root / directory).glob(pattern)
                if not self.is_masked(path.name) and self.find_file(path.name)
            }
        )

    def is_masked(self, name: str) -> bool:
        """Return whether the unit is linked to /dev/null, or its file is empty."""
        path = self.find_file(name)
        if path is None:
            return False
        if path.is_symlink():
            return str(path.readlink()) == os.devnull
        return path.stat().st_size == 0

    def read_state(self, name: str) -> str:
        """Return the state of ``systemctl is-enabled``; raise `MethodError` without a file."""
        state = self._reader.read_states(name)[name]
        if not state:
            raise MethodError(FILE_NOT_FOUND, "No such file or directory")
        return state

    def enable_units(self, names: list[str], *, runtime: bool = False) -> UnitFileChanges:
        """Link the units into the targets that want them, and create their aliases."""
        with _translate_refusals():
            links = self._reader.plan_enable(*names)
        return self._change_links(names, links, runtime=runtime)

    def disable_units(self, names: list[str], *, runtime: bool = False) -> UnitFileChanges:
        """Remove every link that enabling created."""
        changes = self._change_links(names, self._reader.plan_disable(*names), runtime=runtime)
        absent = [name for name in names if self.find_file(name) is None]
        if absent and not changes.changes:
            raise MethodError(NO_SUCH_UNIT, f"Unit file {absent[0]} does not exist.")
        return changes

    def mask_units(self, names: list[str], *, runtime: bool, force: bool) -> UnitFileChanges:
        """Link the units to /dev/null; raise `MethodError` when a unit has a file there."""
        changes = UnitFileChanges()
        for name in names:
            where = self._root / (RUNTIME if runtime else PERSISTENT) / name
            self._create_link(where, os.devnull, changes, force=force)
        return changes

    def unmask_units(self, names: list[str], *, runtime: bool) -> UnitFileChanges:
        """Remove links to /dev/null."""
        changes = UnitFileChanges()
        for name in names:
            link = self._root / (RUNTIME if runtime else PERSISTENT) / name
            if link.is_symlink() and str(link.readlink()) == os.devnull:
                link.unlink()
                changes.changes.append(("unlink", self._format_path(link), ""))
        return changes

    def preset_units(self, names: list[str], *, runtime: bool = False) -> UnitFileChanges:
        """Enable or disable each unit by the first preset rule that matches it."""
        with _translate_refusals():
            links = self._reader.plan_preset(*names)
        return self._change_links(names, links, runtime=runtime)

    def _change_links(
        self, names: list[str], links: UnitLinks, *, runtime: bool
    ) -> UnitFileChanges:
        installs = filter(None, map(self._reader.read_install, names))
        changes = UnitFileChanges(has_install_info=any(i.has_links or i.also for i in installs))
        for path in links.removed:
            link = self._root / path[1:]
            link.unlink()
            changes.changes.append(("unlink", path, ""))
            if link.parent != self._root / PERSISTENT and not any(link.parent.iterdir()):
                link.parent.rmdir()
        for path, target in links.made.items():
            where = self._root / (path.replace(PERSISTENT, RUNTIME, 1) if runtime else path)[1:]
            self._create_link(where, target, changes, force=True)
        return changes

    def _create_link(
        self, where: Path, target: str, changes: UnitFileChanges, *, force: bool
    ) -> None:
        if where.is_symlink():
            old = str(where.readlink())
            if old == target:
                return
            if not force:
                text = f"File {self._format_path(where)} already exists and is a symlink to {old}."
                raise MethodError(UNIT_EXISTS, text)
            where.unlink()
            changes.changes.append(("unlink", self._format_path(where), ""))
        elif where.exists():
            raise MethodError(UNIT_EXISTS, f"File {self._format_path(where)} already exists.")
        where.parent.mkdir(parents=True, exist_ok=True)
        where.symlink_to(target)
        changes.changes.append(("symlink", self._format_path(where), target))

    def _resolve_link(self, link: Path) -> Path:
        target = link.readlink()
        if target.is_absolute():
            return self._root / target.relative_to("/")
        return link.parent / target

    def _format_path(self, path: Path | None) -> str:
        return "" if path is None else f"/{path.relative_to(self._root)}"


def _find_template(name: str) -> str:
    stem, at, rest = name.partition("@")
    suffix = rest.rpartition(".")[2]
    return f"{stem}@.{suffix}" if at and rest != f".{suffix}" else ""


@contextmanager
def _translate_refusals() -> Iterator[None]:
    try:
        yield
    except UnitFileError as error:
        raise MethodError(_ERROR_NAMES.get(error.problem, INVALID_ARGUMENTS), str(error)) from error


class UnitFileMethods:
    """The methods over one machine's unit files; ``on_change`` is called after changed links."""

    def __init__(self, root: Path, files: UnitFileTree, on_change: Callable[[], None]) -> None:
        self._root = root
        self._files = files
        self._on_change = on_change

    def build_table(self) -> dict[str, MethodCallback]:
        """Return the methods by their D-Bus names."""
        return {
            "ListUnitFiles": self._handle_list,
            "GetUnitFileState": lambda call: (self._files.read_state(call.arguments[0]),),
            "EnableUnitFiles": self._handle_enable,
            "ReenableUnitFiles": self._handle_reenable,
            "DisableUnitFiles": self._handle_disable,
            "MaskUnitFiles": self._handle_mask,
            "UnmaskUnitFiles": self._handle_unmask,
            "PresetUnitFiles": self._handle_preset,
        }

    def _handle_list(self, _call: MethodCall) -> ReplyValues:
        files = self._files
        listed = ((files.find_file(name), files.read_state(name)) for name in files.list_names())
        return ([(f"/{p.relative_to(self._root)}", state) for p, state in listed if p],)

    def _handle_enable(self, call: MethodCall) -> ReplyValues:
        names, runtime, _force = call.arguments
        return self._build_reply(self._files.enable_units(names, runtime=runtime))

    def _handle_reenable(self, call: MethodCall) -> ReplyValues:
        names, runtime, _force = call.arguments
        removed = self._files.disable_units(names, runtime=runtime)
        changes = self._files.enable_units(names, runtime=runtime)
        return self._build_reply(
            UnitFileChanges(removed.changes + changes.changes, changes.has_install_info)
        )

    def _handle_preset(self, call: MethodCall) -> ReplyValues:
        names, runtime, _force = call.arguments
        return self._build_reply(self._files.preset_units(names, runtime=runtime))

    def _handle_disable(self, call: MethodCall) -> ReplyValues:
        names, runtime = call.arguments
        return (self._announce_changes(self._files.disable_units(names, runtime=runtime)),)

    def _handle_mask(self, call: MethodCall) -> ReplyValues:
        names, runtime, force = call.arguments
        return (
            self._announce_changes(self._files.mask_units(names, runtime=runtime, force=force)),
        )

    def _handle_unmask(self, call: MethodCall) -> ReplyValues:
        names, runtime = call.arguments
        return (self._announce_changes(self._files.unmask_units(names, runtime=runtime)),)

    def _build_reply(self, changes: UnitFileChanges) -> ReplyValues:
        return (changes.has_install_info, self._announce_changes(changes))

    def _announce_changes(self, changes: UnitFileChanges) -> list[tuple[str, str, str]]:
        if changes.changes:
            self._on_change()
        return changes.changes
