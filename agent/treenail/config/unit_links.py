"""The links that enable the units of a config, as ``systemctl enable`` makes them.

Only units whose files are in the config can be enabled here: the unit files of a base image, and
with them their [Install] sections, are unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail.config import node_paths
from treenail.config.wanted import WantedState, WantedUnit
from treenail.errors import UnitError
from treenail.unit_install import (
    expand_specifiers,
    find_template_name,
    is_template,
    make_instance_name,
    parse_install,
)


@dataclass(frozen=True, slots=True)
class ConfigUnitLinks:
    """Links by path with their targets, and the units that need something else."""

    made: Mapping[str, str] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    """Units of the base that the agent enables or disables."""
    presets: tuple[str, ...] = ()
    """Lines of a preset file, which keep the enablement in a first boot."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Reasons by unit why neither links nor the agent can enable it."""


def plan_unit_links(wanted: WantedState) -> ConfigUnitLinks:
    """Return the links of the enabled units of a config."""
    plan = _LinkPlan(wanted)
    for unit in wanted.units.values():
        plan.add(unit)
    presets = [
        f"{'enable' if unit.enabled else 'disable'} {unit.name}"
        for unit in sorted(wanted.units.values(), key=lambda each: each.name)
        if unit.enabled is not None and not unit.mask
    ]
    return ConfigUnitLinks(plan.made, tuple(plan.left), tuple(presets), plan.problems)


class _LinkPlan:
    def __init__(self, wanted: WantedState) -> None:
        self.made: dict[str, str] = {}
        self.left: dict[str, None] = {}
        self.problems: dict[str, str] = {}
        self._wanted = wanted
        self._seen: set[str] = set()

    def add(self, unit: WantedUnit) -> None:
        if unit.enabled is None or unit.mask:
            return
        source = self._find_source(unit.name)
        if source is None:
            self.left[unit.name] = None
        elif unit.enabled:
            try:
                self._enable(unit.name, source)
            except UnitError as error:
                self.problems[unit.name] = str(error)

    def _find_source(self, name: str) -> WantedUnit | None:
        """Return the unit with the contents: the unit itself, or its template."""
        for each in filter(None, (name, find_template_name(name))):
            found = self._wanted.units.get(each)
            if found is not None and found.contents and not found.mask:
                return found
        return None

    def _enable(self, name: str, source: WantedUnit) -> None:
        if name in self._seen:
            return
        self._seen.add(name)
        own = self._wanted.units.get(name)
        texts = [source.contents, *(text for _, text in sorted(source.dropins.items()) if text)]
        if own is not None and own is not source:
            texts += [text for _, text in sorted(own.dropins.items()) if text]
        install = parse_install(texts)
        target = node_paths.unit_path(source.name)
        for alias in install.aliases:
            link = expand_specifiers(alias, name)
            if link != name:
                self.made[node_paths.unit_path(link)] = target
        lists = {
            ".wants": install.wanted_by,
            ".requires": install.required_by,
            ".upholds": install.upheld_by,
        }
        for suffix, others in lists.items():
            for other in others:
                directory = expand_specifiers(other, name)
                link = _build_link_name(name, install.default_instance, directory)
                self.made[f"{node_paths.UNIT_DIRECTORY}/{directory}{suffix}/{link}"] = target
        for also in install.also:
            other = expand_specifiers(also, name)
            found = self._find_source(other)
            if found is None:
                self.left[other] = None
            else:
                self._enable(other, found)


def _build_link_name(unit: str, default_instance: str, target: str) -> str:
    if not is_template(unit) or is_template(target):
        return unit
    if not default_instance:
        raise UnitError(f"cannot enable {unit}: it is a template without DefaultInstance=")
    return make_instance_name(unit, expand_specifiers(default_instance, unit))
