"""What is done about drift: per path it is reported, healed, or holds the next update up."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from treenail.config import names
from treenail.config.drift import Attribute, Drift, Kind

HOUR_S = 3600.0
NAMED_LIMIT = 5
"""Drifts that one sentence names."""

OF_THE_BOOT = frozenset({Attribute.ARGUMENTS, Attribute.PACKAGES})


class Reaction(StrEnum):
    """What drift at a path leads to."""

    REPORT = "report"
    """It is told, and the next update goes over it."""
    HEAL = "heal"
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

    default: Reaction = Reaction.BLOCK
    paths: tuple[tuple[str, Reaction], ...] = ()
    heals_per_hour: int = 3

    def reaction(self, drift: Drift) -> Reaction:
        """What this one leads to; what only a boot can change is never healed."""
        path = drift.subject
        if not path.startswith("/"):
            path = names.unit_path(path)
        found = next((each for glob, each in self.paths if fnmatchcase(path, glob)), None)
        if found is None:
            extra = drift.attribute is Attribute.KIND and drift.expected == Kind.NOTHING
            label = drift.attribute is Attribute.LABEL and self.default is Reaction.BLOCK
            found = Reaction.REPORT if extra or label else self.default
        if found is Reaction.HEAL and drift.attribute in OF_THE_BOOT:
            return Reaction.BLOCK
        return found


@dataclass(frozen=True, slots=True)
class Drifted:
    """What was found, by what it leads to."""

    reported: tuple[Drift, ...] = ()
    healed: tuple[Drift, ...] = ()
    """To be healed now."""
    blocking: tuple[Drift, ...] = ()
    fought: frozenset[str] = frozenset()
    """The subjects that were healed so often that somebody else must be writing them."""
    looked: bool = True
    """Whether anybody looked; not where nobody knows what there is to be."""

    @property
    def all(self) -> tuple[Drift, ...]:
        return (*self.blocking, *self.healed, *self.reported)


def fought(healed_at: Iterable[float], per_hour: int, now: float) -> bool:
    """Whether it was put right so often in the last hour that somebody else must be writing it."""
    return sum(now - HOUR_S < at <= now for at in healed_at) >= per_hour


def weigh(
    found: Iterable[Drift],
    policy: DriftPolicy,
    heals: Mapping[str, Sequence[float]],
    now: float,
) -> Drifted:
    """Sort what was found; ``heals`` are the times, in seconds, at which subjects were healed."""
    sorted_: dict[Reaction, list[Drift]] = {each: [] for each in Reaction}
    given_up: set[str] = set()
    for drift in found:
        reaction = policy.reaction(drift)
        healed_at = heals.get(drift.subject, ())
        if reaction is Reaction.HEAL and fought(healed_at, policy.heals_per_hour, now):
            given_up.add(drift.subject)
            reaction = Reaction.BLOCK
        sorted_[reaction].append(drift)
    return Drifted(
        tuple(sorted_[Reaction.REPORT]),
        tuple(sorted_[Reaction.HEAL]),
        tuple(sorted_[Reaction.BLOCK]),
        frozenset(given_up),
    )


def sentence(drifts: Sequence[Drift], config: str, fought: frozenset[str] = frozenset()) -> str:
    """The drifts, the first few by name."""
    named = "; ".join(str(each) for each in drifts[:NAMED_LIMIT])
    more = f"; and {len(drifts) - NAMED_LIMIT} more" if len(drifts) > NAMED_LIMIT else ""
    told = f"the machine is not as {config} says: {named}{more}"
    if fought:
        listed = ", ".join(sorted(fought)[:NAMED_LIMIT])
        told += f"; something else keeps writing {listed}"
    return told


def remedy(drifts: Sequence[Drift], fought: frozenset[str] = frozenset()) -> str:
    """What a person can do about them."""
    if any(each.attribute in OF_THE_BOOT for each in drifts):
        return f"put it back, or have the config applied anew: touch {names.FORCE_FILE}"
    found = "find what writes there, then " if fought else ""
    return (
        f"{found}have it put right with 'treenail drift --heal PATH', or put the change into a "
        "MachineConfig"
    )
