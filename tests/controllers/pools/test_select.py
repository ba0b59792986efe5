"""Selection and capacity: every recorded decision, and the deliberate differences."""

import pytest

from tests.controllers.rollout.builders import (
    NEW,
    NEWER,
    failed,
    image,
    node,
    on_its_way,
    recorded_image,
    recorded_nodes,
)
from tests.oracle import needs_oracle, records
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.pools.node_facts import NodeFacts, RolloutTarget
from treenail.controllers.pools.node_selection import (
    compute_max_unavailable,
    find_candidates,
    find_redirectable,
    limit_to_quorum,
    sort_by_zone,
    spread_over_zones,
)
from treenail.controllers.pools.os_image import compute_build_target
from treenail.errors import ConfigError


@needs_oracle
def test_candidates_and_capacity_agree_with_the_mco() -> None:
    found = records("candidates")
    for record in found:
        target = compute_build_target(
            MachineConfigPool.from_json(record["pool"]), *recorded_image(record)
        )
        chosen = find_candidates(recorded_nodes(record), target, record["maxUnavailable"])
        names = [each.name for each in chosen.nodes]
        assert (names, chosen.capacity) == (record["candidates"], record["capacity"])
    assert len(found) == 29


@needs_oracle
def test_max_unavailable_agrees_with_the_mco_or_is_rejected() -> None:
    found = records("max_unavailable")
    for record in found:
        arguments = (record["pool"], record["spec"], record["nodes"])
        if record["err"]:
            with pytest.raises(ConfigError, match="neither a count nor a percentage"):
                compute_max_unavailable(*arguments)
        else:
            assert compute_max_unavailable(*arguments) == record["out"]
    assert len(found) == 11


@needs_oracle
def test_node_order_agrees_with_the_mco() -> None:
    (record,) = records("sort_nodes")
    nodes = [NodeFacts.from_json(each) for each in record["nodes"]]
    assert [each.name for each in sort_by_zone(nodes)] == record["out"]


def test_failing_cordoned_node_counts_once() -> None:
    # The reference takes such a node off twice, and so one more node than needed waits.
    stuck = failed("a", unschedulable=True)
    found = find_candidates([stuck, node("b"), node("c")], NEW, 2)
    assert ([each.name for each in found.nodes], found.capacity) == (["b", "c"], 1)


def test_failing_node_in_service_uses_capacity_of_its_target() -> None:
    assert find_candidates([failed("a"), node("b")], NEW, 1).capacity == 0
    found = find_candidates([failed("a"), node("b")], NEWER, 1)
    assert ([each.name for each in found.nodes], found.capacity) == (["a", "b"], 1)


def test_node_failing_on_image_is_a_candidate_for_another() -> None:
    # The reference is stuck here for ever at maxUnavailable 1.
    bad, good = image("old", "b"), image("old", "c")
    stuck = NodeFacts(
        "a", current_config="old", desired_config="old",
        current_image=image("old", "a").image, desired_image=bad.image, state="Degraded",
    )  # fmt: skip
    assert find_candidates([stuck], good, 1).nodes == (stuck,)


@pytest.mark.parametrize(
    ("facts", "turns"),
    [
        (on_its_way("a"), True),
        (failed("a", unschedulable=True), True),
        (failed("a", is_healthy=False), True),
        (failed("a"), False),
        (on_its_way("a", NEWER), False),
        (node("a"), False),
        (node("a", is_healthy=False), False),
        (NodeFacts("a"), False),
    ],
)
def test_unavailable_node_updating_to_another_target_is_redirectable(
    facts: NodeFacts, turns: bool
) -> None:
    assert find_redirectable([facts], NEWER) == ((facts,) if turns else ())


@pytest.mark.parametrize(
    ("pool", "spec", "nodes", "expected"),
    [
        ("worker", None, 500, 1),
        ("worker", 0, 500, 1),
        ("worker", 7, 5, 7),
        ("worker", "10%", 5000, 500),
        ("worker", "10%", 9, 1),
        ("worker", "100%", 3, 3),
        ("worker", "+5%", 100, 5),
        ("worker", "33%", 0, 1),
        ("arbiter", 3, 3, 1),
        ("master", 3, 3, 3),
    ],
)
def test_max_unavailable_is_rounded_down_to_at_least_one(
    pool: str, spec: int | str | None, nodes: int, expected: int
) -> None:
    assert compute_max_unavailable(pool, spec, nodes) == expected


