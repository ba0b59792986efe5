"""The decision of the first boot."""

import pytest

from tests.update.build import BOOT_1, DIGEST_A, DIGEST_B, DIGEST_C, B
from treenail.api.machineconfig import MachineConfig
from treenail.errors import UnreconcilableError
from treenail.update.firstboot import (
    FirstBootProgress,
    FirstBootReady,
    FirstBootStage,
    FirstBootTarget,
    decide_first_boot,
)
from treenail.update.impact.os_change import RunningOS


def decide(target: FirstBootTarget, running: RunningOS) -> FirstBootReady | FirstBootStage:
    return decide_first_boot(
        target, running, FirstBootProgress(), fips=False, boot_id=BOOT_1, architecture="amd64"
    )


def test_machine_booted_from_manifest_list_is_ready() -> None:
    target = FirstBootTarget(None, B.image)
    assert isinstance(decide(target, RunningOS(DIGEST_C, list_digest=DIGEST_B)), FirstBootReady)
    assert isinstance(decide(target, RunningOS(DIGEST_C, list_digest=DIGEST_A)), FirstBootStage)


def test_kernel_type_of_another_architecture_is_refused() -> None:
    target = FirstBootTarget(MachineConfig(kernel_type="64k-pages"))
    with pytest.raises(UnreconcilableError, match="64k-pages: it exists for arm64 only"):
        decide(target, RunningOS(DIGEST_A))
