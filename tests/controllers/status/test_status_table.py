"""Rows about pools and nodes, as a pure function of the objects, and as text of any width."""

from dataclasses import replace

import pytest

from tests.controllers.rollout.world import World
from treenail.api import annotations as key
from treenail.api.annotations import NodeState
from treenail.api.object_meta import Condition
from treenail.cli.controller.status.text import format_table
from treenail.cli.terminal import measure_text
from treenail.controllers.pools.node_facts import STARTED_AT
from treenail.controllers.status.status_table import (
    NodeRow,
    PoolRow,
    RolloutBlocker,
    build_rows,
    build_status_document,
)

HASH = "0123456789abcdef" * 2
REASON = "cannot stage quay.example/os@sha256:" + "1" * 64 + ": no space left on /boot; remove it"
DRAIN = '{"request": "drain-a", "began": "2001-09-09T01:46:40Z", "cordonedBy": "drain-controller"}'
"""A drain that began at 1,000,000,000 s since the epoch, when the clock of a `World` starts."""


def build(world: World, now: float | None = None) -> tuple[PoolRow, ...]:
    world.deliver()
    at = world.now() if now is None else now
    return build_rows(world.list_pools(), world.list_nodes(), world.list_policies(), now=at)


def show(world: World, width: int | None = None, max_lines: int | None = None) -> list[str]:
    return [str(line) for line in format_table(build(world), width, max_lines=max_lines)]


def annotate(world: World, node: str, **annotations: str) -> None:
    names = {name: getattr(key, name) for name in annotations}
    found = {names[name]: value for name, value in annotations.items()}
    world.change("nodes", node, {"metadata": {"annotations": found}})


def make_world(*nodes: str, policy: str | None = None) -> World:
    world = World()
    for name in nodes or ("n0",):
        world.add_node(name, "old")
    world.set_pool("worker", "new", policy)
    return world


def get_node(world: World, now: float | None = None) -> NodeRow:
    ((node,),) = [pool.nodes for pool in build(world, now)]
    return node


def set_conditions(world: World, *conditions: dict[str, str], **status: object) -> None:
    changed = {"status": {"conditions": list(conditions), **status}}
    world.change("machineconfigpools", "worker", changed)


def test_newline_in_a_state_begins_no_row() -> None:
    world = make_world()
    annotate(world, "n0", STATE="Done\n  n9  Done", CURRENT_CONFIG="old\n  n8")
    lines = show(world)
    assert not [line for line in lines if "\n" in line]
    assert r"Done\n  n9  Done" in lines[-1]


def test_document_has_config_and_image_of_each_target_separately() -> None:
    world = make_world()
    image = f"quay.io/example/os@sha256:{'1' * 64}"
    annotate(world, "n0", DESIRED_CONFIG="new", DESIRED_OS_IMAGE=image)
    (pool,) = build_status_document(build(world), now=0.0)["pools"]  # type: ignore[misc]  # a list
    assert pool["nodes"][0]["current"] == {"config": "old", "image": ""}
    assert pool["nodes"][0]["desired"] == {"config": "new", "image": image}


def test_halt_reason_is_complete_at_80_columns() -> None:
    world = World()
    long_name = "ip-10-0-131-207.eu-central-1.compute.internal"
    world.add_node(long_name, f"rendered-worker-{HASH}")
    target = f"rendered-worker-{HASH[::-1]}"
    world.set_pool("worker", target)
    annotate(world, long_name, STATE="Degraded", REASON=REASON, DESIRED_CONFIG=target)
    halted = {"node": long_name, "reason": REASON}
    world.change(
        "machineconfigpools",
        "worker",
        {"status": {"rollout": {"config": target, "halted": halted}}},
    )
    lines = show(world, 80)
    assert max(map(len, lines)) <= 80
    text = " ".join(map(str.strip, lines))
    assert "worker: Halted, number of updated nodes unknown" in text
    assert text.count("cannot stage quay.example/os@sha256:111111111111…: no space left") == 1
    assert text.count("remove it") == 1
    assert "ip-10-0-131-207  Degraded  -       ░░░░░░   0% failed" in text


