"""The steps of a plan that repair drift."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from treenail.config import drift_comparison, node_paths
from treenail.observations import EntryKind
from treenail.update.impact.impact import plan_service_steps
from treenail.update.steps import step_types

_NOT_IN_CONFIG = "it is not in the config"


def plan_repair(
    planned: Sequence[step_types.ConfigStep], drifts: Collection[drift_comparison.Drift]
) -> tuple[step_types.ConfigStep, ...]:
    """Return the steps of a plan for the current config that repair these drifts.

    No step backs up the drifted entries, because they are not originals. systemd reloads its units
    if one changed; no service is restarted.
    """
    subjects = {drift.subject for drift in drifts}
    steps = (*_remove_unknown_dropins(planned, drifts), *_select_steps(planned, subjects))
    return (*steps, *plan_service_steps(steps, ()))


def _select_steps(
    planned: Sequence[step_types.ConfigStep], subjects: Collection[str]
) -> Iterator[step_types.ConfigStep]:
    for step in planned:
        match step:
            case step_types.BackUpEntry():
                continue
            case (
                step_types.WriteFile(path=path)
                | step_types.MakeDirectory(path=path)
                | step_types.MakeLink(path=path)
            ):
                if path in subjects:
                    yield step
            case step_types.RelabelEntry(path=path) | step_types.RemoveEntry(path=path):
                if path in subjects:
                    yield step
            case (
                step_types.EnableUnits(units=units)
                | step_types.DisableUnits(units=units)
                | step_types.PresetUnits(units=units)
            ):
                drifted = tuple(unit for unit in units if unit in subjects)
                if drifted:
                    yield replace(step, units=drifted)
            case _:
                continue


def _remove_unknown_dropins(
    planned: Sequence[step_types.ConfigStep], drifts: Collection[drift_comparison.Drift]
) -> Iterator[step_types.ConfigStep]:
    """Return the steps that remove drop-ins outside the config, which no plan contains."""
    known = {step.path for step in planned if isinstance(step, step_types.RemoveEntry)}
    for drift in drifts:
        path = drift.subject
        is_unit_file = path.startswith(f"{node_paths.UNIT_DIRECTORY}/")
        if is_unit_file and drift.expected == EntryKind.NOTHING and path not in known:
            yield step_types.RemoveEntry(path, _NOT_IN_CONFIG)
