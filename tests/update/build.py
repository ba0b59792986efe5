"""Builders of facts: by default a node that has image A and requests image B."""

from dataclasses import replace

from treenail.api import annotations as key
from treenail.deployment_change import DeploymentChange
from treenail.update.decision.node_state import (
    DrainHandshake,
    Facts,
    ObservedNode,
    read_desired_target,
)
from treenail.update.impact.impact import DisruptionLevel, UpdateImpact
from treenail.update.impact.os_change import DeploymentState
from treenail.update.state.ledger_record import LedgerRecord, Phase, Target, UpdateRecord

DIGEST_A = "sha256:" + "a" * 64
DIGEST_B = "sha256:" + "b" * 64
DIGEST_C = "sha256:" + "c" * 64
A = Target("rendered-worker-a", f"registry.example.com/os/node@{DIGEST_A}")
B = Target("rendered-worker-b", f"registry.example.com/os/node@{DIGEST_B}")
C = Target("rendered-worker-c", f"registry.example.com/os/node@{DIGEST_C}")
IMAGE_B = UpdateImpact(
    DeploymentChange(image=B.image), level=DisruptionLevel.REBOOT, checked_id="os-1"
)
BOOT_1 = "11111111-1111-1111-1111-111111111111"
BOOT_2 = "22222222-2222-2222-2222-222222222222"


def observed_node(
    target: Target = B,
    *,
    requested: str = "",
    applied: str = "",
    unschedulable: bool = False,
    spelling: str = key.DESIRED_OS_IMAGE,
    claimed: Target = A,
    shown: Target | None = None,
) -> ObservedNode:
    annotations = {key.DESIRED_CONFIG: target.config}
    if target.image:
        annotations[spelling] = target.image
    return ObservedNode(
        read_desired_target(annotations),
        DrainHandshake(requested, applied, unschedulable),
        claimed,
        shown_config=shown.config if shown else "",
        shown_images=frozenset({shown.image} if shown and shown.image else ()),
    )


def drained_node(token: str, target: Target = B) -> ObservedNode:
    return observed_node(target, requested=token, applied=token, unschedulable=True)


def update(phase: Phase = Phase.STAGING, **changes: object) -> UpdateRecord:
    start = UpdateRecord(
        id="0" * 32,
        target=B,
        origin=A,
        phase=phase,
        boot_id=BOOT_1,
        began=0.0,
        entered=0.0,
        impact=IMAGE_B,
    )
    return replace(start, **changes)  # type: ignore[arg-type]


def facts(**changes: object) -> Facts:
    start = Facts(
        record=LedgerRecord(current=A),
        boot_id=BOOT_1,
        now=100.0,
        node=observed_node(),
        deployments=DeploymentState(booted_digest=DIGEST_A, booted_id="os-0"),
    )
    return replace(start, **changes)  # type: ignore[arg-type]


def staged(target: Target = B, *, locked: bool = True, booted: str = DIGEST_A) -> DeploymentState:
    return DeploymentState(
        booted_digest=booted,
        booted_id="os-0",
        staged_digest=target.digest,
        staged_id="os-1",
        is_locked=locked,
    )