@pytest.mark.parametrize(
    ("annotations", "phase", "percent"),
    [
        ({"STATE": "Working"}, "staging", 0),
        ({"STATE": "Working", "PROGRESS": "50%"}, "staging", 30),
        ({"STATE": "Working", "PROGRESS": "150%"}, "staging", 0),
        ({"STATE": "Working", "DESIRED_DRAIN": "drain-a"}, "draining", 60),
        (
            {"STATE": "Working", "DESIRED_DRAIN": "drain-a", "LAST_APPLIED_DRAIN": "drain-a"},
            "applying",
            70,
        ),
        ({"STATE": "Working", "POST_CONFIG_ACTION": "Rebooting", "DRAIN": DRAIN}, "rebooting", 75),
        (
            {"STATE": "Working", "DESIRED_DRAIN": "uncordon-a", "LAST_APPLIED_DRAIN": "b"},
            "uncordoning",
            92,
        ),
        ({"STATE": "Done"}, "waiting", 0),
        ({"STATE": "Degraded"}, "failed", 0),
    ],
)
def test_phase_of_a_node_follows_its_annotations(
    annotations: dict[str, str], phase: str, percent: int
) -> None:
    world = make_world()
    annotate(world, "n0", DESIRED_CONFIG="new", **annotations)
    row = get_node(world)
    assert (row.phase, row.percent) == (phase, percent)


def test_node_that_was_not_ready_since_its_drain_is_verifying() -> None:
    world = make_world()
    annotate(
        world, "n0", STATE="Working", POST_CONFIG_ACTION="Rebooting", DESIRED_CONFIG="new",
        DRAIN=DRAIN,
    )  # fmt: skip
    world.seconds += 60.0
    world.flap("n0", healthy=False)
    assert get_node(world).phase == "rebooting"
    world.seconds += 60.0
    world.flap("n0", healthy=True)
    assert get_node(world).phase == "verifying"


def test_time_out_of_service_counts_from_the_drain() -> None:
    world = make_world()
    annotate(world, "n0", STATE="Working", DESIRED_CONFIG="new", DRAIN=DRAIN)
    world.cordon("n0", on=True)
    assert get_node(world, now=world.now() + 90.0).out_of_service_s == 90.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-01-01T00:00:00Z/2026-01-01T00:01:30Z", 90.0),
        ("2026-01-01T00:00:00Z/2025-01-01T00:00:00Z", None),
        ("2026-01-01T00:00:00Z", None),
        ("", None),
    ],
)
def test_time_out_of_service_of_the_last_drain_is_kept(text: str, seconds: float | None) -> None:
    world = make_world()
    annotate(world, "n0", LAST_OUTAGE=text)
    assert get_node(world).out_of_service_s == seconds


def test_booted_version_is_that_of_the_kubelet() -> None:
    world = make_world()
    info = {"nodeInfo": {"osImage": "Fedora CoreOS 42.20260601.3.0"}}
    world.change("nodes", "n0", {"status": info})
    assert get_node(world).os_image == "Fedora CoreOS 42.20260601.3.0"
    assert " 42.20260601.3.0 " in show(world, 80)[-1]


def test_unknown_os_image_shows_a_dash() -> None:
    world = make_world()
    world.change("nodes", "n0", {"status": {"nodeInfo": {"osImage": 7}}})
    assert get_node(world).os_image == ""


