"""Why something is disrupted: what differs, the rule for it, and the MachineConfig it came from."""

from collections.abc import Iterator
from dataclasses import dataclass

from treenail.api.disruptionpolicy import (
    Action,
    DaemonReload,
    Drain,
    Nothing,
    Reboot,
    Reload,
    Restart,
    Special,
)
from treenail.api.machineconfig import MachineConfig
from treenail.config.diff import Aspect, Diff
from treenail.config.provenance import PROVENANCE, Provenance
from treenail.update.impact.disruption import Reason


@dataclass(frozen=True, slots=True)
class Because:
    """One thing that differs, the rule for it, and who brought it; ``source`` may be unknown."""

    subject: str
    rule: str
    source: str = ""

    def __str__(self) -> str:
        source = f", from {self.source}" if self.source else ""
        return f"{self.subject} ({self.rule}){source}"


class Sources:
    """Who had the last word on each subject that `disruption` names."""

    def __init__(
        self, found: Diff, old: MachineConfig, new: MachineConfig, *, image_source: str = ""
    ) -> None:
        """``image_source`` asked for the image, where that is not a MachineConfig.

        Raises `ConfigError` when the provenance that a config carries can't be read.
        """
        self._by_subject = dict(_sources(found, _provenance(old), _provenance(new)))
        if image_source:
            self._by_subject[f"{Aspect.IMAGE} changed"] = image_source

    def because(self, reason: Reason) -> Because:
        """The reason with its source."""
        return Because(reason.subject, reason.rule, self._by_subject.get(reason.subject, ""))


def words(action: Action) -> str:
    """An action for people."""
    match action:
        case Nothing():
            return "nothing"
        case DaemonReload():
            return "systemd reads its units again"
        case Reload(unit):
            return f"reload {unit}"
        case Restart(unit):
            return f"restart {unit}"
        case Drain() | Special():
            return "drain"
        case Reboot():
            return "drain and reboot"


def _provenance(config: MachineConfig) -> Provenance:
    text = config.metadata.annotations.get(PROVENANCE)
    return Provenance({}) if text is None else Provenance.from_text(text)


def _sources(found: Diff, old: Provenance, new: Provenance) -> Iterator[tuple[str, str]]:
    def last(section: str, key: str) -> str:
        return _last(new.of(section, key) or old.of(section, key))

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
        names = new.of_section(aspect.value) or old.of_section(aspect.value)
        yield f"{aspect} changed", _last(names)


def _last(names: tuple[str, ...]) -> str:
    return f"MachineConfig {names[-1]}" if names else ""