@pytest.mark.parametrize("spec", [-1, "", "5", "5 %", "-5%", "5.5%", "%", "5%%", "9" * 10 + "%"])
def test_invalid_max_unavailable_is_rejected(spec: int | str) -> None:
    with pytest.raises(ConfigError) as raised:
        compute_max_unavailable("worker", spec, 10)
    assert str(raised.value) == (
        f"spec.maxUnavailable of pool worker is {spec!r}, which is neither a count nor a percentage"
    )
    assert "10%" in raised.value.remedy


def zoned(*names: str) -> list[NodeFacts]:
    """Nodes named by zone and age, such as ``b2``; those without a letter have no zone."""
    found = []
    for name in names:
        zone = name.rstrip("0123456789")
        labels = {"topology.kubernetes.io/zone": zone} if zone else {}
        created = f"2026-01-0{name[-1]}T00:00:00Z"
        found.append(node(name, labels=labels, created_at=created))
    return found


def test_nodes_are_sorted_by_zone_and_age() -> None:
    found = sort_by_zone(zoned("2", "b1", "a2", "1", "a1", "b2"))
    assert [each.name for each in found] == ["a1", "a2", "b1", "b2", "1", "2"]


def test_nodes_of_equal_age_keep_their_order() -> None:
    nodes = [node("z"), node("a"), node("m")]
    assert sort_by_zone(nodes) == tuple(nodes)


def test_spread_takes_zone_with_fewest_unavailable_nodes() -> None:
    nodes = zoned("a1", "a2", "a3", "b1", "b2", "c1", "1")
    busy = zoned("a9", "a8", "c9")
    names = [each.name for each in spread_over_zones(nodes, busy)]
    assert names == ["b1", "1", "b2", "c1", "a1", "a2", "a3"]
    assert spread_over_zones(nodes, []) == spread_over_zones(nodes[::-1], [])


def test_unbuilt_image_makes_every_node_a_candidate() -> None:
    being_made = RolloutTarget("old", "")
    assert find_candidates([node("a")], being_made, 1).nodes == (node("a"),)


def test_node_left_cordoned_on_first_target_is_redirectable() -> None:
    bad = RolloutTarget("bad")
    stuck = NodeFacts("a", state="Degraded", unschedulable=True).with_target(bad, 0.0)
    silent = NodeFacts("b", unschedulable=True).with_target(bad, 0.0)
    assert find_redirectable([stuck, silent], NEW) == (stuck,)


@pytest.mark.parametrize(
    ("members", "others", "limit", "expected"),
    [
        (3, 0, 2, 1),
        (3, 0, 1, 1),
        (5, 0, 4, 2),
        (1, 0, 1, 1),
        (2, 0, 2, 1),
        (3, 50, 10, 1),
        (0, 9, 5, 5),
    ],
)
def test_limit_keeps_the_quorum_of_etcd(
    members: int, others: int, limit: int, expected: int
) -> None:
    label = {"node-role.kubernetes.io/control-plane": ""}
    nodes = [
        *(node(f"m{number}", labels=label) for number in range(members)),
        *(node(f"w{number}") for number in range(others)),
    ]
    assert limit_to_quorum(limit, nodes) == expected


@pytest.mark.parametrize(
    ("own", "elsewhere", "down_elsewhere", "expected"),
    [
        (1, 2, 0, 1),
        (1, 2, 1, 0),
        (2, 1, 1, 0),
        (2, 3, 0, 2),
        (2, 3, 1, 1),
        (2, 3, 4, 0),
        (1, 1, 0, 1),
        (1, 1, 1, 0),
        (0, 3, 3, 9),
    ],
)
def test_quorum_is_counted_over_all_pools(
    own: int, elsewhere: int, down_elsewhere: int, expected: int
) -> None:
    labels = {"node-role.kubernetes.io/master": ""}, {"node-role.kubernetes.io/arbiter": ""}
    pool = [*(node(f"m{number}", labels=labels[0]) for number in range(own)), node("w")]
    others = [
        node(f"o{number}", labels=labels[number % 2], unschedulable=number < down_elsewhere)
        for number in range(elsewhere)
    ]
    assert limit_to_quorum(9, pool, [*pool[:own], *others]) == expected