@pytest.mark.parametrize(
    ("condition", "blocker"),
    [
        (
            {
                "type": "Updating",
                "status": "True",
                "reason": "Waiting",
                "message": "All nodes are updating to MachineConfig new; waiting: the maintenance "
                "window opens at 2026-01-01 01:00 UTC; 0 of 3 nodes are updated, about 3 h left",
            },
            RolloutBlocker("window", "the maintenance window opens at 2026-01-01 01:00 UTC"),
        ),
        (
            {"type": "Degraded", "status": "True", "reason": "RenderDegraded", "message": "no CA"},
            RolloutBlocker("degraded", "no CA"),
        ),
        (
            {"type": "Stalled", "status": "True", "reason": "X", "message": "no progress"},
            RolloutBlocker("stalled", "no progress"),
        ),
    ],
)
def test_blocker_of_a_pool_is_named(condition: dict[str, str], blocker: RolloutBlocker) -> None:
    world = make_world()
    set_conditions(world, condition)
    (row,) = build(world)
    assert row.blockers == (blocker,)


def test_paused_pool_is_blocked_until_it_is_updated() -> None:
    world = World()
    world.set_pool("worker", "new", paused=True)
    (row,) = build(world)
    assert row.state == "Paused"
    assert row.blockers == (RolloutBlocker("paused", "spec.paused of pool worker is true"),)
    set_conditions(world, {"type": "Updated", "status": "True"}, observedGeneration=10**6)
    (row,) = build(world)
    assert (row.state, row.blockers) == ("Updated", ())


def test_disruption_budget_that_blocks_a_drain_is_named_with_its_pod() -> None:
    world = make_world()
    blocked = '[{"pod": "shop/web-1", "message": "no", "budgets": [{"name": "web"}]}]'
    annotate(world, "n0", STATE="Working", DESIRED_DRAIN="drain-a", DRAIN_BLOCKED=blocked)
    world.cordon("n0", on=True)
    (row,) = build(world)
    assert row.blockers == (
        RolloutBlocker("drain", "PodDisruptionBudget shop/web of pod shop/web-1", "n0"),
    )
    assert row.nodes[0].reason == "drain blocked by PodDisruptionBudget shop/web of pod shop/web-1"


def test_estimate_counts_batches_and_soak_times() -> None:
    world = make_world("n0", "n1", "n2", policy="{canary: {nodes: 1, soak: 5m}, maxFailures: 0}")
    updating = {"type": "Updating", "status": "True", "reason": "RollingOut"}
    set_conditions(world, updating, rollout={"config": "new"})
    (row,) = build(world)
    assert (row.wave, row.waves, row.remaining_s) == (1, 2, 3 * 600.0 + 300.0)


def test_estimate_counts_what_is_left_of_a_running_soak() -> None:
    world = make_world("n0", "n1", "n2", policy="{canary: {nodes: 1, soak: 5m}, maxFailures: 0}")
    annotate(world, "n0", CURRENT_CONFIG="new", DESIRED_CONFIG="new")
    updating = {"type": "Updating", "status": "True", "reason": "RollingOut"}
    set_conditions(world, updating, rollout={"config": "new", "settledAt": 1_000_000_000})
    estimates = [build(world, 1e9 + over_s)[0].remaining_s for over_s in (-60, 0, 120, 600)]
    assert estimates == [1500.0, 1500.0, 1380.0, 1200.0]


def test_estimate_is_absent_without_the_policy() -> None:
    world = make_world(policy="{maxFailures: 0}")
    updating = {"type": "Updating", "status": "True", "reason": "RollingOut"}
    set_conditions(world, updating, rollout={"config": "new"})
    world.deliver()
    (row,) = build_rows(world.list_pools(), world.list_nodes(), now=0.0)
    assert (row.remaining_s, row.waves) == (None, 0)


def test_estimate_is_absent_while_a_node_blocks_the_rollout() -> None:
    world = make_world("n0", "n1", policy="{maxFailures: 5}")
    updating = {"type": "Updating", "status": "True", "reason": "RollingOut"}
    set_conditions(world, updating, rollout={"config": "new"})
    assert build(world)[0].remaining_s is not None
    world.cordon("n0", on=True)
    assert build(world)[0].remaining_s is None


