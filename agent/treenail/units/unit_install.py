"""The [Install] section of unit files and the rules of preset files, parsed."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from treenail import errors

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


class SpecifierError(errors.UnitError):
    """Only a running systemd knows the value of a specifier."""


@dataclass(frozen=True, slots=True)
class UnitPreset:
    """The preset of a unit; ``instances`` are those of a template."""

    is_enabled: bool | None
    """None leaves the unit as it is: the line begins with ``ignore`` (systemd 253)."""
    instances: tuple[str, ...] = field(default=())


_LISTS = {
    "WantedBy": "wanted_by",
    "RequiredBy": "required_by",
    "UpheldBy": "upheld_by",
    "Alias": "aliases",
    "Also": "also",
}
_SPECIFIER = re.compile(r"%(.)", re.DOTALL)
# unit_type_may_alias() and unit_type_may_template() of systemd.
_TEMPLATE_TYPES = ("service", "socket", "target", "timer", "path")
_ALIAS_TYPES = (*_TEMPLATE_TYPES, "device")
_OTHER_TYPES = ("automount", "mount", "scope", "slice", "swap")
_UNIT_NAME = re.compile(
    rf"[\w:.\\-][\w:.\\@-]*\.({'|'.join((*_ALIAS_TYPES, *_OTHER_TYPES))})", re.ASCII
)
_NAME_BYTES = 255


def is_unit_name(name: str) -> bool:
    """Return whether systemd accepts the name as that of a unit, template or instance."""
    return len(name) <= _NAME_BYTES and _UNIT_NAME.fullmatch(name) is not None


def is_valid_alias(alias: str, unit: str) -> bool:
    """Return whether a link with the name ``alias`` may lead to ``unit``, of the same kind."""
    kind = alias.rpartition(".")[2]
    if not (is_unit_name(alias) and is_unit_name(unit) and unit.endswith(f".{kind}")):
        return False
    instance, other = get_instance(alias), get_instance(unit)
    if kind not in _ALIAS_TYPES or (instance is not None and kind not in _TEMPLATE_TYPES):
        return False
    return instance == other or (bool(instance) and other == "")


def parse_install(texts: Iterable[str], unit: str = "") -> InstallSection:
    """Merge the sections of the unit's texts in order; an empty value clears a list."""
    lists: dict[str, list[str]] = {name: [] for name in _LISTS.values()}
    instance = ""
    for text in texts:
        for key, value in _parse_assignments(text):
            if key == "DefaultInstance":
                instance = value
            elif key in _LISTS and value:
                lists[_LISTS[key]] += value.split()
            elif key in _LISTS and key != "Also":
                lists[_LISTS[key]].clear()
    if unit and unit.rpartition(".")[2] not in _ALIAS_TYPES:
        lists["aliases"].clear()
    if unit and not is_template(unit):
        instance = ""
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
            # Only `enable TEMPLATE INSTANCE...` may have more words (systemd.preset(5)).
            if len(words) > 1 and (verb != "enable" or not is_template(words[0])):
                continue
            if fnmatchcase(unit, words[0]) or _is_listed_instance(unit, words):
                return UnitPreset(
                    None if verb == "ignore" else verb == "enable",
                    tuple(words[1:]) if is_template(unit) else (),
                )
    return UnitPreset(is_enabled=True)


def expand_specifiers(text: str, unit: str) -> str:
    """Expand the specifiers that depend on the unit name; raise `SpecifierError` for others."""
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
            raise SpecifierError(
                f"cannot expand {text} of {unit}: only a running systemd knows %{match[1]}"
            )
        return values[match[1]]

    return _SPECIFIER.sub(value, text)


def find_template_name(unit: str) -> str:
    """Return the template of an instance; empty when the unit is no instance."""
    name, at, rest = unit.partition("@")
    instance, dot, suffix = rest.rpartition(".")
    return f"{name}@.{suffix}" if at and dot and instance else ""


def get_instance(unit: str) -> str | None:
    """Return the instance of the unit: empty for a template, None for a plain unit."""
    _, at, rest = unit.partition("@")
    return rest.rpartition(".")[0] if at else None


def is_template(unit: str) -> bool:
    """Return whether the unit is a template."""
    return get_instance(unit) == ""


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
