"""The policy for drift: report it, repair it, or block the next update, by path."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from treenail.config import drift_comparison, image_content, node_paths
from treenail.observations import EntryKind

HOUR_S = 3600.0
NAMED_LIMIT = 5
"""Maximum number of drifts that a message names."""

BOOT_ATTRIBUTES = frozenset(
    {
        drift_comparison.DriftAttribute.IMAGE,
        drift_comparison.DriftAttribute.KERNEL_ARGUMENTS,
        drift_comparison.DriftAttribute.PACKAGES,
    }
)
"""Attributes that only a reboot can repair."""


class DriftReaction(StrEnum):
    """The reaction to drift at a path."""

    REPORT = "report"
    """Report it; the next update overwrites it."""
    REPAIR = "repair"
    """Restore it from the config, a few times an hour; after that block."""
    BLOCK = "block"
    """Degrade the node and start no update until it is gone, as the Machine Config Daemon does."""


@dataclass(frozen=True, slots=True)
class DriftPolicy:
    """The administrator's reactions; the first glob that matches a path decides.

    A unit matches by the path of its file. Five kinds of drift are only reported unless a glob
    matches them: another image, because the agent moves the node to its own; drop-ins that are not
    in the config, because distributions and other programs write them too; kernel arguments that a
    later one overrides; settings that cannot have an effect, such as a unit that does not exist;
    and, where the default is to block, SELinux labels, because the Machine Config Daemon does not
    check them and the SELinux policy may change with the OS.
    """

    default: DriftReaction = DriftReaction.BLOCK
    paths: tuple[tuple[str, DriftReaction], ...] = ()
    repairs_per_hour: int = 3

    def choose_reaction(self, drift: drift_comparison.Drift) -> DriftReaction:
        """Return the reaction to this drift; what only a reboot can repair blocks."""
        path = drift.subject
        if not path.startswith("/"):
            path = node_paths.unit_path(path)
        reaction = next((choice for glob, choice in self.paths if fnmatchcase(path, glob)), None)
        if reaction is None:
            attribute, kinds = drift.attribute, drift_comparison.DriftAttribute
            is_reported = (
                # The agent moves the node to its image: that must not be blocked.
                attribute in {kinds.IMAGE, kinds.EFFECT}
                or (attribute is kinds.KIND and drift.expected == EntryKind.NOTHING)
                or (attribute is kinds.LABEL and self.default is DriftReaction.BLOCK)
                # Of some keys every value counts, and the MCD accepts a later one.
                or (
                    attribute is kinds.KERNEL_ARGUMENTS
                    and drift.actual != drift_comparison.NO_ARGUMENT
                )
            )
            reaction = DriftReaction.REPORT if is_reported else self.default
        if reaction is DriftReaction.REPAIR and drift.attribute in BOOT_ATTRIBUTES:
            return DriftReaction.BLOCK
        return reaction


@dataclass(frozen=True, slots=True)
class DriftAssessment:
    """The drift of a machine, by reaction."""

    reported: tuple[drift_comparison.Drift, ...] = ()
    to_repair: tuple[drift_comparison.Drift, ...] = ()
    blocking: tuple[drift_comparison.Drift, ...] = ()
    contested: frozenset[str] = frozenset()
    """The subjects that were repaired too often: another program must be writing them."""
    image_gaps: frozenset[str] = frozenset()
    """The subjects that the image lacks, in image mode."""
    is_checked: bool = True
    """The machine was checked; False if no config is known."""

    @property
    def all(self) -> tuple[drift_comparison.Drift, ...]:
        return (*self.blocking, *self.to_repair, *self.reported)


def is_contested(repaired_at: Iterable[float], per_hour: int, now: float) -> bool:
    """Return whether a subject reached its limit of repairs in the last hour."""
    return sum(now - HOUR_S < at <= now for at in repaired_at) >= per_hour


def assess_drift(
    drifts: Iterable[drift_comparison.Drift],
    policy: DriftPolicy,
    repairs: Mapping[str, Sequence[float]],
    now: float,
) -> DriftAssessment:
    """Sort the drift by reaction; ``repairs`` are the times of earlier repairs, in seconds."""
    by_reaction: dict[DriftReaction, list[drift_comparison.Drift]] = {
        kind: [] for kind in DriftReaction
    }
    contested: set[str] = set()
    for drift in drifts:
        reaction = policy.choose_reaction(drift)
        repaired_at = repairs.get(drift.subject, ())
        if reaction is DriftReaction.REPAIR and is_contested(
            repaired_at, policy.repairs_per_hour, now
        ):
            contested.add(drift.subject)
            reaction = DriftReaction.BLOCK
        by_reaction[reaction].append(drift)
    return DriftAssessment(
        tuple(by_reaction[DriftReaction.REPORT]),
        tuple(by_reaction[DriftReaction.REPAIR]),
        tuple(by_reaction[DriftReaction.BLOCK]),
        frozenset(contested),
    )


def format_drift(
    drifts: Sequence[drift_comparison.Drift], config: str, contested: frozenset[str] = frozenset()
) -> str:
    """Return a sentence that names the first drifts."""
    named = "; ".join(str(drift) for drift in drifts[:NAMED_LIMIT])
    more = f"; and {len(drifts) - NAMED_LIMIT} more" if len(drifts) > NAMED_LIMIT else ""
    text = f"the machine differs from {config}: {named}{more}"
    if contested:
        listed = ", ".join(sorted(contested)[:NAMED_LIMIT])
        text += f"; another program keeps writing {listed}"
    return text


def format_drift_remedy(
    drifts: Sequence[drift_comparison.Drift],
    contested: frozenset[str] = frozenset(),
    *,
    image_gaps: frozenset[str] = frozenset(),
) -> str:
    """Return what a user can do about the drift."""
    if image_gaps & {drift.subject for drift in drifts}:
        return image_content.IMAGE_REMEDY
    if any(drift.attribute in BOOT_ATTRIBUTES for drift in drifts):
        return f"restore it, or apply the config again with: touch {node_paths.FORCE_FILE}"
    find_writer = "find the program that writes there, then " if contested else ""
    return f"{find_writer}run: treenail drift --repair PATH, or add the change to a MachineConfig"
