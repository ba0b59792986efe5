"""A pool's status: every recorded one, the deliberate differences, and what is added."""

from typing import Any

import pytest

from tests.controllers.rollout.builders import (
    NEW,
    OLD,
    failed,
    image,
    image_build,
    image_config,
    node,
    on_its_way,
    pool,
    recorded_image,
    recorded_nodes,
)
from tests.oracle import needs_oracle, records
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosbuild import BuildState
from treenail.api.object_meta import Condition
from treenail.controllers.pools.node_facts import NodeFacts, RolloutTarget
from treenail.controllers.pools.os_image import (
    GateBlocked,
    compute_build_target,
    decide_built_image,
)
from treenail.controllers.pools.pool_status import (
    PoolCounts,
    PoolProblem,
    PoolStatusInput,
    compute_status,
    count_nodes,
)

NOW = "2026-06-01T00:00:00Z"

# Two deliberate differences, by record. A Degraded node without a reason is named all the same;
# the reference writes "0 nodes are reporting degraded status on sync" with an empty message.
UNNAMED = {39: "node-0", 47: "node-0"}
# A node that fails on its image is not unavailable (see `nodes`).
FAILING_BY_IMAGE = {39}

# Fields of the controllers for certificates, pinned images and image streams.
OTHERS = {"certExpirys", "poolSynchronizersStatus", "osImageStream"}


@needs_oracle
def test_status_agrees_with_the_mco() -> None:
    found = records("pool_status")
    for number, record in enumerate(found):
        if record["imageModeStatusReporting"]:
            # Counts come from the Nodes alone.
            continue
        status = compute_status(recorded_view(record), now=NOW).to_json()
        assert status.pop("observedGeneration") == 0
        ours, expected = by_type(status.pop("conditions")), by_type(record["out"]["conditions"])
        for added in ("Reconciling", "Stalled"):
            del ours[added]
        if number in UNNAMED:
            for kind in ("NodeDegraded", "Degraded"):
                assert expected[kind] == ("True", "")
                sentence = f"Node {UNNAMED[number]} is degraded and reports no reason"
                expected[kind] = ("True", sentence)
        assert ours == expected, number
        counts = {key: value for key, value in record["out"].items() if key not in OTHERS}
        del counts["conditions"]
        if number in FAILING_BY_IMAGE:
            counts["unavailableMachineCount"] -= 1
        assert status == counts, number
    assert len(found) == 66


def recorded_view(record: dict[str, Any]) -> PoolStatusInput:
    found = MachineConfigPool.from_json(record["pool"])
    config, build = recorded_image(record)
    target = compute_build_target(found, config, build)
    return PoolStatusInput(found, target, recorded_nodes(record), config, build)


def by_type(conditions: Any) -> dict[str, tuple[str, str]]:
    return {found["type"]: (found["status"], found["message"]) for found in conditions}


def conditions(status_input: PoolStatusInput) -> dict[str, Condition]:
    return {found.type: found for found in compute_status(status_input, now=NOW).conditions}


def read_condition(status_input: PoolStatusInput, kind: str) -> tuple[str, str, str]:
    found = conditions(status_input)[kind]
    return (found.status, found.reason, found.message)


def test_updating_pool_reports_progress() -> None:
    nodes = [node("a", NEW), on_its_way("b"), node("c"), failed("d", unschedulable=True)]
    status = compute_status(
        PoolStatusInput(
            pool(), NEW, nodes, progress_message="1 of 4 nodes is updated, about 30 min left"
        ),
        now=NOW,
    )
    assert status.counts == PoolCounts(total=4, updated=1, ready=1, unavailable=2, degraded=1)
    assert status.configuration.name == "old"
    assert status.observed_generation == 7
    found = {each.type: (each.status, each.reason, each.message) for each in status.conditions}
    updating = (
        "All nodes are updating to MachineConfig new; 1 of 4 nodes is updated, about 30 min left"
    )
    complaint = 'Node d is reporting: "no space left"'
    assert found == {
        "Updated": ("False", "NodesOutdated", ""),
        "Updating": ("True", "RollingOut", updating),
        "NodeDegraded": ("True", "NodesDegraded", complaint),
        "Degraded": ("True", "NodeDegraded", complaint),
        "Reconciling": ("False", "NodeDegraded", complaint),
        "Stalled": ("True", "NodeDegraded", complaint),
    }


