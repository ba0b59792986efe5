"""What one update does to its machine: weighed once, before anything is touched."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, TypeVar

from treenail.config.diff import Change, Diff, diff
from treenail.config.wanted import Wanted
from treenail.update.impact.disruption import Disruption, Level, Reason
from treenail.update.impact.os_change import NO_CHANGE, OSChange
from treenail.update.impact.step_impact import as_diff
from treenail.update.steps.steps import Step

Json = dict[str, object]
T = TypeVar("T", bound=object)

REASONS_LIMIT = 20


@dataclass(frozen=True, slots=True)
class Work:
    """Everything about an update that decisions depend on; contents are read again when due."""

    os: OSChange = NO_CHANGE
    writes: bool = False
    """There are files, units or users to be written."""
    level: Level = Level.NONE
    reasons: tuple[str, ...] = ()
    """Why it disturbs what runs, the gravest only, at most `REASONS_LIMIT`."""

    @property
    def cost(self) -> str:
        """The gravest thing it does to what runs, in a word."""
        return self.level.name.lower().replace("_", "-")

    @property
    def drains(self) -> bool:
        """The node has to be out of service."""
        return self.level >= Level.DRAIN

    @property
    def reboots(self) -> bool:
        return self.level is Level.REBOOT


class Named(Protocol):
    """A reason with its source, which says itself."""

    def __str__(self) -> str: ...


def in_image_mode(wanted: Wanted) -> Wanted:
    """What is left to be written when files and units are in the image."""
    return replace(wanted, files={}, directories={}, links={}, units={})


def weigh(
    steps: Sequence[Step],
    change: OSChange,
    cost: Disruption,
    because: Callable[[Reason], Named],
) -> Work:
    """The work, with the reasons for the gravest of what it costs."""
    gravest = cost.costs[-1].reasons if cost.costs else ()
    reasons = tuple(str(because(reason)) for reason in gravest[: REASONS_LIMIT - 1])
    if len(gravest) > len(reasons):
        reasons += (f"and {len(gravest) - len(reasons)} more",)
    return Work(os=change, writes=bool(steps), level=cost.level, reasons=reasons)


def differences(old: Wanted, new: Wanted, steps: Sequence[Step], change: OSChange) -> Diff:
    """What differs between the configs, and what is on the machine beside that.

    Of the operating system, what is booted already is no difference.
    """
    configs, machine = diff(old, new), as_diff(new, steps)
    return Diff(
        files=tuple(_together(configs.files, machine.files)),
        directories=tuple(_together(configs.directories, machine.directories)),
        links=tuple(_together(configs.links, machine.links)),
        units=tuple(_together(configs.units, machine.units)),
        users=tuple(_together(configs.users, machine.users)),
        os=change.aspects,
    )


def to_json(work: Work) -> Json:
    """The work as the ledger keeps it."""
    change = {
        each.name: value if isinstance(value := getattr(work.os, each.name), str) else list(value)
        for each in fields(OSChange)
    }
    return {
        "os": change,
        "writes": work.writes,
        "level": work.level.name,
        "reasons": list(work.reasons),
    }


def from_json(document: Json) -> Work:
    """What `to_json` wrote; raises `ValueError` for anything else."""
    match document:
        case {
            "os": {"image": str(image), "packages_from": str(packages_from), **lists},
            "writes": bool(writes),
            "level": str(level),
            "reasons": list(reasons),
        } if level in Level.__members__:
            names = {each.name for each in fields(OSChange)} - {"image", "packages_from"}
            if names == lists.keys():
                asked = {name: _texts(lists[name]) for name in names}
                change = OSChange(image, packages_from=packages_from, **asked)
                return Work(change, writes, Level[level], _texts(reasons))
    raise ValueError("no work of an update")


def _together(configs: Sequence[Change[T]], machine: Sequence[Change[T]]) -> Iterator[Change[T]]:
    """A change between configs says more than the same one found on the machine."""
    yield from configs
    known = {change.key for change in configs}
    yield from (change for change in machine if change.key not in known)


def _texts(values: object) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise ValueError(f"expected a list, found {type(values).__name__}")  # noqa: TRY004 - a bad value
    return tuple(map(str, values))
