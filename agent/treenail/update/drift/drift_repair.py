"""The part of a plan that puts drift right, and nothing else."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from treenail.config import names
from treenail.config.drift import Drift, EntryKind
from treenail.update.impact.step_impact import plan_service_steps
from treenail.update.steps.steps import (
    BackUpEntry,
    ConfigStep,
    DisableUnits,
    EnableUnits,
    MakeDirectory,
    MakeLink,
    PresetUnits,
    RelabelEntry,
    RemoveEntry,
    WriteFile,
)

_UNKNOWN = "the config does not have it"


def plan_repair(planned: Sequence[ConfigStep], drifts: Collection[Drift]) -> tuple[ConfigStep, ...]:
    """The steps of a plan for the current config that put these drifts right.

    What stands there now is not kept: it is nobody's original. systemd reads its units again when
    one was touched; what runs is not restarted.
    """
    subjects = {drift.subject for drift in drifts}
    steps = (*_remove_unknown_dropins(planned, drifts), *_select_steps(planned, subjects))
    return (*steps, *plan_service_steps(steps, ()))


def _select_steps(planned: Sequence[ConfigStep], subjects: Collection[str]) -> Iterator[ConfigStep]:
    for step in planned:
        match step:
            case BackUpEntry():
                continue
            case WriteFile(path=path) | MakeDirectory(path=path) | MakeLink(path=path):
                if path in subjects:
                    yield step
            case RelabelEntry(path=path) | RemoveEntry(path=path):
                if path in subjects:
                    yield step
            case EnableUnits(units=units) | DisableUnits(units=units) | PresetUnits(units=units):
                concerned = tuple(unit for unit in units if unit in subjects)
                if concerned:
                    yield replace(step, units=concerned)
            case _:
                continue


def _remove_unknown_dropins(
    planned: Sequence[ConfigStep], drifts: Collection[Drift]
) -> Iterator[ConfigStep]:
    """Drop-ins that no config knows are in no plan."""
    known = {step.path for step in planned if isinstance(step, RemoveEntry)}
    for drift in drifts:
        path = drift.subject
        extra = drift.expected == EntryKind.NOTHING and path.startswith(f"{names.UNIT_DIRECTORY}/")
        if extra and path not in known:
            yield RemoveEntry(path, _UNKNOWN)
