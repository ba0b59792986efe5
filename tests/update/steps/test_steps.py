from typing import get_args

import pytest

from treenail.update.steps.ownership import Managed
from treenail.update.steps.steps import (
    Disable,
    Enable,
    Keep,
    MakeDirectory,
    MakeLink,
    Preset,
    PutBack,
    PutLinksBack,
    PutPasswordBack,
    Relabel,
    ReloadDaemon,
    ReloadUnit,
    Remember,
    Remove,
    RestartUnit,
    Restore,
    SetKeys,
    SetPassword,
    Step,
    WriteFile,
    inverse,
    undoing,
)

CANARY = "canary-7e2b91"
STEPS: dict[Step, str] = {
    WriteFile("/a", CANARY, 0o600, 0, "core", "why"): "write /a (0600 0:core): why",
    MakeDirectory("/d", 0o755, 0, 0, "why"): "make directory /d (0755): why",
    MakeLink("/l", "t", 0, 0, "why"): "link /l to t: why",
    Relabel("/a", "why"): "relabel /a: why",
    Remove("/r", "why"): "remove /r: why",
    Keep("/k"): "keep a copy of /k: the config takes its place",
    Restore("/k", "why"): "restore /k: why",
    Enable(("a.service", "b.service")): "enable a.service, b.service",
    Disable(("a.service",)): "disable a.service",
    Preset(("a.service",)): "preset a.service",
    SetKeys("core", (CANARY,), "why"): "write 1 SSH keys of core: why",
    SetPassword("core", CANARY, "why"): "set the password of core: why",
    ReloadDaemon(): "daemon-reload",
    ReloadUnit("a.service"): "reload a.service",
    RestartUnit("a.service"): "restart a.service",
}


def test_every_step_says_itself_and_no_secret():
    assert {step: str(step) for step in STEPS} == STEPS
    assert CANARY not in repr(list(STEPS))
    assert {type(step) for step in STEPS} | {Remember} == {
        kind for union in get_args(Step) for kind in (get_args(union) or (union,))
    }


@pytest.mark.parametrize("step", [*STEPS, Remember(Managed())], ids=str)
def test_every_step_has_an_inverse_that_says_itself(step):
    assert str(inverse(step))


def test_what_runs_takes_notice_when_the_rest_is_undone():
    steps = [*STEPS][:3] + [*STEPS][7:9] + [*STEPS][11:]
    assert undoing(steps) == (
        PutPasswordBack("core"),
        PutLinksBack(),
        PutBack("/l"),
        PutBack("/d"),
        PutBack("/a"),
        ReloadDaemon(),
        ReloadUnit("a.service"),
        RestartUnit("a.service"),
    )
