"""The part of a plan that puts drift right, and nothing else."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from treenail.config import names
from treenail.config.drift import Drift, Kind
from treenail.update.impact.step_impact import serving
from treenail.update.steps.steps import (
    Disable,
    Enable,
    Keep,
    MakeDirectory,
    MakeLink,
    Preset,
    Relabel,
    Remove,
    Step,
    WriteFile,
)

_UNKNOWN = "the config does not have it"


def healing(planned: Sequence[Step], drifts: Collection[Drift]) -> tuple[Step, ...]:
    """The steps of a plan for the current config that put these drifts right.

    What stands there now is not kept: it is nobody's original. systemd reads its units again when
    one was touched; what runs is not restarted.
    """
    subjects = {drift.subject for drift in drifts}
    steps = (*_unknown(planned, drifts), *_chosen(planned, subjects))
    return (*steps, *serving(steps, ()))


def _chosen(planned: Sequence[Step], subjects: Collection[str]) -> Iterator[Step]:
    for step in planned:
        match step:
            case Keep():
                continue
            case WriteFile(path=path) | MakeDirectory(path=path) | MakeLink(path=path):
                if path in subjects:
                    yield step
            case Relabel(path=path) | Remove(path=path):
                if path in subjects:
                    yield step
            case Enable(units=units) | Disable(units=units) | Preset(units=units):
                concerned = tuple(unit for unit in units if unit in subjects)
                if concerned:
                    yield replace(step, units=concerned)
            case _:
                continue


def _unknown(planned: Sequence[Step], drifts: Collection[Drift]) -> Iterator[Step]:
    """Drop-ins that no config knows are in no plan."""
    known = {step.path for step in planned if isinstance(step, Remove)}
    for drift in drifts:
        path = drift.subject
        extra = drift.expected == Kind.NOTHING and path.startswith(f"{names.UNITS}/")
        if extra and path not in known:
            yield Remove(path, _UNKNOWN)
