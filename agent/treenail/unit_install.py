"""The [Install] section of unit files and the rules of preset files, parsed."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from treenail.errors import UnitError

UNIT_DIRECTORY = "/etc/systemd/system"
"""The directory of the administrator's units and of the links that enable units."""


@dataclass(frozen=True, slots=True)
class InstallSection:
    """The merged [Install] sections of a unit file and its drop-ins."""

    wanted_by: tuple[str, ...] = ()
    required_by: tuple[str, ...] = ()
    upheld_by: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    default_instance: str = ""

    @property
    def has_links(self) -> bool:
        """Return whether enabling the unit makes a link."""
        return bool(self.wanted_by or self.required_by or self.upheld_by or self.aliases)


@dataclass(frozen=True, slots=True)
class UnitPreset:
    """The preset of a unit; ``instances`` are those of a template."""

    is_enabled: bool
    instances: tuple[str, ...] = field(default=())


_LISTS = {
    "WantedBy": "wanted_by",
    "RequiredBy": "required_by",
    "UpheldBy": "upheld_by",
    "Alias": "aliases",
    "Also": "also",
}
_SPECIFIER = re.compile(r"%(.)", re.DOTALL)


def parse_install(texts: Iterable[str]) -> InstallSection:
    """Merge the sections of the texts in order; an empty value clears a list."""
    lists: dict[str, list[str]] = {name: [] for name in _LISTS.values()}
    instance = ""
    for text in texts:
        for key, value in _parse_assignments(text):
            if key == "DefaultInstance":
                instance = value
            elif key in _LISTS and value:
                lists[_LISTS[key]] += value.split()
            elif key in _LISTS:
                lists[_LISTS[key]].clear()
    return InstallSection(
        **{name: tuple(dict.fromkeys(values)) for name, values in lists.items()},
        default_instance=instance,
    )


def parse_preset(texts: Iterable[str], unit: str) -> UnitPreset:
    """Return the preset in the first line for the unit; the default is enabled."""
    for text in texts:
        for line in map(str.strip, text.splitlines()):
            verb, *words = line.split() or [""]
            if verb not in {"enable", "disable", "ignore"} or not words:
                continue
            if fnmatchcase(unit, words[0]) or _is_listed_instance(unit, words):
                return UnitPreset(verb == "enable", tuple(words[1:]) if is_template(unit) else ())
    return UnitPreset(is_enabled=True)


def expand_specifiers(text: str, unit: str) -> str:
    """Expand the specifiers that depend on the unit name alone; raise `UnitError` for others."""
    stem, _, _ = unit.rpartition(".")
    prefix, _, instance = stem.partition("@")
    values = {
        "%": "%",
        "n": unit,
        "N": stem,
        "p": prefix,
        "i": instance,
        "j": prefix.rpartition("-")[2],
    }

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise UnitError(
                f"cannot expand {text} of {unit}: only a running systemd knows %{match[1]}"
            )
        return values[match[1]]

    return _SPECIFIER.sub(value, text)


def find_template_name(unit: str) -> str:
    """Return the template of an instance; empty when the unit is no instance."""
    name, at, rest = unit.partition("@")
    instance, dot, suffix = rest.rpartition(".")
    return f"{name}@.{suffix}" if at and dot and instance else ""


def is_template(unit: str) -> bool:
    """Return whether the unit is a template."""
    return "@." in unit


def make_instance_name(unit: str, instance: str) -> str:
    """Return the name of an instance of a template."""
    return unit.replace("@.", f"@{instance}.", 1)


def _is_listed_instance(unit: str, words: list[str]) -> bool:
    """Return whether a preset line lists the unit as an instance of its template."""
    template = find_template_name(unit)
    return (
        bool(template)
        and template == words[0]
        and unit in (make_instance_name(template, w) for w in words[1:])
    )


def _parse_assignments(text: str) -> Iterator[tuple[str, str]]:
    section = ""
    for line in _join_lines(text):
        if line.startswith("["):
            section = line
            continue
        key, equals, value = line.partition("=")
        if equals and section == "[Install]":
            yield key.strip(), value.strip()


def _join_lines(text: str) -> Iterator[str]:
    """Yield the lines, continued ones joined, without comments."""
    # systemd.syntax(7): a comment inside a continued line is ignored.
    joined = ""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith(("#", ";")) or not (stripped or joined):
            continue
        if stripped.endswith("\\"):
            joined += stripped[:-1] + " "
            continue
        yield joined + stripped
        joined = ""
    if joined:
        yield joined