def test_updated_pool_reports_its_configuration() -> None:
    target = image("new", "1")
    status = compute_status(
        PoolStatusInput(pool(), target, [node("a", target), node("b", target)]), now=NOW
    )
    assert status.configuration.name == "new"
    found = {each.type: (each.status, each.message) for each in status.conditions}
    assert found == {
        "Updated": (
            "True", f"All nodes are updated with MachineConfig new / Image {target.image}",
        ),
        "Updating": ("False", ""),
        "NodeDegraded": ("False", ""),
        "Degraded": ("False", ""),
        "Reconciling": ("False", ""),
        "Stalled": ("False", ""),
    }  # fmt: skip


def test_pool_without_nodes_is_updated() -> None:
    assert read_condition(PoolStatusInput(pool(), NEW, []), "Updated")[0] == "True"


def test_every_reason_is_camel_case() -> None:
    views = [
        PoolStatusInput(
            pool(paused=paused),
            target,
            nodes,
            config,
            build,
            waiting_reason=waiting,
            problem=problem,
        )
        for paused in (False, True)
        for target, nodes in ((NEW, [node("a", NEW)]), (OLD, [failed("a")]), (NEW, [node("b")]))
        for config in (None, image_config("c"), image_config("c", "image"))
        for build in (None, *(image_build("b", "new", "image", state) for state in BuildState))
        for waiting in ("", "the window opens later")
        for problem in (None, PoolProblem("Halted", "node a failed first"))
    ]
    for status_input in views:
        for found in conditions(status_input).values():
            assert found.reason.isalpha()
            assert found.reason[0].isupper()
            assert found.type != "Degraded" or found.status == "False" or found.message


def test_degraded_message_names_some_nodes_and_counts_others() -> None:
    nodes = [failed(f"n{number:02}") for number in range(25)]
    message = read_condition(PoolStatusInput(pool(), NEW, nodes), "NodeDegraded")[2]
    assert message.startswith('Node n00 is reporting: "no space left", Node n01')
    assert message.endswith('Node n09 is reporting: "no space left", and 15 more')


def test_problem_of_pool_precedes_degraded_nodes() -> None:
    problem = PoolProblem("InvalidConfiguration", "maxUnavailable is wrong")
    status_input = PoolStatusInput(pool(), NEW, [failed("d")], problem=problem)
    expected = ("True", "InvalidConfiguration", "maxUnavailable is wrong")
    assert read_condition(status_input, "Degraded") == expected
    assert read_condition(status_input, "Stalled") == expected
    assert read_condition(status_input, "NodeDegraded")[0] == "True"


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("RenderDegraded", "no such kernelType", "no such kernelType"),
        ("RenderDegraded", "", "The configuration cannot be rendered"),
        ("PinnedImageSetsDegraded", "pull failed", "pull failed"),
        ("ImageBuildDegraded", "dnf failed", "Custom OS image build failed"),
    ],
)
def test_degraded_repeats_conditions_of_other_controllers(
    kind: str, message: str, expected: str
) -> None:
    known = {"type": kind, "status": "True", "message": message}
    found = MachineConfigPool.from_json({"metadata": {}, "status": {"conditions": [known]}})
    config = image_config("c") if kind == "ImageBuildDegraded" else None
    build = image_build("b", state=BuildState.FAILED) if config else None
    assert read_condition(PoolStatusInput(found, NEW, [], config, build), "Degraded") == (
        "True",
        kind,
        expected,
    )


def test_failed_build_is_reset_without_machineosbuild() -> None:
    known = {"type": "ImageBuildDegraded", "status": "True", "reason": "BuildFailed"}
    found = MachineConfigPool.from_json({"metadata": {}, "status": {"conditions": [known]}})
    assert read_condition(PoolStatusInput(found, NEW, []), "ImageBuildDegraded")[:2] == (
        "False",
        "NoLayeredObjects",
    )
    waiting = PoolStatusInput(found, NEW, [], image_config("c"))
    assert read_condition(waiting, "ImageBuildDegraded")[:2] == ("False", "BuildPending")
    assert read_condition(waiting, "Degraded")[0] == "False"