def test_estimate_is_absent_when_a_node_takes_much_longer() -> None:
    world = make_world("n0", "n1", policy="{maxFailures: 5}")
    updating = {"type": "Updating", "status": "True", "reason": "RollingOut"}
    set_conditions(world, updating, rollout={"config": "new", "assigned": {"n0": 10**9}})
    annotate(world, "n0", STATE="Working", DESIRED_CONFIG="new")
    row, late = build(world, 1e9 + 1700)[0], build(world, 1e9 + 1900)[0]
    assert (row.remaining_s, late.remaining_s) == (1200.0, None)


def test_times_that_no_calendar_has_are_null_in_the_document() -> None:
    world = make_world()
    past = {"config": "older", "beganAt": 2**62, "endedAt": 2**62, "outcome": "Complete"}
    set_conditions(world, rollout={"config": "new", "beganAt": 2**62, "history": [past]})
    (pool,) = build_status_document(build(world), now=0.0)["pools"]  # type: ignore[misc]  # a list
    assert (pool["began"], pool["history"][0]["began"]) == (None, None)


def test_pool_with_unseen_change_is_not_updated() -> None:
    world = make_world()
    set_conditions(world, {"type": "Updated", "status": "True"}, observedGeneration=10**6)
    assert build(world)[0].state == "Updated"
    set_conditions(world, {"type": "Updated", "status": "True"}, observedGeneration=0)
    world.change("machineconfigpools", "worker", {"metadata": {"generation": 1}})
    row = build(world)[0]
    assert (row.state, row.message) == ("Unknown", "the controller has not seen the change yet")


def test_invalid_record_and_counts_are_tolerated() -> None:
    world = make_world()
    set_conditions(world, rollout={"wave": "x"}, machineCount="many")
    (row,) = build(world)
    assert (row.state, row.counts) == ("Unknown", None)


def test_counts_that_no_controller_reported_are_unknown() -> None:
    world = make_world()
    (pool,) = build_status_document(build(world), now=0.0)["pools"]  # type: ignore[misc]  # a list
    assert set(pool["counts"].values()) == {None}
    assert show(world)[0] == "worker: Unknown, number of updated nodes unknown"
    set_conditions(world, machineCount=0)
    assert show(world)[0] == "worker: Unknown, 0 of 0 nodes updated"


def make_disputed_world() -> World:
    world = make_world()
    for name in ("gpu", "infra"):
        world.set_pool(name, "new")
    roles = {f"node-role.kubernetes.io/{name}": "" for name in ("gpu", "infra")}
    world.add_node("n1", "old", labels=roles)
    return world


def test_node_of_two_custom_pools_has_a_row_in_each_pool_that_selects_it() -> None:
    rows = {row.name: row.nodes for row in build(make_disputed_world())}
    assert {name: [node.name for node in nodes] for name, nodes in rows.items()} == {
        "gpu": ["n1"],
        "infra": ["n1"],
        "worker": ["n0", "n1"],
    }
    (row,) = rows["gpu"]
    assert (row.phase, row.percent, row.is_idle) == ("conflict", 0, False)
    assert row.reason.startswith("node n1 is selected by 2 custom pools: gpu, infra; change the")


def test_reason_of_a_disputed_node_is_shown_once() -> None:
    world = make_disputed_world()
    reason = build(world)[0].nodes[0].reason
    degraded = {"type": "Degraded", "status": "True", "reason": "NodeInTwoPools"}
    set_conditions(world, {**degraded, "message": reason})
    # In the tables of gpu and infra, and above that of worker.
    assert len([line for line in show(world) if reason in line]) == 3


def test_rows_of_a_small_pool_keep_their_places() -> None:
    world = make_world("n0", "n1", "n2")
    annotate(world, "n2", STATE="Working")
    assert [line.split()[0] for line in show(world)[3:]] == ["n0", "n1", "n2"]


