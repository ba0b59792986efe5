"""Unit files and the links that enable them, as systemctl handles them (systemd's install.c).

Everything that depends on [Install] sections, aliases, templates, masks and presets is computed
here: for systems whose systemd does not run, and to predict what a running one will do. Nothing is
written: plans name the links to make and to remove.
"""

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol, TypeVar

from treenail import errors
from treenail.units import unit_install

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

ENABLED = ("enabled", "enabled-runtime")
DEPENDENCY_SUFFIXES = (".wants", ".requires", ".upholds")
"""The suffixes of directories with links to the units that another one needs."""

_MASK = "/dev/null"
_MAX_LINKS = 64  # UNIT_FILE_FOLLOW_SYMLINK_MAX
_LIBRARY = re.compile(r"libsystemd-shared-(\d+)")
_LIBRARY_DIRECTORIES = ("/usr/lib/systemd", "/usr/lib64/systemd")
_UPHELD_BY_VERSION = 254  # the first systemd with UpheldBy=
_T = TypeVar("_T")


class UnitProblem(Enum):
    """The reason why systemctl refuses to enable a unit."""

    NOT_FOUND = auto()
    MASKED = auto()
    ALIAS = auto()
    """The name is an alias that an administrator or ``systemctl enable`` made."""
    EXISTS = auto()
    """Something else is at the path of an ``Alias=``."""
    TEMPLATE = auto()
    INVALID_ALIAS = auto()
    INVALID = auto()