def test_failed_build_does_not_stop_counting() -> None:
    # The reference returns the build's error before it writes any status.
    build = image_build("b-1", "new", state=BuildState.FAILED)
    config = image_config("c", image("new", "1").image or "")
    verdict = decide_built_image(pool(), config, build)
    assert isinstance(verdict, GateBlocked)
    nodes = [node("a", image("new", "1")), on_its_way("b"), failed("c")]
    problem = PoolProblem("Blocked", verdict.reason)
    status_input = PoolStatusInput(
        pool(), compute_build_target(pool(), config, build), nodes, config, build, problem=problem
    )
    status = compute_status(status_input, now=NOW)
    assert status.counts == PoolCounts(total=3, updated=1, ready=1, unavailable=1, degraded=1)
    assert (
        read_condition(status_input, "Degraded")[2]
        == "image build b-1 for MachineConfigPool worker failed"
    )


def test_waiting_reason_is_in_the_updating_condition() -> None:
    status_input = PoolStatusInput(
        pool(), NEW, [node("a")], waiting_reason="the maintenance window opens at 01:00"
    )
    assert read_condition(status_input, "Updating") == (
        "True",
        "Waiting",
        "All nodes are updating to MachineConfig new; the maintenance window opens at 01:00",
    )


def test_conditions_of_other_controllers_are_kept() -> None:
    before = [
        {"type": "Theirs", "status": "True", "lastTransitionTime": "2020-01-01T00:00:00Z"},
        {"type": "Updated", "status": "False", "lastTransitionTime": "2020-01-01T00:00:00Z"},
        {"type": "Degraded", "status": "True", "lastTransitionTime": "2020-01-01T00:00:00Z"},
    ]
    found = MachineConfigPool.from_json({"metadata": {}, "status": {"conditions": before}})
    times = {
        each.type: each.last_transition_time
        for each in compute_status(PoolStatusInput(found, NEW, [node("a")]), now=NOW).conditions
    }
    assert times["Theirs"] == times["Updated"] == "2020-01-01T00:00:00Z"
    assert times["Degraded"] == times["Updating"] == NOW


def test_unchanged_pool_has_unchanged_status() -> None:
    nodes: list[NodeFacts] = [node("a", NEW), on_its_way("b")]
    first = compute_status(PoolStatusInput(pool(), NEW, nodes), now=NOW)
    again = MachineConfigPool.from_json(
        {
            "metadata": {"name": "worker", "generation": 7},
            "spec": {"configuration": {"name": "new"}},
            "status": first.to_json(),
        }
    )
    assert compute_status(PoolStatusInput(again, NEW, nodes), now="2027-01-01T00:00:00Z") == first


def test_pool_without_a_rendered_config_is_not_updated() -> None:
    status = compute_status(PoolStatusInput(pool(), RolloutTarget(""), []), now=NOW)
    found = {each.type: each for each in status.conditions}
    assert (found["Updated"].status, found["Updated"].reason) == ("False", "NotRendered")
    assert found["Reconciling"].status == "True"
    assert found["Updating"].message == "No MachineConfig is rendered yet for pool worker"


def test_pool_whose_nodes_another_pool_selects_too_is_not_updated() -> None:
    problem = PoolProblem("NodeInTwoPools", "node n0 is selected by 2 custom pools")
    status = compute_status(PoolStatusInput(pool(), NEW, [], problem=problem), now=NOW)
    found = {each.type: each.status for each in status.conditions}
    assert (found["Updated"], found["Reconciling"], found["Stalled"]) == ("False", "False", "True")


def test_degraded_node_without_a_target_is_counted() -> None:
    lost = NodeFacts("a", current_config="old", state="Degraded", reason="lost")
    assert count_nodes([lost], NEW).degraded == 1


def test_paused_pool_at_a_built_image_reports_the_build() -> None:
    target = image("new", "1")
    config = image_config("mosc", str(target.image))
    build = image_build("mosb", "new", str(target.image), BuildState.SUCCEEDED)
    view = PoolStatusInput(pool(paused=True), target, [node("a", target)], config, build)
    assert read_condition(view, "Updating")[2] == (
        "Pool is paused; OS image build completed successfully (mosb: mosb)"
    )
