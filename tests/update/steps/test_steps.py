from typing import get_args

import pytest

from treenail.update.steps.ownership import Ownership
from treenail.update.steps.steps import (
    BackUpEntry,
    ConfigStep,
    DisableUnits,
    EnableUnits,
    MakeDirectory,
    MakeLink,
    PresetUnits,
    RecordOwnership,
    RelabelEntry,
    ReloadDaemon,
    ReloadUnit,
    RemoveEntry,
    RestartUnit,
    RestoreEntry,
    SetPassword,
    SetSshKeys,
    UndoEnablement,
    UndoEntry,
    UndoPassword,
    WriteFile,
    invert_step,
    list_undo_steps,
)

CANARY = "canary-7e2b91"
STEPS: dict[ConfigStep, str] = {
    WriteFile("/a", CANARY, 0o600, 0, "core", "why"): "write /a (0600 0:core): why",
    MakeDirectory("/d", 0o755, 0, 0, "why"): "make directory /d (0755): why",
    MakeLink("/l", "t", 0, 0, "why"): "link /l to t: why",
    RelabelEntry("/a", "why"): "relabel /a: why",
    RemoveEntry("/r", "why"): "remove /r: why",
    BackUpEntry("/k"): "keep a copy of /k: the config takes its place",
    RestoreEntry("/k", "why"): "restore /k: why",
    EnableUnits(("a.service", "b.service")): "enable a.service, b.service",
    DisableUnits(("a.service",)): "disable a.service",
    PresetUnits(("a.service",)): "preset a.service",
    SetSshKeys("core", (CANARY,), "why"): "write 1 SSH keys of core: why",
    SetPassword("core", CANARY, "why"): "set the password of core: why",
    ReloadDaemon(): "daemon-reload",
    ReloadUnit("a.service"): "reload a.service",
    RestartUnit("a.service"): "restart a.service",
}


def test_every_step_says_itself_and_no_secret():
    assert {step: str(step) for step in STEPS} == STEPS
    assert CANARY not in repr(list(STEPS))
    assert {type(step) for step in STEPS} | {RecordOwnership} == {
        kind for union in get_args(ConfigStep) for kind in (get_args(union) or (union,))
    }


@pytest.mark.parametrize("step", [*STEPS, RecordOwnership(Ownership())], ids=str)
def test_every_step_has_an_inverse_that_says_itself(step):
    assert str(invert_step(step))


def test_what_runs_takes_notice_when_the_rest_is_undone():
    steps = [*STEPS][:3] + [*STEPS][7:9] + [*STEPS][11:]
    assert list_undo_steps(steps) == (
        UndoPassword("core"),
        UndoEnablement(),
        UndoEntry("/l"),
        UndoEntry("/d"),
        UndoEntry("/a"),
        ReloadDaemon(),
        ReloadUnit("a.service"),
        RestartUnit("a.service"),
    )
