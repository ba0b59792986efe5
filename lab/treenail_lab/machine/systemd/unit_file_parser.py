"""Reading unit files: sections of assignments, where a key may come more than once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class UnitInstallSection:
    """What a unit's [Install] section says."""

    wanted_by: list[str] = field(default_factory=list)
    required_by: list[str] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)
    also: list[str] = field(default_factory=list)
    default_instance: str = ""

    @property
    def has_directives(self) -> bool:
        return bool(self.wanted_by or self.required_by or self.aliases or self.also)


def read_install_section(paths: Iterable[Path]) -> UnitInstallSection:
    """The [Install] sections of a unit file and its drop-ins together."""
    result = UnitInstallSection()
    lists = {
        "WantedBy": result.wanted_by,
        "RequiredBy": result.required_by,
        "Alias": result.aliases,
        "Also": result.also,
    }
    for section, key, value in parse_assignments(paths):
        if section != "Install":
            continue
        if key == "DefaultInstance":
            result.default_instance = value
        elif key in lists and not value:
            lists[key].clear()
        elif key in lists:
            lists[key] += value.split()
    return result


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
