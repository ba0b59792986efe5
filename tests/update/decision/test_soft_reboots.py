"""Which reboots may keep the kernel, and what follows one that led elsewhere."""

from dataclasses import replace

import pytest

from tests.update.build import (
    BOOT_1,
    BOOT_2,
    DIGEST_A,
    IMAGE_B,
    A,
    B,
    C,
    drained,
    facts,
    staged,
    update,
    wanting,
)
from treenail.update.decision.actions import Drop, Reboot
from treenail.update.decision.decide import REBOOTS_ALLOWED, decide
from treenail.update.decision.facts import Deployed
from treenail.update.impact.disruption import Level
from treenail.update.impact.impact import Work
from treenail.update.impact.os_change import OSChange
from treenail.update.state.record import Phase, Record
from treenail.update.status import Event, report

TOKEN = f"drain-{B.config}"
SOFT_1 = f"{BOOT_1}+1"


@pytest.mark.parametrize(
    ("work", "softly"),
    [
        (IMAGE_B, True),
        (Work(OSChange(install=("usbguard",)), level=Level.REBOOT), True),
        (Work(OSChange(image=B.image, append=("nosmt",)), level=Level.REBOOT), False),
        (Work(OSChange(image=B.image, delete=("nosmt",)), level=Level.REBOOT), False),
        (Work(OSChange(install=("kernel-rt-core",)), level=Level.REBOOT), False),
        (Work(OSChange(remove=("kernel-core",)), level=Level.REBOOT), False),
    ],
)
def test_a_reboot_may_be_soft_unless_the_change_concerns_the_kernel(
    work: Work, *, softly: bool
) -> None:
    record = Record(
        current=A,
        update=update(Phase.DRAINING, drain=TOKEN, staged_id="os-1", work=work),
    )
    at = facts(record=record, node=drained(TOKEN), deployed=staged(), softly=True)
    assert decide(at) == Reboot(B, "os-1", softly=softly)
    assert decide(replace(at, softly=False)) == Reboot(B, "os-1")


def test_a_soft_reboot_is_asked_for_again_in_the_same_boot_and_in_no_other() -> None:
    asked = update(Phase.REBOOTING, drain=TOKEN, staged_id="os-1", reboots=1)
    at = facts(
        record=Record(current=A, update=asked), node=drained(TOKEN), deployed=staged(), softly=True
    )
    assert decide(at) == Reboot(B, "os-1", softly=True)
    again = replace(at, record=Record(current=A, update=replace(asked, reboots=2)))
    assert decide(again) == Reboot(B, "os-1")


def test_a_soft_reboot_that_led_elsewhere_is_followed_by_a_full_one() -> None:
    asked = update(Phase.REBOOTING, drain=TOKEN, staged_id="os-1", reboots=1)
    written = Deployed(booted=DIGEST_A, others=("os-1",), pending_id="os-1")
    at = facts(
        record=Record(current=A, update=asked),
        node=drained(TOKEN),
        deployed=written,
        softly=True,
        boot_id=SOFT_1,
    )
    assert decide(at) == Reboot(B)
    assert decide(replace(at, node=None)) == Reboot(B), "past the point of no return"
    left = replace(at, deployed=staged(locked=False))
    assert decide(left) == Reboot(B, "os-1"), "the shutdown did not finalize it"
    assert decide(replace(at, node=wanting())) == Drop(
        "the node came back into service while it was about to reboot", "os-1"
    )
    assert decide(replace(at, node=drained(TOKEN, C))) == Drop(
        "another target is asked for", "os-1"
    )
    tried = replace(at, record=Record(current=A, update=replace(asked, reboots=REBOOTS_ALLOWED)))
    assert isinstance(decide(tried), Drop)


def test_a_full_reboot_after_a_soft_one_is_asked_for_until_it_comes() -> None:
    asked = update(Phase.REBOOTING, boot_id=SOFT_1, drain=TOKEN, staged_id="os-1", reboots=2)
    at = facts(
        record=Record(current=A, update=asked),
        node=drained(TOKEN),
        deployed=Deployed(booted=DIGEST_A, others=("os-1",), pending_id="os-1"),
        softly=True,
        boot_id=SOFT_1,
    )
    assert decide(at) == Reboot(B)


def test_the_earlier_system_after_a_reboot_of_the_kernel_is_the_boot_loaders_doing() -> None:
    asked = update(Phase.REBOOTING, drain=TOKEN, staged_id="os-1", reboots=1)
    written = Deployed(booted=DIGEST_A, others=("os-1",), pending_id="os-1")
    at = facts(
        record=Record(current=A, update=asked),
        node=drained(TOKEN),
        deployed=written,
        boot_id=BOOT_2,
    )
    decision = decide(at)
    assert isinstance(decision, Drop)
    assert decision.reason == "the earlier system was booted"


@pytest.mark.parametrize(("boot_id", "soft"), [(SOFT_1, True), (BOOT_2, False)])
def test_an_update_knows_whether_its_reboot_kept_the_kernel(boot_id: str, *, soft: bool) -> None:
    asked = update(Phase.REBOOTING)
    assert asked.enter(Phase.PROVING, boot_id=boot_id, now=1.0).soft is soft


def test_the_node_is_told_that_its_reboot_may_be_soft() -> None:
    record = Record(current=A, update=update(Phase.DRAINING))
    told = report(facts(record=record), Reboot(B, "os-1", softly=True), None)
    assert told.event == Event(
        "Normal", "Reboot", f"Node will reboot into {B}, with a soft reboot if the kernel stays"
    )