class UnitFileError(errors.UnitError):
    """systemctl refuses the operation."""

    def __init__(self, message: str, problem: UnitProblem, *, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.problem = problem


_IGNORED_BY_PRESETS = (UnitProblem.TEMPLATE, UnitProblem.INVALID)


@dataclass(frozen=True, slots=True)
class UnitLinks:
    """Links to make, by path with their targets, and links to remove."""

    made: dict[str, str]
    removed: tuple[str, ...] = ()

    def as_changes(self) -> dict[str, "FileChange"]:
        """Return the changes for `ChangedFiles`."""
        return {
            **dict.fromkeys(self.removed),
            **{path: SymbolicLink(target) for path, target in self.made.items()},
        }


class FileSource(Protocol):
    """The files of a machine: `HostFiles`, or `ChangedFiles`."""

    def read_file(self, path: str) -> bytes | None:
        """Return the content, links followed; None without a file."""

    def read_link(self, path: str) -> str | None:
        """Return the target of a symbolic link; None for another entry or none."""

    def has_entry(self, path: str) -> bool:
        """Return whether an entry exists, a dangling link included."""

    def list_directory(self, path: str) -> Sequence[str]:
        """Return the names in a directory, sorted; empty without one."""


@dataclass(frozen=True, slots=True)
class SymbolicLink:
    target: str


FileChange = bytes | SymbolicLink | None
"""A new file, a new link, or None for a removed entry."""


class ChangedFiles:
    """Files as they will be after some changes. It remembers what it has read."""

    def __init__(
        self, base: "FileSource | None" = None, changes: Mapping[str, FileChange] | None = None
    ) -> None:
        self._base = base
        self._changes = dict(changes or {})
        self._read: dict[tuple[str, str], Any] = {}
        self._added: dict[str, set[str]] = {}
        for added in [path for path, change in self._changes.items() if change is not None]:
            path = added
            while path not in {"", "/"}:
                directory, _, name = path.rpartition("/")
                self._added.setdefault(directory, set()).add(name)
                path = directory

    def read_file(self, path: str) -> bytes | None:
        for _ in range(_MAX_LINKS):
            target = self.read_link(path)
            if target is None:
                break
            path = _resolve_target(path, target)
        change = self._changes.get(path)
        if path in self._changes:
            return change if isinstance(change, bytes) else None
        return self._remember("read_file", path, None)

    def read_link(self, path: str) -> str | None:
        change = self._changes.get(path)
        if path in self._changes:
            return change.target if isinstance(change, SymbolicLink) else None
        return self._remember("read_link", path, None)

    def has_entry(self, path: str) -> bool:
        if path in self._changes:
            return self._changes[path] is not None
        return path in self._added or self._remember("has_entry", path, default=False)

    def list_directory(self, path: str) -> Sequence[str]:
        names = {*self._remember("list_directory", path, ()), *self._added.get(path, ())}
        return sorted(
            name for name in names if self._changes.get(f"{path}/{name}", b"") is not None
        )

    def _remember(self, method: str, path: str, default: _T) -> _T:
        key = (method, path)
        if key not in self._read:
            self._read[key] = getattr(self._base, method)(path) if self._base else default
        value: _T = self._read[key]
        return value


@dataclass(slots=True)
class _Unit:
    """A unit whose file was searched; a link leads to ``target``."""

    name: str
    path: str
    text: str = ""
    target: str = ""
    is_masked: bool = False
    is_linked: bool = False
    """The link leads out of the directories of units."""
    install: unit_install.InstallSection = field(default_factory=unit_install.InstallSection)


class UnitFileReader:
    """Computes states and links from unit files. Raises `UnitError` and `FileError`."""

    def __init__(self, files: FileSource) -> None:
        self.files = files

    def change_files(self, changes: Mapping[str, FileChange]) -> "UnitFileReader":
        """Return the reader of the same files after the changes; both remember what they read."""
        return UnitFileReader(ChangedFiles(self.files, changes))

    def find_unit_file(self, unit: str, *, search_path: Iterable[str] = SEARCH_PATH) -> str:
        """Return the path of the unit file, or of the file of its template; empty without one."""
        directories = tuple(search_path)
        for name in filter(None, (unit, unit_install.find_template_name(unit))):
            for directory in directories:
                if self.files.has_entry(f"{directory}/{name}"):
                    return f"{directory}/{name}"
        return ""

    def read_states(self, *units: str) -> dict[str, str]:
        """Return the states of ``systemctl is-enabled``; empty without a unit file."""
        reader = self.change_files({})
        return {unit: reader._read_state(unit) for unit in units}  # noqa: SLF001 - the same class

    def read_install(self, unit: str) -> unit_install.InstallSection | None:
        """Return what enabling the unit does; None if it has no file, or cannot be enabled."""
        units, error = self._follow_links(unit)
        return None if error or units[-1].is_masked else units[-1].install

    def find_missing_links(self, links: UnitLinks) -> tuple[str, ...]:
        """Return the links to make that do not exist."""
        return tuple(
            path for path, text in links.made.items() if self.files.read_link(path) != text
        )

    def find_missing_also(self, unit: str) -> list[str]:
        """Return the units without a file that enabling the unit would enable, by ``Also=``."""
        names, missing = [unit], list[str]()
        for name in names:
            chain, error = self._follow_links(name)
            missing += [name] if error else []
            also = [] if error else _list_also(chain)
            names += [other for other in also if other not in names]
        return missing

    def plan_enable(
        self,
        *units: str,
        excluded: AbstractSet[str] = frozenset(),
        follows_also: bool = True,
        is_preset: bool = False,
    ) -> UnitLinks:
        """Return the links of ``systemctl enable``, existing ones included.

        ``excluded`` units are not enabled where another one names them in ``Also=``; without
        ``follows_also`` none is.
        """
        made: dict[str, str] = {}
        queue: dict[str, _Unit | None] = {}
        for unit in units:
            chain = self._follow_enabled(unit)
            queue[chain[-1].name] = chain[-1]
            for name in _list_also(chain):
                queue.setdefault(name)
        visited = set(excluded) - {unit.name for unit in queue.values() if unit}
        while queue:
            name = next(iter(queue))
            unit_file = queue.pop(name)
            if name in visited:
                continue
            visited.add(name)
            if unit_file is None:
                # systemctl skips what it cannot enable, and an alias that it has just made.
                if not follows_also or f"{unit_install.UNIT_DIRECTORY}/{name}" in made:
                    continue
                chain, error = self._follow_links(name, can_follow_config=False)
                for other in _list_also(chain):
                    queue.setdefault(other)
                if error or chain[-1].is_masked:
                    continue
                unit_file = chain[-1]
                if unit_file.name != name:
                    queue.setdefault(unit_file.name, unit_file)
                    continue
            self._add_links(unit_file, made, is_preset=is_preset)
        return UnitLinks(made)

    def _follow_enabled(self, unit: str) -> list[_Unit]:
        """Return the unit and those that its aliases lead to; raise why it cannot be enabled."""
        chain, error = self._follow_links(unit)
        if error:
            raise error
        if chain[-1].is_masked:
            raise UnitFileError(
                f"cannot enable {unit}: it is masked",
                UnitProblem.MASKED,
                remedy=f"remove {chain[-1].path}, or set mask: false in the config",
            )
        if any(_is_config(alias.path) for alias in chain[:-1]):
            raise UnitFileError(
                f"cannot enable {unit}: it is an alias of {chain[-1].name}",
                UnitProblem.ALIAS,
                remedy=f"enable {chain[-1].name} instead",
            )
        return chain

    def plan_disable(self, *units: str, is_preset: bool = False) -> UnitLinks:
        """Return the links that ``systemctl disable`` removes."""
        queue, visited = list(units), set[str]()
        disabled: set[str] = set()
        while queue:
            name = queue.pop(0)
            if name in visited:
                continue
            visited.add(name)
            chain, error = self._follow_links(name)
            queue += [unit.name for unit in chain]
            if error:
                disabled.add(name)
            elif not chain[-1].is_masked:
                disabled.add(chain[-1].name)
            # A preset disables the unit alone.
            queue += [] if is_preset else _list_also(chain)
        removed: dict[str, None] = {}
        links = list(self._list_links(unit_install.UNIT_DIRECTORY))
        while True:
            more = [
                path
                for path, text in links
                if path not in removed and self._is_disabled(path, text, disabled)
            ]
            if not more:
                return UnitLinks({}, tuple(removed))
            # A removed link may be an alias, to which other links lead.
            removed |= dict.fromkeys(more)
            disabled |= set(more)

    def plan_preset(self, *units: str) -> UnitLinks:
        """Return the links that ``systemctl preset`` makes and removes."""
        made: dict[str, str] = {}
        removed: list[str] = []
        for unit in units:
            chain, error = self._follow_links(unit)
            if error:
                raise error
            preset = self.read_preset(unit)
            if len(chain) > 1 or preset.is_enabled is None:
                continue  # systemctl leaves an alias to its unit
            if not preset.is_enabled:
                removed += self.plan_disable(unit, is_preset=True).removed
                continue
            instances = [
                unit_install.make_instance_name(unit, name) for name in preset.instances
            ] or [unit]
            made |= self.plan_enable(*instances, is_preset=True).made
        return UnitLinks(made, tuple(dict.fromkeys(path for path in removed if path not in made)))

    def read_preset(self, unit: str) -> unit_install.UnitPreset:
        """Read the preset of the unit."""
        return unit_install.parse_preset(
            map(self._read_text, self._list_files(PRESET_PATH, ".preset")), unit
        )

    def _read_state(self, name: str) -> str:
        chain, error = self._follow_links(name)
        if error:
            return ""
        unit = chain[-1]
        if unit.is_masked:
            return "masked-runtime" if unit.path.startswith(RUNTIME_DIRECTORY) else "masked"
        is_instance = bool(unit_install.get_instance(unit.name))
        if name != posixpath.basename(unit.path) and not is_instance:
            return "alias"
        known = {unit.name, _get_default_instance(unit), *unit.install.aliases}
        state = self._find_enabling_link(unit, known.__contains__)
        if state:
            return state
        if self._find_enabling_link(unit, lambda _: True):
            return "indirect"
        if unit.install.has_links:
            return "disabled"
        return "indirect" if unit.install.also else "static"

    def _find_enabling_link(self, unit: _Unit, is_known: Callable[[str], bool]) -> str:
        """Return the state of a unit with a link to it; empty without one."""
        states: dict[str, None] = {}
        is_below = False
        for directory in SEARCH_PATH:
            state = {unit_install.UNIT_DIRECTORY: "", RUNTIME_DIRECTORY: "-runtime"}.get(directory)
            found = {
                kind
                for path, text in self._list_links(directory, is_recursive=False)
                if (kind := _classify_link(unit, path, text, is_below=is_below)) == "linked"
                or (kind and is_known(_name(path)))
            }
            if state is None and "enabled" in found:
                # A link of the vendor enables an instance, and is an alias of another unit.
                states["static" if unit_install.get_instance(unit.name) else ""] = None
            elif state is not None and found:
                states[f"{min(found)}{state}"] = None
            is_below = is_below or unit.path.startswith(f"{directory}/")
        order = ("enabled", "enabled-runtime", "static", "linked", "linked-runtime")
        return next((state for state in order if state in states), "")

    def _add_links(self, unit: _Unit, made: dict[str, str], *, is_preset: bool) -> None:
        """Add the links of the unit. systemctl makes those that it can make in any case."""
        install, top = unit.install, unit_install.UNIT_DIRECTORY
        if posixpath.dirname(unit.path) not in SEARCH_PATH:
            self._add_link(f"{top}/{unit.name}", unit.path, made)
        kinds = (install.aliases, install.wanted_by, install.required_by, install.upheld_by)
        has_result = False
        for suffix, values in zip(("", *DEPENDENCY_SUFFIXES), kinds, strict=True):
            choose = partial(self._choose_dependency_link, suffix) if suffix else self._choose_alias
            problems: list[UnitFileError] = []
            is_done = False
            for value in values:
                try:
                    name = choose(unit, value)
                    if name:
                        self._add_link(f"{top}/{name}", unit.path, made, is_replaced=bool(suffix))
                        is_done = True
                except UnitFileError as error:
                    if not (is_preset and error.problem in _IGNORED_BY_PRESETS):
                        problems.append(error)
            # The result of the first kind with a link is that of systemctl.
            if problems and not has_result:
                raise problems[0]
            has_result = has_result or is_done

    def _choose_alias(self, unit: _Unit, alias: str) -> str:
        """Return the name of the link; empty for the unit itself."""
        name = unit_install.expand_specifiers(alias, _get_default_instance(unit))
        instance = unit_install.get_instance(unit.name)
        if unit_install.is_template(name) and instance:
            name = unit_install.make_instance_name(name, instance)
        if "/" not in name and not unit_install.is_valid_alias(name, unit.name):
            raise UnitFileError(
                f"cannot enable {unit.name}: {name} cannot be its alias",
                UnitProblem.INVALID_ALIAS,
            )
        return "" if name == unit.name else name

    def _choose_dependency_link(self, suffix: str, unit: _Unit, value: str) -> str:
        """Return the link in the directory of the unit that wants this one."""
        default = _get_default_instance(unit)
        target = unit_install.expand_specifiers(value, default)
        if not unit_install.is_unit_name(target):
            raise UnitFileError(
                f"cannot enable {unit.name}: {target} is no name of a unit", UnitProblem.INVALID
            )
        name = unit.name
        if unit_install.is_template(name) and unit.install.default_instance:
            name = default
            instance = self._find_unit(name)
            if instance and instance.is_masked:
                raise UnitFileError(
                    f"cannot enable {unit.name}: {name} is masked", UnitProblem.MASKED
                )
        elif unit_install.is_template(name) and unit_install.get_instance(target) is None:
            raise UnitFileError(
                f"cannot enable {name}: it is a template without DefaultInstance=",
                UnitProblem.TEMPLATE,
                remedy="enable an instance, such as "
                f"{unit_install.make_instance_name(name, 'NAME')}",
            )
        return f"{target}{suffix}/{name}"

    def _add_link(
        self, path: str, target: str, made: dict[str, str], *, is_replaced: bool = False
    ) -> None:
        text = made.get(path) or self.files.read_link(path)
        if text is not None and _are_equivalent(path, text, target):
            made[path] = text
        elif (text is None and not self.files.has_entry(path)) or (
            text is not None and is_replaced
        ):
            made[path] = target
        else:
            raise UnitFileError(
                f"cannot make the link {path} to {target}: {path} exists",
                UnitProblem.EXISTS,
                remedy=f"move {path} away, or remove Alias= from the unit",
            )

    def _is_disabled(self, path: str, text: str, disabled: AbstractSet[str]) -> bool:
        name = _name(path)
        if not unit_install.is_unit_name(name):
            return False
        if not {name, unit_install.find_template_name(name)}.isdisjoint(disabled):
            return True
        target = _resolve_target(path, text)
        for _ in range(_MAX_LINKS):
            link = None if target in disabled else self.files.read_link(target)
            if link is None:
                break
            target = _resolve_target(target, link)
        return target in disabled or _name(target) in disabled

    def _follow_links(
        self, name: str, *, can_follow_config: bool = True
    ) -> tuple[list[_Unit], UnitFileError | None]:
        """Return the unit and those that its aliases lead to; the last one is no link.

        With an error the last one is the last that was reached.
        """
        chain: list[_Unit] = []
        try:
            unit = self._find_unit(name)
            if unit is None:
                return [], _make_not_found(name)
            chain.append(unit)
            for _ in range(_MAX_LINKS):
                if not unit.target or unit.is_masked:
                    return chain, None
                if _is_config(unit.path) and not can_follow_config:
                    break
                target = _name(unit.target)
                instance = unit_install.get_instance(unit.name)
                if instance and unit_install.is_template(target):
                    target = unit_install.make_instance_name(target, instance)
                if unit.is_linked or target == unit.name:
                    self._load_target(unit)
                    continue
                following = self._find_unit(target)
                if following is None:
                    chain.append(_Unit(target, ""))
                    return chain, _make_not_found(target)
                unit = following
                chain.append(unit)
        except UnitFileError as error:
            return chain, error
        return chain, UnitFileError(
            f"cannot enable {name}: its links lead to no unit file", UnitProblem.INVALID
        )

    def _find_unit(self, name: str) -> _Unit | None:
        if not unit_install.is_unit_name(name):
            raise UnitFileError(f"{name} is no name of a unit", UnitProblem.INVALID)
        path = self.find_unit_file(name)
        if not path:
            return None
        unit = _Unit(name, path)
        self._load(unit, path)
        if not unit.is_masked:
            # The drop-ins of a link count for the file that it leads to.
            texts = [
                *([] if unit.target else [unit.text]),
                *map(self._read_text, self._list_dropins(name)),
            ]
            unit.install = self._parse(texts, name)
        return unit

    def _load(self, unit: _Unit, path: str) -> None:
        link = self.files.read_link(path)
        unit.target, unit.is_linked = "", False
        if link is not None:
            unit.target = _resolve_target(path, link)
            unit.is_masked = unit.target == _MASK or self.files.read_file(unit.target) == b""
            unit.is_linked = not unit.target.startswith(tuple(f"{top}/" for top in SEARCH_PATH))
            if not unit.is_linked and not unit_install.is_valid_alias(
                _name(path), _name(unit.target)
            ):
                raise UnitFileError(
                    f"cannot enable {unit.name}: {path} leads to {unit.target}",
                    UnitProblem.INVALID,
                    remedy=f"remove the link: rm {path}",
                )
            return
        content = self.files.read_file(path)
        # An empty unit file masks as a link to /dev/null does (systemd.unit(5)).
        unit.is_masked = content == b""
        unit.text = (content or b"").decode("utf-8", "replace")

    def _load_target(self, unit: _Unit) -> None:
        """Load the file that a link of the same name, or out of the unit directories, leads to."""
        unit.path = unit.target
        if not self.files.has_entry(unit.path):
            raise _make_not_found(unit.name)
        self._load(unit, unit.path)
        if not unit.target and not unit.is_masked:
            texts = [*map(self._read_text, self._list_dropins(unit.name)), unit.text]
            unit.install = self._parse(texts, unit.name)

    def _parse(self, texts: Iterable[str], name: str) -> unit_install.InstallSection:
        install = unit_install.parse_install(texts, name)
        return install if self._knows_upheld_by() else replace(install, upheld_by=())

    def _knows_upheld_by(self) -> bool:
        versions = (
            int(match[1])
            for directory in _LIBRARY_DIRECTORIES
            for name in self.files.list_directory(directory)
            if (match := _LIBRARY.match(name))
        )
        return max(versions, default=_UPHELD_BY_VERSION) >= _UPHELD_BY_VERSION

    def _list_dropins(self, unit: str) -> list[str]:
        names = filter(None, (unit, unit_install.find_template_name(unit)))
        directories = [f"{top}/{name}.d" for name in names for top in SEARCH_PATH]
        return self._list_files(directories, ".conf")

    def _list_files(self, directories: Iterable[str], suffix: str) -> list[str]:
        """Return the files in the order of their names; of equal names the first counts."""
        # In whichever directory they are (systemd.unit(5), systemd.preset(5)).
        paths: dict[str, str] = {}
        for directory in directories:
            for name in self.files.list_directory(directory):
                if name.endswith(suffix):
                    paths.setdefault(name, f"{directory}/{name}")
        return [paths[name] for name in sorted(paths)]

    def _read_text(self, path: str) -> str:
        return (self.files.read_file(path) or b"").decode("utf-8", "replace")

    def _list_links(self, top: str, *, is_recursive: bool = True) -> Iterator[tuple[str, str]]:
        """Yield the links in the directory and below, with their targets.

        Without ``is_recursive`` of the directories below only .wants and similar count.
        """
        for name in self.files.list_directory(top):
            path = f"{top}/{name}"
            if name.startswith("."):
                continue  # systemd reads no hidden files
            text = self.files.read_link(path)
            if text is not None:
                yield path, text
            elif is_recursive or (name.endswith(DEPENDENCY_SUFFIXES) and top in SEARCH_PATH):
                yield from self._list_links(path, is_recursive=is_recursive)


def _get_default_instance(unit: _Unit) -> str:
    """Return the unit, or the default instance of a template."""
    default = unit.install.default_instance
    return unit_install.make_instance_name(unit.name, default) if default else unit.name


def is_unit_path(path: str) -> bool:
    """Return whether systemd reads the path for units, their links, drop-ins or presets."""
    return path.startswith(tuple(f"{directory}/" for directory in (*SEARCH_PATH, *PRESET_PATH)))


def _name(path: str) -> str:
    return posixpath.basename(path)


def _classify_link(unit: _Unit, path: str, text: str, *, is_below: bool) -> str:
    """Return whether the unit is enabled or linked by the link; empty for another unit's link.

    ``is_below``: the directory comes after that of the unit file.
    """
    name = _name(path)
    if posixpath.dirname(path).endswith(DEPENDENCY_SUFFIXES):
        is_enabling = unit.name in {name, unit_install.find_template_name(name)}
        return "enabled" if is_enabling else ""
    leads_to_unit, has_name = _name(text) == unit.name, not is_below and name == unit.name
    if leads_to_unit and has_name:
        return "linked"
    return "enabled" if leads_to_unit or has_name else ""


def _is_config(path: str) -> bool:
    return posixpath.dirname(path) in {unit_install.UNIT_DIRECTORY, RUNTIME_DIRECTORY}


def _resolve_target(link: str, text: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(link), text))


def _are_equivalent(link: str, first: str, second: str) -> bool:
    """Return whether two targets of a link are the same file, or the same unit."""
    paths = [_resolve_target(link, text) for text in (first, second)]
    prefixes = tuple(f"{directory}/" for directory in SEARCH_PATH)
    return paths[0] == paths[1] or (
        _name(paths[0]) == _name(paths[1]) and all(path.startswith(prefixes) for path in paths)
    )


def _list_also(chain: Iterable[_Unit]) -> list[str]:
    names: list[str] = []
    for unit in chain:
        for name in unit.install.also:
            # Only a running systemd knows the other specifiers.
            with suppress(unit_install.SpecifierError):
                names.append(unit_install.expand_specifiers(name, unit.name))
    return names


def _make_not_found(unit: str) -> UnitFileError:
    return UnitFileError(f"cannot enable {unit}: no such unit file", UnitProblem.NOT_FOUND)


class UnitStateSource(Protocol):
    """A source of unit states: `Systemd`, or `UnitFileReader` for a system that does not run."""

    def read_states(self, *units: str) -> Mapping[str, str]:
        """Return the states as ``systemctl is-enabled`` prints them; empty without a unit file."""
