"""The steps of a plan that repair drift."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from treenail.config import node_paths
from treenail.config.drift_comparison import Drift, EntryKind
from treenail.update.impact.impact import plan_service_steps
from treenail.update.steps.step_types import (
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

_NOT_IN_CONFIG = "it is not in the config"


def plan_repair(planned: Sequence[ConfigStep], drifts: Collection[Drift]) -> tuple[ConfigStep, ...]:
    """Return the steps of a plan for the current config that repair these drifts.

    No step backs up the drifted entries, because they are not originals. systemd reloads its units
    if one changed; no service is restarted.
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
                drifted = tuple(unit for unit in units if unit in subjects)
                if drifted:
                    yield replace(step, units=drifted)
            case _:
                continue


def _remove_unknown_dropins(
    planned: Sequence[ConfigStep], drifts: Collection[Drift]
) -> Iterator[ConfigStep]:
    """Return the steps that remove drop-ins outside the config, which no plan contains."""
    known = {step.path for step in planned if isinstance(step, RemoveEntry)}
    for drift in drifts:
        path = drift.subject
        is_unit_file = path.startswith(f"{node_paths.UNIT_DIRECTORY}/")
        if is_unit_file and drift.expected == EntryKind.NOTHING and path not in known:
            yield RemoveEntry(path, _NOT_IN_CONFIG)
