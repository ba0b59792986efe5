"""The sentences and the inverses of steps."""

from typing import get_args

import pytest

from treenail.update.steps.inventory import Ownership
from treenail.update.steps.step_types import (
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
    StoreConfig,
    UndoEnablement,
    UndoEntry,
    UndoPassword,
    WriteFile,
    invert_step,
    list_undo_steps,
)

CANARY = "canary-7e2b91"
STEPS: dict[ConfigStep, str] = {
    WriteFile("/a", CANARY, 0o600, 0, "core", "reason"): "write /a (0600 0:core): reason",
    MakeDirectory("/d", 0o755, 0, 0, "reason"): "make directory /d (0755): reason",
    MakeLink("/l", "t", 0, 0, "reason"): "link /l to t: reason",
    RelabelEntry("/a", "reason"): "relabel /a: reason",
    RemoveEntry("/r", "reason"): "remove /r: reason",
    BackUpEntry("/k"): "back up /k: the config replaces it",
    RestoreEntry("/k", "reason"): "restore /k: reason",
    EnableUnits(("a.service", "b.service")): "enable a.service, b.service",
    DisableUnits(("a.service",)): "disable a.service",
    PresetUnits(("a.service",)): "preset a.service",
    SetSshKeys("core", (CANARY,), "reason"): "write 1 SSH keys of core: reason",
    SetPassword("core", CANARY, "reason"): "set the password of core: reason",
    StoreConfig("/c", CANARY.encode): "store the config in /c",
    ReloadDaemon(): "daemon-reload",
    ReloadUnit("a.service"): "reload a.service",
    RestartUnit("a.service"): "restart a.service",
}


def test_every_step_has_a_sentence_without_secrets():
    assert {step: str(step) for step in STEPS} == STEPS
    assert CANARY not in repr(list(STEPS))
    assert {type(step) for step in STEPS} | {RecordOwnership} == {
        kind for union in get_args(ConfigStep) for kind in (get_args(union) or (union,))
    }


@pytest.mark.parametrize("step", [*STEPS, RecordOwnership(Ownership())], ids=str)
def test_every_step_has_an_inverse_with_a_sentence(step):
    assert str(invert_step(step))


def test_undo_reverses_the_order_and_ends_with_services():
    steps = [*STEPS][:3] + [*STEPS][7:9] + [*STEPS][11:12] + [*STEPS][13:]
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
