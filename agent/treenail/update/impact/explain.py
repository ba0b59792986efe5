"""Why something is disrupted: what differs, the rule for it, and the MachineConfig it came from."""

from collections.abc import Iterator
from dataclasses import dataclass

from treenail.api.disruptionpolicy import (
    DaemonReloadPolicyAction,
    DrainPolicyAction,
    NonePolicyAction,
    PolicyAction,
    RebootPolicyAction,
    ReloadPolicyAction,
    RestartPolicyAction,
    SpecialPolicyAction,
)
from treenail.api.machineconfig import MachineConfig
from treenail.config.diff import ConfigDiff, OSAspect
from treenail.config.provenance import PROVENANCE, Provenance
from treenail.update.impact.disruption import DisruptionReason


@dataclass(frozen=True, slots=True)
class DisruptionCause:
    """One thing that differs, the rule for it, and who brought it; ``source`` may be unknown."""

    subject: str
    rule: str
    source: str = ""

    def __str__(self) -> str:
        source = f", from {self.source}" if self.source else ""
        return f"{self.subject} ({self.rule}){source}"


class ConfigSources:
    """Who had the last word on each subject that `compute_disruption` names."""

    def __init__(
        self, found: ConfigDiff, old: MachineConfig, new: MachineConfig, *, image_source: str = ""
    ) -> None:
        """``image_source`` asked for the image, where that is not a MachineConfig.

        Raises `ConfigError` when the provenance that a config carries can't be read.
        """
        self._by_subject = dict(_find_sources(found, _read_provenance(old), _read_provenance(new)))
        if image_source:
            self._by_subject[f"{OSAspect.IMAGE} changed"] = image_source

    def find_cause(self, reason: DisruptionReason) -> DisruptionCause:
        """The reason with its source."""
        return DisruptionCause(
            reason.subject, reason.rule, self._by_subject.get(reason.subject, "")
        )


def describe_action(action: PolicyAction) -> str:
    """An action for people."""
    match action:
        case NonePolicyAction():
            return "nothing"
        case DaemonReloadPolicyAction():
            return "systemd reads its units again"
        case ReloadPolicyAction(unit):
            return f"reload {unit}"
        case RestartPolicyAction(unit):
            return f"restart {unit}"
        case DrainPolicyAction() | SpecialPolicyAction():
            return "drain"
        case RebootPolicyAction():
            return "drain and reboot"


def _read_provenance(config: MachineConfig) -> Provenance:
    text = config.metadata.annotations.get(PROVENANCE)
    return Provenance({}) if text is None else Provenance.from_text(text)


def _find_sources(found: ConfigDiff, old: Provenance, new: Provenance) -> Iterator[tuple[str, str]]:
    def last(section: str, key: str) -> str:
        return _name_last(new.find_sources(section, key) or old.find_sources(section, key))

    for file in found.files:
        yield f"file {file}", last("files", file.key)
    for directory in found.directories:
        yield f"directory {directory}", last("directories", directory.key)
    for link in found.links:
        yield f"link {link}", last("links", link.key)
    for unit in found.units:
        yield f"unit {unit}", last("units", unit.key)
    for user in found.users:
        yield f"keys or password of {user}", last("users", user.key)
    for aspect in found.os:
        names = new.find_section_sources(aspect.value) or old.find_section_sources(aspect.value)
        yield f"{aspect} changed", _name_last(names)


def _name_last(names: tuple[str, ...]) -> str:
    return f"MachineConfig {names[-1]}" if names else ""
