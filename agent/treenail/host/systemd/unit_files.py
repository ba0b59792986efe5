"""Unit files below a root and the links that enable them, as systemctl --root handles them.

For machines whose systemd does not run. Plans name the links to make and to remove, and the caller
applies them in a transaction that can be undone.
"""

import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from treenail import errors, unit_install
from treenail.host.filesystem.atomic_files import HostFiles

RUNTIME_DIRECTORY = "/run/systemd/system"
# The order of systemd.unit(5), without directories that only a running systemd fills.
SEARCH_PATH = (
    unit_install.UNIT_DIRECTORY,
    RUNTIME_DIRECTORY,
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
VENDOR_SEARCH_PATH = SEARCH_PATH[2:]
PRESET_PATH = tuple(directory + "-preset" for directory in SEARCH_PATH)

_MASK = "/dev/null"
_DEPENDENCY_SUFFIXES = (".wants", ".requires", ".upholds")
_MAX_ALIASES = 8


@dataclass(frozen=True, slots=True)
class UnitLinks:
    """Links to make, by path with their targets, and links to remove."""

    made: dict[str, str]
    removed: tuple[str, ...] = ()


class UnitFileReader:
    """Reads unit files below a root. Raises `UnitError` and `FileError`."""

    def __init__(self, files: HostFiles) -> None:
        self._files = files

    def find_unit_file(self, unit: str, *, search_path: Iterable[str] = SEARCH_PATH) -> str:
        """Return the path of the unit file, or of the file of its template; empty without one."""
        names = [name for name in (unit, unit_install.find_template_name(unit)) if name]
        for name in names:
            for directory in search_path:
                path = f"{directory}/{name}"
                if self._files.has_entry(path):
                    return path
        return ""

    def read_states(self, *units: str) -> dict[str, str]:
        """Return the states of ``systemctl is-enabled``; empty without a unit file."""
        links = {
            "enabled": list(self._list_links(unit_install.UNIT_DIRECTORY)),
            "enabled-runtime": list(self._list_links(RUNTIME_DIRECTORY)),
        }

        def enabled(unit: str) -> str:
            for state, state_links in links.items():
                if any(self._is_enabling_link(link, text, unit) for link, text in state_links):
                    return state
            return ""

        return {unit: self._read_state(unit, enabled) for unit in units}

    def find_named_units(
        self, units: Iterable[str], written: Mapping[str, str]
    ) -> dict[str, frozenset[str]]:
        """Return the other units that each unit and those units name in ``Also=``.

        ``written`` is the text of each unit file and drop-in that is written later, by path. What
        the present files name counts too.
        """
        named: dict[str, frozenset[str]] = {}

        def read(unit: str) -> frozenset[str]:
            if unit not in named:
                named[unit] = frozenset(self._list_also(unit, written))
            return named[unit]

        closed: dict[str, frozenset[str]] = {}
        for unit in units:
            names, new = {unit}, [unit]
            while new:
                new = [name for added in new for name in read(added) if name not in names]
                names |= set(new)
            if names != {unit}:
                closed[unit] = frozenset(names - {unit})
        return closed

    def plan_enable(self, *units: str) -> UnitLinks:
        """Return the links of ``systemctl enable``, existing ones included."""
        made: dict[str, str] = {}
        visited: set[str] = set()
        for unit in units:
            self._collect_enable_links(unit, made, visited)
        return UnitLinks(made)

    def plan_disable(self, *units: str) -> UnitLinks:
        """Return the links that ``systemctl disable`` removes."""
        disabled: set[str] = set()
        for unit in units:
            self._collect_disabled_names(unit, disabled)
        removed: list[str] = []
        links = list(self._list_links(unit_install.UNIT_DIRECTORY))
        while True:
            more = [
                (path, posixpath.basename(path))
                for path, text in links
                if path not in removed
                and text != _MASK
                and {posixpath.basename(path), posixpath.basename(text)} & disabled
            ]
            if not more:
                return UnitLinks({}, tuple(removed))
            removed += [path for path, _ in more]
            # A removed link may be an alias, which other links name.
            disabled |= {name for _, name in more}

    def plan_preset(self, *units: str) -> UnitLinks:
        """Return the links that ``systemctl preset`` makes and removes."""
        made: dict[str, str] = {}
        removed: list[str] = []
        for unit in units:
            preset = self.read_preset(unit)
            if not preset.is_enabled:
                removed += self.plan_disable(unit).removed
                continue
            instances = [
                unit_install.make_instance_name(unit, name) for name in preset.instances
            ] or [unit]
            made |= self.plan_enable(*instances).made
        return UnitLinks(made, tuple(dict.fromkeys(path for path in removed if path not in made)))

    def read_preset(self, unit: str) -> unit_install.UnitPreset:
        """Read the preset of the unit; of two preset files with one name the first counts."""
        paths: dict[str, str] = {}
        for directory in PRESET_PATH:
            for name in self._files.list_directory(directory):
                if name.endswith(".preset"):
                    paths.setdefault(name, f"{directory}/{name}")
        # Preset files are read in the order of their names, in whichever directory they are
        # (systemd.preset(5)).
        return unit_install.parse_preset(
            (self._read_text(paths[name]) for name in sorted(paths)), unit
        )

    def _read_state(self, unit: str, enabled: Callable[[str], str]) -> str:
        path = self.find_unit_file(unit)
        if not path:
            return ""
        text = self._files.read_link(path)
        runtime = "-runtime" if path.startswith(RUNTIME_DIRECTORY) else ""
        # An empty unit file masks as a link to /dev/null does (systemd.unit(5)).
        if text == _MASK or (text is None and self._files.read_file(path) == b""):
            return f"masked{runtime}"
        if text is not None and posixpath.basename(text) not in {
            unit,
            unit_install.find_template_name(unit),
        }:
            return "alias"
        install = self._read_install(unit, path)
        # The state of a template is that of its default instance.
        default = (
            unit_install.make_instance_name(unit, install.default_instance)
            if install.default_instance
            else unit
        )
        state = enabled(default)
        if unit_install.is_template(unit) and enabled(unit) and (default == unit or not state):
            return "indirect"
        if state:
            return state
        if text is not None and path.startswith((unit_install.UNIT_DIRECTORY, RUNTIME_DIRECTORY)):
            return f"linked{runtime}"
        if install.has_links:
            return "disabled"
        return "indirect" if install.also else "static"

    def _collect_enable_links(self, unit: str, made: dict[str, str], visited: set[str]) -> None:
        unit, path = self._resolve_alias(unit)
        if unit in visited:
            return
        visited.add(unit)
        install = self._read_install(unit, path)
        for alias in install.aliases:
            name = unit_install.expand_specifiers(alias, unit)
            if name != unit:
                self._check_alias(f"{unit_install.UNIT_DIRECTORY}/{name}", path)
                made[f"{unit_install.UNIT_DIRECTORY}/{name}"] = path
        for suffix, targets in zip(
            _DEPENDENCY_SUFFIXES,
            (install.wanted_by, install.required_by, install.upheld_by),
            strict=True,
        ):
            for target in targets:
                name = unit_install.expand_specifiers(target, unit)
                link_name = self._build_link_name(unit, install, name)
                made[f"{unit_install.UNIT_DIRECTORY}/{name}{suffix}/{link_name}"] = path
        for other in install.also:
            if self.find_unit_file(unit_install.expand_specifiers(other, unit)):
                self._collect_enable_links(
                    unit_install.expand_specifiers(other, unit), made, visited
                )

    def _build_link_name(self, unit: str, install: unit_install.InstallSection, target: str) -> str:
        """Return the name of the link in the directory of the target."""
        if not unit_install.is_template(unit) or unit_install.is_template(target):
            return unit
        if not install.default_instance:
            raise errors.UnitError(
                f"cannot enable {unit}: it is a template without DefaultInstance=",
                remedy="enable an instance, such as "
                f"{unit_install.make_instance_name(unit, 'NAME')}",
            )
        return unit_install.make_instance_name(
            unit, unit_install.expand_specifiers(install.default_instance, unit)
        )

    def _check_alias(self, link: str, path: str) -> None:
        text = self._files.read_link(link)
        name = posixpath.basename(link)
        if text != path and self._files.has_entry(link):
            raise errors.UnitError(
                f"cannot make the alias {name} of {path}: {link} exists",
                remedy=f"move {link} away, or remove Alias= from the unit",
            )

    def _collect_disabled_names(self, unit: str, disabled: set[str]) -> None:
        if unit in disabled:
            return
        path = self.find_unit_file(unit)
        text = self._files.read_link(path) if path else None
        if text == _MASK:
            return
        disabled.add(unit)
        if path:
            for other in self._read_install(unit, path).also:
                self._collect_disabled_names(unit_install.expand_specifiers(other, unit), disabled)

    def _resolve_alias(self, unit: str) -> tuple[str, str]:
        """Return the unit that an alias names, and its file."""
        name = unit
        for _ in range(_MAX_ALIASES):
            path = self.find_unit_file(name)
            if not path:
                raise errors.UnitError(f"cannot enable {unit}: no such unit file")
            text = self._files.read_link(path)
            if text == _MASK:
                raise errors.UnitError(
                    f"cannot enable {unit}: it is masked",
                    remedy=f"remove the link {path}, or set mask: false in the config",
                )
            target = posixpath.basename(text or "")
            if not text or target in {name, unit_install.find_template_name(name)}:
                return name, path
            name = (
                unit_install.make_instance_name(target, _get_instance(name))
                if unit_install.is_template(target)
                else target
            )
        raise errors.UnitError(f"cannot enable {unit}: more than {_MAX_ALIASES} aliases lead to it")

    def _read_install(self, unit: str, path: str) -> unit_install.InstallSection:
        return unit_install.parse_install(
            [self._read_text(path), *map(self._read_text, self._list_dropins(unit))]
        )

    def _list_also(self, unit: str, written: Mapping[str, str]) -> Iterator[str]:
        """Yield what the present files and the later ones name in ``Also=``."""
        path = self.find_unit_file(unit)
        present = unit_install.InstallSection()
        # A mask is no regular file. What cannot be read is found after the update, if at all.
        with suppress(errors.FileError):
            present = self._read_install(unit, path) if path else present
        names = [name for name in (unit, unit_install.find_template_name(unit)) if name]
        prefixes = tuple(f"{unit_install.UNIT_DIRECTORY}/{name}.d/" for name in names)
        files = {f"{unit_install.UNIT_DIRECTORY}/{name}" for name in names}
        later = unit_install.parse_install(
            text
            for written_path, text in written.items()
            if written_path in files or written_path.startswith(prefixes)
        )
        for name in (*present.also, *later.also):
            # Only a running systemd knows the other specifiers.
            with suppress(errors.UnitError):
                yield unit_install.expand_specifiers(name, unit)

    def _list_dropins(self, unit: str) -> list[str]:
        paths: dict[str, str] = {}
        for name in (unit, unit_install.find_template_name(unit)):
            for directory in SEARCH_PATH if name else ():
                for file in self._files.list_directory(f"{directory}/{name}.d"):
                    if file.endswith(".conf"):
                        paths.setdefault(file, f"{directory}/{name}.d/{file}")
        return [paths[file] for file in sorted(paths)]

    def _read_text(self, path: str) -> str:
        return (self._files.read_file(path) or b"").decode("utf-8", "replace")

    def _list_links(self, top: str) -> Iterator[tuple[str, str]]:
        """Yield the links in the directory and in its .wants and similar, with their targets."""
        for name in self._list_visible_names(top):
            path = f"{top}/{name}"
            text = self._files.read_link(path)
            if text is not None:
                yield path, text
            elif name.endswith(_DEPENDENCY_SUFFIXES):
                for link in self._list_visible_names(path):
                    text = self._files.read_link(f"{path}/{link}")
                    if text is not None:
                        yield f"{path}/{link}", text

    def _list_visible_names(self, directory: str) -> Iterator[str]:
        """Yield the names that systemd reads: hidden files are not."""
        return (name for name in self._files.list_directory(directory) if not name.startswith("."))

    def _is_enabling_link(self, link: str, text: str, unit: str) -> bool:
        """Return whether enabling the unit makes the link; a link to itself does not count."""
        name, target = posixpath.basename(link), posixpath.basename(text)
        if posixpath.dirname(link).endswith(_DEPENDENCY_SUFFIXES):
            return unit in {name, target}
        return name != unit and target == unit and text != _MASK


def _get_instance(unit: str) -> str:
    return unit.partition("@")[2].rpartition(".")[0]


class UnitStateSource(Protocol):
    """A source of unit states: `Systemd`, or `UnitFileReader` for a system that does not run."""

    def read_states(self, *units: str) -> Mapping[str, str]:
        """Return the states as ``systemctl is-enabled`` prints them; empty without a unit file."""