def test_table_taller_than_the_terminal_leaves_out_idle_nodes() -> None:
    world = make_world(*(f"n{number:02}" for number in range(18)))
    annotate(world, "n17", STATE="Working")
    lines = show(world, 80, max_lines=10)
    assert len(lines) <= 10
    assert lines[3].split()[0] == "n17"
    assert lines[-1] == "  and 12 more idle nodes, 0 of them updated"


@pytest.mark.parametrize("width", [60, 80, 99, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    world = make_world("a" * 60 + ".example.com", "b" * 60 + ".example.com")
    annotate(world, "a" * 60 + ".example.com", STATE=str(NodeState.UNRECONCILABLE), REASON=REASON)
    assert max(map(len, show(world, width))) <= width


@pytest.mark.parametrize("width", [60, 80, 120])
def test_wide_and_combining_characters_keep_the_columns(width: int) -> None:
    world = make_world("n0", "n1", "n2")
    booted = {"n0": "龙蜥操作系统", "n1": "e\u0301\u0301dition", "n2": "a\u200b\u202eb"}
    for name, image in booted.items():
        world.change("nodes", name, {"status": {"nodeInfo": {"osImage": image}}})
    annotate(world, "n0", STATE="Degraded", REASON="无法拉取镜像" * 30 + " remedy")
    lines = show(world, width)
    assert max(map(measure_text, lines)) <= width
    assert sum(line.count("无法拉取镜像") for line in lines) >= 25
    rows = [line for line in lines if line.startswith("  n")]
    assert len({measure_text(line[: line.index("%")]) for line in rows}) == 1
    assert r"a\u200b\u202eb" in rows[-1]


def test_last_rollouts_are_in_the_document() -> None:
    world = make_world()
    past = {"config": "older", "beganAt": 0, "endedAt": 60, "outcome": "Halted", "reason": "n: no"}
    set_conditions(world, rollout={"config": "new", "beganAt": 60, "history": [past]})
    (pool,) = build_status_document(build(world), now=0.0)["pools"]  # type: ignore[misc]  # a list
    assert pool["began"] == "1970-01-01T00:01:00Z"
    assert pool["history"] == [
        {
            "config": "older",
            "image": "",
            "began": "1970-01-01T00:00:00Z",
            "ended": "1970-01-01T00:01:00Z",
            "outcome": "Halted",
            "reason": "n: no",
        }
    ]


def test_assignment_alone_does_not_make_a_node_verifying() -> None:
    world = make_world()
    annotate(world, "n0", STATE="Working", POST_CONFIG_ACTION="Rebooting")
    world.change("nodes", "n0", {"metadata": {"annotations": {STARTED_AT: "2026-01-01T00:00:00Z"}}})
    assert get_node(world).phase == "rebooting"


@pytest.mark.parametrize("is_blocked", [False, True])
def test_tag_that_is_not_followed_is_shown_once(*, is_blocked: bool) -> None:
    message = "registry.example.com/os:stable moved back"
    condition = Condition("OSImageResolved", "False", "TagMovedBack", message)
    blockers = (RolloutBlocker("degraded", message),) if is_blocked else ()
    row = build(make_world("a"))[0]
    row = replace(row, conditions={condition.type: condition}, blockers=blockers)
    text = "\n".join(map(str, format_table([row])))
    assert text.count(message) == 1
    assert ("image tag not followed (TagMovedBack): " in text) is not is_blocked


def test_row_names_an_architecture_without_images() -> None:
    world = make_world("n0", "n1")
    set_conditions(world, rollout={"config": "new", "image": "registry.example.com/os@sha256:1"})
    for name, architecture in (("n0", "pdp-11"), ("n1", "amd64")):
        world.change("nodes", name, {"status": {"nodeInfo": {"architecture": architecture}}})
    reasons = [row.reason for row in build(world)[0].nodes]
    assert reasons == ["no image is built for its architecture 'pdp-11'", ""]
