"""Unit files below a root directory, as systemd finds, enables, masks and presets them."""

import os
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from treenail_lab.machine.bus.objects import Refusal
from treenail_lab.machine.systemd.unit_file_parser import Installation, read_installation

NO_SUCH_UNIT = "org.freedesktop.systemd1.NoSuchUnit"
UNIT_EXISTS = "org.freedesktop.systemd1.UnitExists"
UNIT_MASKED = "org.freedesktop.systemd1.UnitMasked"
UNIT_LINKED = "org.freedesktop.systemd1.UnitLinked"
FILE_NOT_FOUND = "org.freedesktop.DBus.Error.FileNotFound"

PERSISTENT = "etc/systemd/system"
RUNTIME = "run/systemd/system"
VENDOR = "usr/lib/systemd/system"
DIRECTORIES = (PERSISTENT, RUNTIME, VENDOR)
PRESETS = tuple(directory.removesuffix("system") + "system-preset" for directory in DIRECTORIES)

Change = tuple[str, str, str]
"""What EnableUnitFiles and the like report: symlink or unlink, the link, what it points to."""


@dataclass(slots=True)
class Changes:
    """What an operation did, and whether a unit had anything to say about installation."""

    made: list[Change] = field(default_factory=list)
    installable: bool = False


class UnitFiles:
    """The unit files of one machine; paths in answers are those the machine itself would see."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find(self, name: str) -> Path | None:
        """The file that defines the unit, a template's for an instance; None without one."""
        for candidate in (name, _template(name)):
            for directory in DIRECTORIES:
                path = self._root / directory / candidate
                if candidate and (path.is_symlink() or path.exists()):
                    return path
        return None

    def source(self, name: str) -> Path | None:
        """As `find`, but past links between unit files."""
        path = self.find(name)
        if path is None or not path.is_symlink() or self.masked(name):
            return path
        target = self._below(path)
        return target if target.exists() else None

    def drop_ins(self, name: str) -> list[Path]:
        """The drop-ins that apply, in the order in which they do."""
        found: dict[str, Path] = {}
        for candidate in (_template(name), name):
            for directory in reversed(DIRECTORIES):
                for path in (self._root / directory / f"{candidate}.d").glob("*.conf"):
                    if candidate:
                        found[path.name] = path
        return [found[key] for key in sorted(found)]

    def names(self) -> list[str]:
        """Every unit that has a file."""
        suffixes = (".service", ".socket", ".target", ".timer", ".path", ".mount", ".slice")
        return sorted(
            {
                path.name
                for directory in DIRECTORIES
                for path in (self._root / directory).glob("*")
                if path.name.endswith(suffixes)
            }
        )

    def wanted(self) -> list[str]:
        """The units that some target wants or requires, which are therefore started at boot."""
        return sorted(
            {
                path.name
                for directory in DIRECTORIES
                for pattern in ("*.target.wants/*", "*.target.requires/*")
                for path in (self._root / directory).glob(pattern)
                if not self.masked(path.name) and self.find(path.name)
            }
        )

    def masked(self, name: str) -> bool:
        """Whether the unit is linked to /dev/null, or its file is empty."""
        path = self.find(name)
        if path is None:
            return False
        if path.is_symlink():
            return str(path.readlink()) == os.devnull
        return path.stat().st_size == 0

    def state(self, name: str) -> str:
        """What ``systemctl is-enabled`` says; refuses when there is no file."""
        path = self.find(name)
        if path is None:
            raise Refusal(FILE_NOT_FOUND, "No such file or directory")
        runtime = path.is_relative_to(self._root / RUNTIME)
        if self.masked(name):
            return "masked-runtime" if runtime else "masked"
        for directory, state in ((PERSISTENT, "enabled"), (RUNTIME, "enabled-runtime")):
            if self._links(directory, name):
                return state
        if path.is_symlink():
            return "alias" if path.readlink().name != name else "linked"
        installation = self._installation(name)
        if installation.wanted_by or installation.required_by or installation.aliases:
            return "disabled"
        return "indirect" if installation.also else "static"

    def enable(self, names: list[str], *, runtime: bool, force: bool) -> Changes:
        """Link the units into the targets that want them, and under their aliases."""
        changes = Changes()
        for name in self._with_also(names, must_exist=True):
            self._refuse_links(name)
            installation = self._installation(name)
            changes.installable |= installation.says_anything
            source = self._seen(self.source(name) or self._root)
            for link in _links_of(name, installation):
                where = self._root / (RUNTIME if runtime else PERSISTENT) / link
                self._link(where, source, changes, force=force)
        return changes

    def disable(self, names: list[str], *, runtime: bool) -> Changes:
        """Remove every link that enabling made."""
        changes = Changes()
        for name in self._with_also(names, must_exist=False):
            changes.installable |= self._installation(name).says_anything
            for link in self._links(RUNTIME if runtime else PERSISTENT, name):
                link.unlink()
                changes.made.append(("unlink", self._seen(link), ""))
                if link.parent.suffix in (".wants", ".requires") and not any(link.parent.iterdir()):
                    link.parent.rmdir()
        absent = [name for name in names if self.find(name) is None]
        if absent and not changes.made:
            raise Refusal(NO_SUCH_UNIT, f"Unit file {absent[0]} does not exist.")
        return changes

    def mask(self, names: list[str], *, runtime: bool, force: bool) -> Changes:
        """Link the units to /dev/null; a unit's own file in that directory is in the way."""
        changes = Changes()
        for name in names:
            where = self._root / (RUNTIME if runtime else PERSISTENT) / name
            self._link(where, os.devnull, changes, force=force)
        return changes

    def unmask(self, names: list[str], *, runtime: bool) -> Changes:
        """Remove links to /dev/null."""
        changes = Changes()
        for name in names:
            link = self._root / (RUNTIME if runtime else PERSISTENT) / name
            if link.is_symlink() and str(link.readlink()) == os.devnull:
                link.unlink()
                changes.made.append(("unlink", self._seen(link), ""))
        return changes

    def preset(self, names: list[str], *, runtime: bool, force: bool) -> Changes:
        """Enable or disable each unit as the preset files say; the first rule that fits counts."""
        changes = Changes()
        rules = self._preset_rules()
        for name in names:
            if self.find(name) is None:
                raise Refusal(NO_SUCH_UNIT, f"Unit file {name} does not exist.")
            verb = next((verb for verb, pattern in rules if fnmatchcase(name, pattern)), "enable")
            if verb == "enable":
                done = self.enable([name], runtime=runtime, force=force)
            else:
                done = self.disable([name], runtime=runtime)
            changes.made += done.made
            changes.installable |= done.installable
        return changes

    def _preset_rules(self) -> list[tuple[str, str]]:
        files: dict[str, Path] = {}
        for directory in reversed(PRESETS):
            files |= {path.name: path for path in (self._root / directory).glob("*.preset")}
        words = (
            line.split()
            for name in sorted(files)
            for line in files[name].read_text(encoding="utf-8").splitlines()
            if line.strip() and line.strip()[0] not in "#;"
        )
        return [(word[0], word[1]) for word in words if len(word) > 1]

    def _with_also(self, names: list[str], *, must_exist: bool) -> list[str]:
        todo, done = list(names), list[str]()
        while todo:
            name = todo.pop(0)
            if name in done:
                continue
            if must_exist and self.find(name) is None:
                raise Refusal(NO_SUCH_UNIT, f"Unit file {name} does not exist.")
            done.append(name)
            todo += self._installation(name).also
        return done

    def _installation(self, name: str) -> Installation:
        path = self.source(name)
        if path is None or self.masked(name):
            return Installation()
        return read_installation([path, *self.drop_ins(name)])

    def _refuse_links(self, name: str) -> None:
        path = self.find(name)
        if self.masked(name):
            raise Refusal(UNIT_MASKED, f"Unit file {self._seen(path)} is masked.")
        if path is not None and path.is_symlink() and path.readlink().name != path.name:
            text = f"Refusing to operate on alias name or linked unit file: {name}"
            raise Refusal(UNIT_LINKED, text)

    def _links(self, directory: str, name: str) -> list[Path]:
        base = self._root / directory
        there = [*base.glob("*.wants/*"), *base.glob("*.requires/*"), *base.glob("*")]
        return sorted(
            path
            for path in there
            if path.is_symlink()
            and name in (path.name, path.readlink().name)
            and str(path.readlink()) != os.devnull
            and (path.parent != base or path.name != name)
        )

    def _link(self, where: Path, target: str, changes: Changes, *, force: bool) -> None:
        if where.is_symlink():
            old = str(where.readlink())
            if old == target:
                return
            if not force:
                text = f"File {self._seen(where)} already exists and is a symlink to {old}."
                raise Refusal(UNIT_EXISTS, text)
            where.unlink()
            changes.made.append(("unlink", self._seen(where), ""))
        elif where.exists():
            raise Refusal(UNIT_EXISTS, f"File {self._seen(where)} already exists.")
        where.parent.mkdir(parents=True, exist_ok=True)
        where.symlink_to(target)
        changes.made.append(("symlink", self._seen(where), target))

    def _below(self, link: Path) -> Path:
        target = link.readlink()
        if target.is_absolute():
            return self._root / target.relative_to("/")
        return link.parent / target

    def _seen(self, path: Path | None) -> str:
        return "" if path is None else f"/{path.relative_to(self._root)}"


def _template(name: str) -> str:
    stem, at, rest = name.partition("@")
    suffix = rest.rpartition(".")[2]
    return f"{stem}@.{suffix}" if at and rest != f".{suffix}" else ""


def _links_of(name: str, installation: Installation) -> list[str]:
    linked = name
    if _template(name) == "" and "@." in name and installation.default_instance:
        linked = name.replace("@.", f"@{installation.default_instance}.")
    return [
        *installation.aliases,
        *(f"{target}.wants/{linked}" for target in installation.wanted_by),
        *(f"{target}.requires/{linked}" for target in installation.required_by),
    ]
