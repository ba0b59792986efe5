"""Unit files below a root, and the links that enable them: what systemctl --root does.

Nothing is written here: the answers are the links to make and to remove, so that whoever makes
them can undo it. For machines whose systemd can't be asked, because it does not run.
"""

import posixpath
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from treenail.errors import UnitError
from treenail.host.filesystem.files import Files
from treenail.host.systemd.unit_install import (
    Install,
    Preset,
    expand,
    instance_of,
    is_template,
    read_install,
    read_preset,
    template,
)

CONFIG = "/etc/systemd/system"
RUNTIME = "/run/systemd/system"
SEARCHED = (
    CONFIG,
    RUNTIME,
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
PRESETS = tuple(directory + "-preset" for directory in SEARCHED)

_MASK = "/dev/null"
_LINKED_FROM = (".wants", ".requires", ".upholds")
_ALIASES_LIMIT = 8


@dataclass(frozen=True, slots=True)
class Links:
    """Links to have, by path, with what they say; and links to have no more."""

    made: dict[str, str]
    removed: tuple[str, ...] = ()


class Units:
    """Reads unit files below a root. Raises `UnitError` and `FileError`."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def find(self, unit: str, *, searched: Iterable[str] = SEARCHED) -> str:
        """The path of the unit's file, or of its template's; empty without one."""
        names = [name for name in (unit, template(unit)) if name]
        for name in names:
            for directory in searched:
                path = f"{directory}/{name}"
                if self._files.is_there(path):
                    return path
        return ""

    def states(self, *units: str) -> dict[str, str]:
        """As ``systemctl is-enabled``, such as ``enabled`` or ``static``; empty without a file."""
        links = {
            "enabled": list(self._links(CONFIG)),
            "enabled-runtime": list(self._links(RUNTIME)),
        }

        def enabled(unit: str) -> str:
            for state, found in links.items():
                if any(self._enables(link, text, unit) for link, text in found):
                    return state
            return ""

        return {unit: self._state(unit, enabled) for unit in units}

    def enabling(self, *units: str) -> Links:
        """The links that ``systemctl enable`` would make, those that are there among them."""
        made: dict[str, str] = {}
        done: set[str] = set()
        for unit in units:
            self._enable(unit, made, done)
        return Links(made)

    def disabling(self, *units: str) -> Links:
        """The links that ``systemctl disable`` would remove."""
        gone: set[str] = set()
        for unit in units:
            self._names_to_disable(unit, gone)
        removed: list[str] = []
        links = list(self._links(CONFIG))
        while True:
            more = [
                (path, posixpath.basename(path))
                for path, text in links
                if path not in removed
                and text != _MASK
                and {posixpath.basename(path), posixpath.basename(text)} & gone
            ]
            if not more:
                return Links({}, tuple(removed))
            removed += [path for path, _ in more]
            gone |= {name for _, name in more}

    def presetting(self, *units: str) -> Links:
        """The links that ``systemctl preset`` would make and remove."""
        made: dict[str, str] = {}
        removed: list[str] = []
        for unit in units:
            preset = self.preset(unit)
            if not preset.enable:
                removed += self.disabling(unit).removed
                continue
            instances = [instance_of(unit, name) for name in preset.instances] or [unit]
            made |= self.enabling(*instances).made
        return Links(made, tuple(dict.fromkeys(path for path in removed if path not in made)))

    def preset(self, unit: str) -> Preset:
        """What the preset files say of the unit; of two files of one name the first is read."""
        found: dict[str, str] = {}
        for directory in PRESETS:
            for name in self._files.names(directory):
                if name.endswith(".preset"):
                    found.setdefault(name, f"{directory}/{name}")
        return read_preset((self._text(found[name]) for name in sorted(found)), unit)

    def _state(self, unit: str, enabled: Callable[[str], str]) -> str:
        path = self.find(unit)
        if not path:
            return ""
        text = self._files.link_text(path)
        runtime = "-runtime" if path.startswith(RUNTIME) else ""
        if text == _MASK or (text is None and self._files.read(path) == b""):
            return f"masked{runtime}"
        if text is not None and posixpath.basename(text) not in {unit, template(unit)}:
            return "alias"
        install = self._install(unit, path)
        # Of a template the default instance counts; other instances are something else.
        default = instance_of(unit, install.default_instance) if install.default_instance else unit
        state = enabled(default)
        if is_template(unit) and enabled(unit) and (default == unit or not state):
            return "indirect"
        if state:
            return state
        if text is not None and path.startswith((CONFIG, RUNTIME)):
            return f"linked{runtime}"
        if install.linked:
            return "disabled"
        return "indirect" if install.also else "static"

    def _enable(self, unit: str, made: dict[str, str], done: set[str]) -> None:
        unit, path = self._followed(unit)
        if unit in done:
            return
        done.add(unit)
        install = self._install(unit, path)
        for alias in install.aliases:
            name = expand(alias, unit)
            if name != unit:
                self._check_alias(f"{CONFIG}/{name}", path)
                made[f"{CONFIG}/{name}"] = path
        for suffix, targets in zip(
            _LINKED_FROM, (install.wanted_by, install.required_by, install.upheld_by), strict=True
        ):
            for target in targets:
                name = expand(target, unit)
                made[f"{CONFIG}/{name}{suffix}/{self._link_name(unit, install, name)}"] = path
        for other in install.also:
            if self.find(expand(other, unit)):
                self._enable(expand(other, unit), made, done)

    def _link_name(self, unit: str, install: Install, target: str) -> str:
        """What the link in the target's directory is called."""
        if not is_template(unit) or is_template(target):
            return unit
        if not install.default_instance:
            raise UnitError(
                f"unit {unit} is a template, and {target} is none",
                remedy=f"enable an instance of it, such as {instance_of(unit, 'NAME')}",
            )
        return instance_of(unit, expand(install.default_instance, unit))

    def _check_alias(self, link: str, path: str) -> None:
        text = self._files.link_text(link)
        name = posixpath.basename(link)
        if text != path and self._files.is_there(link):
            raise UnitError(
                f"{path} is to be known as {name}, and there is another {link}",
                remedy=f"move {link} away, or take the Alias out of the unit",
            )

    def _names_to_disable(self, unit: str, gone: set[str]) -> None:
        if unit in gone:
            return
        path = self.find(unit)
        text = self._files.link_text(path) if path else None
        if text == _MASK:
            return
        gone.add(unit)
        if path:
            for other in self._install(unit, path).also:
                self._names_to_disable(expand(other, unit), gone)

    def _followed(self, unit: str) -> tuple[str, str]:
        """The unit that an alias stands for, and its file."""
        name = unit
        for _ in range(_ALIASES_LIMIT):
            path = self.find(name)
            if not path:
                raise UnitError(f"there is no unit {unit} on this machine")
            text = self._files.link_text(path)
            if text == _MASK:
                raise UnitError(f"unit {unit} is masked")
            target = posixpath.basename(text or "")
            if not text or target in {name, template(name)}:
                return name, path
            name = instance_of(target, _instance(name)) if is_template(target) else target
        raise UnitError(f"unit {unit} is an alias of an alias, and so on")

    def _install(self, unit: str, path: str) -> Install:
        return read_install([self._text(path), *map(self._text, self._dropins(unit))])

    def _dropins(self, unit: str) -> list[str]:
        found: dict[str, str] = {}
        for name in (unit, template(unit)):
            for directory in SEARCHED if name else ():
                for file in self._files.names(f"{directory}/{name}.d"):
                    if file.endswith(".conf"):
                        found.setdefault(file, f"{directory}/{name}.d/{file}")
        return [found[file] for file in sorted(found)]

    def _text(self, path: str) -> str:
        return (self._files.read(path) or b"").decode("utf-8", "replace")

    def _links(self, top: str) -> Iterator[tuple[str, str]]:
        """Every link in the directory and those that targets have in it, with its text."""
        for name in self._visible(top):
            below = f"{top}/{name}"
            text = self._files.link_text(below)
            if text is not None:
                yield below, text
            elif name.endswith(_LINKED_FROM):
                for link in self._visible(below):
                    text = self._files.link_text(f"{below}/{link}")
                    if text is not None:
                        yield f"{below}/{link}", text

    def _visible(self, directory: str) -> Iterator[str]:
        """The names that systemd looks at, which hidden ones are not."""
        return (name for name in self._files.names(directory) if not name.startswith("."))

    def _enables(self, link: str, text: str, unit: str) -> bool:
        """Whether the link is one that enabling the unit makes; a link to itself is none."""
        name, target = posixpath.basename(link), posixpath.basename(text)
        if posixpath.dirname(link).endswith(_LINKED_FROM):
            return unit in {name, target}
        return name != unit and target == unit and text != _MASK


def _instance(unit: str) -> str:
    return unit.partition("@")[2].rpartition(".")[0]
