"""The decision of the first boot."""

from typing import Any

import pytest

from tests.update.build import BOOT_1, BOOT_2, DIGEST_A, DIGEST_B, DIGEST_C, B
from treenail.api.machineconfig import MachineConfig
from treenail.errors import ConfigError, HostError, UnreconcilableError
from treenail.update.firstboot import (
    REBOOTS_ALLOWED,
    REBOOTS_WITHOUT_TRACE,
    FirstBootClaim,
    FirstBootProgress,
    FirstBootReady,
    FirstBootStage,
    FirstBootTarget,
    decide_first_boot,
    select_target,
)
from treenail.update.impact.os_change import DeploymentState


def decide(target: FirstBootTarget, running: DeploymentState) -> FirstBootReady | FirstBootStage:
    return decide_first_boot(
        target, running, FirstBootProgress(), fips=False, boot_id=BOOT_1, architecture="amd64"
    )


def test_machine_booted_from_manifest_list_is_ready() -> None:
    target = FirstBootTarget(None, B.image)
    assert isinstance(
        decide(target, DeploymentState(DIGEST_C, booted_list_digest=DIGEST_B)), FirstBootReady
    )
    assert isinstance(
        decide(target, DeploymentState(DIGEST_C, booted_list_digest=DIGEST_A)), FirstBootStage
    )


@pytest.mark.parametrize("image", ["", B.image])
def test_extensions_are_in_the_image_beside_the_config(image: str) -> None:
    config = MachineConfig(os_image_url=B.image, extensions=("usbguard",))
    found = decide(
        select_target(config, FirstBootClaim(image=image), image=""), DeploymentState(DIGEST_A)
    )
    assert isinstance(found, FirstBootStage)
    assert found.change.image == B.image
    assert found.change.install_packages == (() if image else ("usbguard",))


def test_image_of_the_annotations_without_a_digest_is_refused() -> None:
    with pytest.raises(ConfigError, match="node-annotations"):
        select_target(None, FirstBootClaim(image="quay.io/example/os:latest"), image="")


def test_kernel_type_of_another_architecture_is_refused() -> None:
    target = FirstBootTarget(MachineConfig(kernel_type="64k-pages"))
    with pytest.raises(UnreconcilableError, match="64k-pages: it exists for arm64 only"):
        decide(target, DeploymentState(DIGEST_A))


def decide_after_reboots(count: int, **facts: Any) -> object:
    return decide_first_boot(
        FirstBootTarget(None, B.image),
        DeploymentState(DIGEST_A),
        FirstBootProgress(count, BOOT_1, "os-1"),
        fips=False,
        boot_id=BOOT_2,
        architecture="amd64",
        **facts,
    )


def test_reboots_into_another_deployment_end_with_the_error_of_the_finalization() -> None:
    with pytest.raises(HostError) as caught:
        decide_after_reboots(REBOOTS_ALLOWED, finalization_error="No space left on device")
    assert str(caught.value) == (
        "cannot boot the target of the first boot: 3 reboots booted another deployment; "
        "ostree-finalize-staged failed: No space left on device"
    )


def test_reboots_end_early_only_where_the_target_was_finalized_and_not_booted() -> None:
    with pytest.raises(HostError, match=r"3 reboots booted another deployment$"):
        decide_after_reboots(REBOOTS_ALLOWED, is_deployed=True)
    # Nothing of the deployment is left after a power cut before the shutdown ended.
    assert isinstance(decide_after_reboots(REBOOTS_WITHOUT_TRACE - 1), FirstBootStage)
    with pytest.raises(HostError, match=r"10 reboots booted another deployment$"):
        decide_after_reboots(REBOOTS_WITHOUT_TRACE)
