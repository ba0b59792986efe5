"""The OS image gate: every recorded decision, and pools that wait for pools."""

from typing import Any

import pytest

from tests.controllers.rollout.builders import (
    NEW,
    OLD,
    failed,
    image_build,
    image_config,
    node,
    on_its_way,
    pool,
    recorded_image,
)
from tests.oracle import needs_oracle, records
from treenail.api.machineosbuild import BuildState, MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.controllers.pools.node_facts import RolloutTarget
from treenail.controllers.pools.os_image import (
    GateBlocked,
    GateOpen,
    GateWaiting,
    PoolBuild,
    check_control_plane,
    compute_build_target,
    decide_built_image,
    decide_pool_image,
    find_pool_build,
    find_pool_owner,
    read_pool_image,
)
from treenail.errors import ConfigError

SPEC = "registry.example.com/os@sha256:" + "1" * 64
READY = image_config("c", SPEC)


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
    failed_build = image_build("b-1", "new", "", BuildState.FAILED)
    assert decide_built_image(pool(), READY, failed_build) == GateBlocked(
        "image build b-1 for MachineConfigPool worker failed", "ImageBuildDegraded"
    )


def test_orphaned_build_names_build_and_pool() -> None:
    assert decide_built_image(pool(), None, image_build("b-1", "new")) == GateBlocked(
        'orphaned MachineOSBuild "b-1" found, but no MachineOSConfig for pool worker'
    )


def test_built_image_is_the_target() -> None:
    build = image_build("b-1", "new", SPEC, BuildState.SUCCEEDED)
    assert decide_built_image(pool(), READY, build) == GateOpen(
        RolloutTarget("new", SPEC), f"Image built successfully, pullspec: {SPEC}"
    )
    assert compute_build_target(pool(), READY, build) == RolloutTarget("new", SPEC)


@pytest.mark.parametrize(
    ("config", "build"),
    [(READY, None), (None, image_build("b")), (READY, image_build("b", "older", SPEC))],
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


def test_pool_without_machineosconfig_takes_its_own_image() -> None:
    assert decide_pool_image(pool(osImage=SPEC), PoolBuild()) == read_pool_image(pool(osImage=SPEC))


def test_pool_with_image_and_machineosconfig_is_blocked() -> None:
    found = decide_pool_image(pool(osImage=SPEC), PoolBuild(image_config()))
    assert isinstance(found, GateBlocked)
    assert found.kind == "InvalidConfiguration"
    assert "kubectl delete machineosconfig worker" in found.reason


def test_rejected_machineosconfig_without_build_blocks_with_its_problem() -> None:
    rejected = image_config(problem="Secret push does not exist")
    assert decide_pool_image(pool(), PoolBuild(rejected)) == GateBlocked(
        "Secret push does not exist", "ImageBuildDegraded"
    )
    built = image_build("b", "new", SPEC, BuildState.SUCCEEDED)
    found = decide_pool_image(pool(), PoolBuild(image_config(problem="x", pull_spec=SPEC), built))
    assert isinstance(found, GateOpen)


def test_failed_build_reports_its_cause_once() -> None:
    build = image_build("b-1", "new", "", BuildState.FAILED, message="line 3: no such package")
    found = decide_built_image(pool(), READY, build)
    assert found.reason == (
        "image build b-1 for MachineConfigPool worker failed: line 3: no such package"
    )


def test_build_named_by_the_annotation_wins_over_a_newer_one() -> None:
    builds = [image_build("b-1", created="2026-01-01"), image_build("b-2", created="2026-01-02")]
    named = image_config(current_build="b-1")
    assert find_pool_build(pool(), [named], builds).build == builds[0]
    assert find_pool_build(pool(), [image_config()], builds).build == builds[1]


def test_build_of_another_config_is_not_that_of_the_pool() -> None:
    builds = [image_build("b-1", config="older")]
    named = image_config(current_build="b-1")
    assert find_pool_build(pool(), [named], builds) == PoolBuild(named, None)
    foreign = [image_build("b-2", "new", image_config="other")]
    assert find_pool_build(pool(), [named], foreign) == PoolBuild(named, None)


def test_builds_without_machineosconfig_are_ignored() -> None:
    assert find_pool_build(pool(), [], [image_build("b-1")]) == PoolBuild()


def test_second_machineosconfig_of_a_pool_never_wins() -> None:
    oldest = image_config("legacy", created="2025-01-01T00:00:00Z")
    newer = image_config("legacy-2", created="2026-01-01T00:00:00Z")
    namesake = image_config("worker", created="2026-02-01T00:00:00Z")
    assert find_pool_owner("worker", [newer, oldest]) == oldest
    assert find_pool_owner("worker", [newer, oldest, namesake]) == namesake
    assert find_pool_owner("infra", [newer, oldest]) is None


def test_machineosconfig_is_parsed_with_its_problem() -> None:
    document = {
        "metadata": {
            "name": "worker",
            "annotations": {"machineconfiguration.openshift.io/current-machine-os-build": "b"},
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"machineConfigPool": {"name": "worker"}},
        "status": {
            "currentImagePullSpec": SPEC,
            "conditions": [
                {"type": "Accepted", "status": "False", "reason": "PoolTaken", "message": "taken"}
            ],
        },
    }
    found = MachineOSConfig.from_json(document)
    assert (found.name, found.pull_spec, found.pool) == ("worker", SPEC, "worker")
    assert (found.current_build, found.created) == ("b", "2026-01-01T00:00:00Z")
    assert found.problem == "taken"
