"""The OS image gate: every recorded decision, and pools that wait for pools."""

from typing import Any

import pytest

from tests.controllers.rollout.builders import (
    NEW,
    OLD,
    failed,
    node,
    on_its_way,
    pool,
    recorded_image,
)
from tests.oracle import needs_oracle, records
from treenail.controllers.rollout.gates.os_image import (
    BuildState,
    GateBlocked,
    GateOpen,
    GateWaiting,
    MachineOSBuild,
    MachineOSConfig,
    check_control_plane,
    compute_build_target,
    decide_built_image,
    read_pool_image,
)
from treenail.controllers.rollout.nodes import RolloutTarget
from treenail.errors import ConfigError

SPEC = "registry.example.com/os@sha256:" + "1" * 64
READY = MachineOSConfig("c", SPEC)


@needs_oracle
def test_build_gate_agrees_with_the_mco() -> None:
    found = records("layered_continue")
    for record in found:
        verdict = decide_built_image(pool(), *recorded_image(record))
        assert isinstance(verdict, GateOpen) is record["ok"]
        assert isinstance(verdict, GateBlocked) is bool(record["err"])
        # The reference swaps the names of the build and of the pool.
        if not record["err"]:
            assert verdict.reason == record["msg"]
    assert len(found) == 11


def test_failed_build_names_build_and_pool() -> None:
    failed_build = MachineOSBuild("b-1", "new", "", BuildState.FAILED)
    assert decide_built_image(pool(), READY, failed_build) == GateBlocked(
        "image build b-1 for MachineConfigPool worker failed"
    )


def test_orphaned_build_names_build_and_pool() -> None:
    assert decide_built_image(pool(), None, MachineOSBuild("b-1", "new")) == GateBlocked(
        'orphaned MachineOSBuild "b-1" found, but no MachineOSConfig for pool worker'
    )


def test_built_image_is_the_target() -> None:
    build = MachineOSBuild("b-1", "new", SPEC, BuildState.SUCCEEDED)
    assert decide_built_image(pool(), READY, build) == GateOpen(
        RolloutTarget("new", SPEC), f"Image built successfully, pullspec: {SPEC}"
    )
    assert compute_build_target(pool(), READY, build) == RolloutTarget("new", SPEC)


@pytest.mark.parametrize(
    ("config", "build"),
    [(READY, None), (None, MachineOSBuild("b")), (READY, MachineOSBuild("b", "older", SPEC))],
)
def test_target_without_build_has_an_empty_image(
    config: MachineOSConfig | None, build: MachineOSBuild | None
) -> None:
    assert compute_build_target(pool(), config, build) == RolloutTarget("new", "")


@pytest.mark.parametrize(
    ("true", "state"),
    [
        ([], BuildState.INITIAL),
        (["Prepared"], BuildState.PREPARED),
        (["Prepared", "Building"], BuildState.BUILDING),
        (["Building", "Failed"], BuildState.FAILED),
        (["Failed", "Succeeded"], BuildState.SUCCEEDED),
        (["Interrupted"], BuildState.INTERRUPTED),
        (["Other"], BuildState.INITIAL),
    ],
)
def test_build_state_is_the_last_true_condition(true: list[str], state: BuildState) -> None:
    conditions = [{"type": kind, "status": "True"} for kind in true]
    conditions.append({"type": "Succeeded", "status": "False"})
    document: dict[str, Any] = {"metadata": {"name": "b"}, "status": {"conditions": conditions}}
    assert MachineOSBuild.from_json(document).state is state


def test_image_of_the_pool_is_the_target() -> None:
    found = read_pool_image(pool(osImage=SPEC))
    assert found.target == RolloutTarget("new", SPEC)
    assert read_pool_image(pool()).target == RolloutTarget("new")


def test_image_by_tag_is_rejected() -> None:
    with pytest.raises(ConfigError) as raised:
        read_pool_image(pool(osImage="registry.example.com/os:latest"))
    assert str(raised.value).startswith("spec.osImage of pool worker is ")
    assert "names a tag" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "masters", "arbiters", "reason"),
    [
        ("master", [node("m")], [node("a")], None),
        ("master", [node("m")], [on_its_way("a")], "waiting: arbiter a is unavailable"),
        ("arbiter", [node("m", NEW)], [node("a")], None),
        ("arbiter", [node("m", OLD)], [node("a")], "waiting: master m updates first"),
        (
            "arbiter",
            [node("m", NEW, is_healthy=False)],
            [node("a")],
            "waiting: master m updates first",
        ),
        ("arbiter", [failed("m")], [node("a")], "waiting: master m updates first"),
        ("worker", [on_its_way("m")], [on_its_way("a")], None),
        ("master", [node("m")], [], None),
    ],
)
def test_masters_and_arbiters_wait_for_each_other(
    name: str, masters: Any, arbiters: Any, reason: str | None
) -> None:
    expected = None if reason is None else GateWaiting(reason)
    assert check_control_plane(name, masters, arbiters, NEW) == expected
