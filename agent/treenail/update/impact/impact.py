"""What one update does to its machine: weighed once, before anything is touched."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from treenail.codec import key
from treenail.config.diff import ConfigDiff, EntryChange, compare_configs
from treenail.config.wanted import WantedState
from treenail.update.impact.disruption import ConfigDisruption, DisruptionLevel, DisruptionReason
from treenail.update.impact.os_change import NO_OS_CHANGE, OSChange
from treenail.update.impact.step_impact import convert_steps_to_diff
from treenail.update.steps.steps import ConfigStep

T = TypeVar("T", bound=object)

REASONS_LIMIT = 20


@dataclass(frozen=True, slots=True)
class UpdateImpact:
    """Everything about an update that decisions depend on; contents are read again when due."""

    os: OSChange = field(default=NO_OS_CHANGE, metadata=key(is_required=True))
    needs_write: bool = field(default=False, metadata=key("needsWrite", is_required=True))
    """There are files, units or users to be written."""
    level: DisruptionLevel = field(
        default=DisruptionLevel.NONE,
        metadata=key(fallback=DisruptionLevel.REBOOT, is_required=True),
    )
    reasons: tuple[str, ...] = ()
    """Why it disturbs what runs, the gravest only, at most `REASONS_LIMIT`."""

    @property
    def level_name(self) -> str:
        """The gravest thing it does to what runs, in a word."""
        return self.level.name.lower().replace("_", "-")

    @property
    def needs_drain(self) -> bool:
        """The node has to be out of service."""
        return self.level >= DisruptionLevel.DRAIN

    @property
    def needs_reboot(self) -> bool:
        return self.level is DisruptionLevel.REBOOT


def apply_image_mode(wanted: WantedState) -> WantedState:
    """What is left to be written when files and units are in the image."""
    return replace(wanted, files={}, directories={}, links={}, units={})


def compute_impact(
    steps: Sequence[ConfigStep],
    change: OSChange,
    cost: ConfigDisruption,
    find_cause: Callable[[DisruptionReason], object],
) -> UpdateImpact:
    """The work, with the reasons for the gravest of what it costs."""
    gravest = cost.costs[-1].reasons if cost.costs else ()
    reasons = tuple(str(find_cause(reason)) for reason in gravest[: REASONS_LIMIT - 1])
    if len(gravest) > len(reasons):
        reasons += (f"and {len(gravest) - len(reasons)} more",)
    return UpdateImpact(os=change, needs_write=bool(steps), level=cost.level, reasons=reasons)


def compute_differences(
    old: WantedState, new: WantedState, steps: Sequence[ConfigStep], change: OSChange
) -> ConfigDiff:
    """What differs between the configs, and what is on the machine beside that.

    Of the operating system, what is booted already is no difference.
    """
    configs, machine = compare_configs(old, new), convert_steps_to_diff(new, steps)
    return ConfigDiff(
        files=tuple(_merge_changes(configs.files, machine.files)),
        directories=tuple(_merge_changes(configs.directories, machine.directories)),
        links=tuple(_merge_changes(configs.links, machine.links)),
        units=tuple(_merge_changes(configs.units, machine.units)),
        users=tuple(_merge_changes(configs.users, machine.users)),
        os=change.aspects,
    )


def _merge_changes(
    configs: Sequence[EntryChange[T]], machine: Sequence[EntryChange[T]]
) -> Iterator[EntryChange[T]]:
    """A change between configs says more than the same one found on the machine."""
    yield from configs
    known = {change.key for change in configs}
    yield from (change for change in machine if change.key not in known)
