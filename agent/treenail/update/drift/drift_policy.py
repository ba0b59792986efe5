"""What is done about drift: per path it is reported, healed, or holds the next update up."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from treenail.config import names
from treenail.config.drift import Drift, DriftAttribute, EntryKind

HOUR_S = 3600.0
NAMED_LIMIT = 5
"""Drifts that one sentence names."""

BOOT_ATTRIBUTES = frozenset({DriftAttribute.KERNEL_ARGUMENTS, DriftAttribute.PACKAGES})


class DriftReaction(StrEnum):
    """What drift at a path leads to."""

    REPORT = "report"
    """It is told, and the next update goes over it."""
    REPAIR = "repair"
    """It is made as the config says, a few times an hour; after that it blocks."""
    BLOCK = "block"
    """The node is Degraded and takes no update while it lasts, as with the reference."""


@dataclass(frozen=True, slots=True)
class DriftPolicy:
    """The owner's reactions; the first glob that matches a path decides.

    A unit is matched by the path of its file. Drop-ins that the config does not know are only
    reported unless a glob says otherwise: distributions and other programs write them, too. So are
    SELinux labels where others block: the Machine Config Daemon never looked at those of what it
    wrote, and a policy may change with the OS.
    """

    default: DriftReaction = DriftReaction.BLOCK
    paths: tuple[tuple[str, DriftReaction], ...] = ()
    repairs_per_hour: int = 3

    def choose_reaction(self, drift: Drift) -> DriftReaction:
        """What this one leads to; what only a boot can change is never healed."""
        path = drift.subject
        if not path.startswith("/"):
            path = names.unit_path(path)
        found = next((each for glob, each in self.paths if fnmatchcase(path, glob)), None)
        if found is None:
            extra = drift.attribute is DriftAttribute.KIND and drift.expected == EntryKind.NOTHING
            label = drift.attribute is DriftAttribute.LABEL and self.default is DriftReaction.BLOCK
            found = DriftReaction.REPORT if extra or label else self.default
        if found is DriftReaction.REPAIR and drift.attribute in BOOT_ATTRIBUTES:
            return DriftReaction.BLOCK
        return found


@dataclass(frozen=True, slots=True)
class DriftAssessment:
    """What was found, by what it leads to."""

    reported: tuple[Drift, ...] = ()
    to_repair: tuple[Drift, ...] = ()
    """To be healed now."""
    blocking: tuple[Drift, ...] = ()
    contested: frozenset[str] = frozenset()
    """The subjects that were healed so often that somebody else must be writing them."""
    is_checked: bool = True
    """Whether anybody looked; not where nobody knows what there is to be."""

    @property
    def all(self) -> tuple[Drift, ...]:
        return (*self.blocking, *self.to_repair, *self.reported)


def is_contested(repaired_at: Iterable[float], per_hour: int, now: float) -> bool:
    """Whether it was put right so often in the last hour that somebody else must be writing it."""
    return sum(now - HOUR_S < at <= now for at in repaired_at) >= per_hour


def assess_drift(
    found: Iterable[Drift],
    policy: DriftPolicy,
    repairs: Mapping[str, Sequence[float]],
    now: float,
) -> DriftAssessment:
    """Sort what was found; ``repairs`` are the times, in seconds, at which subjects were healed."""
    sorted_: dict[DriftReaction, list[Drift]] = {each: [] for each in DriftReaction}
    given_up: set[str] = set()
    for drift in found:
        reaction = policy.choose_reaction(drift)
        healed_at = repairs.get(drift.subject, ())
        if reaction is DriftReaction.REPAIR and is_contested(
            healed_at, policy.repairs_per_hour, now
        ):
            given_up.add(drift.subject)
            reaction = DriftReaction.BLOCK
        sorted_[reaction].append(drift)
    return DriftAssessment(
        tuple(sorted_[DriftReaction.REPORT]),
        tuple(sorted_[DriftReaction.REPAIR]),
        tuple(sorted_[DriftReaction.BLOCK]),
        frozenset(given_up),
    )


def format_drift(
    drifts: Sequence[Drift], config: str, contested: frozenset[str] = frozenset()
) -> str:
    """The drifts, the first few by name."""
    named = "; ".join(str(each) for each in drifts[:NAMED_LIMIT])
    more = f"; and {len(drifts) - NAMED_LIMIT} more" if len(drifts) > NAMED_LIMIT else ""
    told = f"the machine is not as {config} says: {named}{more}"
    if contested:
        listed = ", ".join(sorted(contested)[:NAMED_LIMIT])
        told += f"; something else keeps writing {listed}"
    return told


def format_drift_remedy(drifts: Sequence[Drift], contested: frozenset[str] = frozenset()) -> str:
    """What a person can do about them."""
    if any(each.attribute in BOOT_ATTRIBUTES for each in drifts):
        return f"put it back, or have the config applied anew: touch {names.FORCE_FILE}"
    found = "find what writes there, then " if contested else ""
    return (
        f"{found}have it put right with 'treenail drift --heal PATH', or put the change into a "
        "MachineConfig"
    )
