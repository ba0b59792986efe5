"""The index of nodes by pool agrees with a grouping from scratch after any change."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from treenail.controllers.pools.node_facts import NodeFacts
from treenail.controllers.pools.pool_index import PoolIndex
from treenail.controllers.pools.pool_membership import ObservedPool, group_nodes
from treenail.label_selector import LabelSelector

POOLS = ("worker", "infra", "gpu", "master")
SELECTORS: tuple[dict[str, Any] | None, ...] = (
    {"matchLabels": {"role": "infra"}},
    {"matchLabels": {"role": "gpu"}},
    {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]},
    {"matchExpressions": [{"key": "role", "operator": "NotIn", "values": ["gpu"]}]},
    {"matchExpressions": [{"key": "gpu", "operator": "DoesNotExist"}]},
    {"matchExpressions": 7},
    {},
    None,
)
LABELS = ({}, {"role": "infra"}, {"role": "gpu"}, {"role": "gpu", "gpu": ""}, {"gpu": "a100"})


def pool(name: str, selector: dict[str, Any] | None) -> ObservedPool:
    return ObservedPool.from_json({"metadata": {"name": name}, "spec": {"nodeSelector": selector}})


class Watched:
    """Pools and nodes as the watches show them, and the index that follows."""

    def __init__(self) -> None:
        self.pools: dict[str, ObservedPool] = {}
        self.nodes: dict[str, NodeFacts] = {}
        self.index = PoolIndex(self.pools.get, self.nodes.get)

    def set_pool(self, name: str, selector: dict[str, Any] | None) -> None:
        self.pools[name] = pool(name, selector)
        self.index.set_pool(name, self.pools[name])

    def set_node(self, name: str, labels: dict[str, str]) -> frozenset[str]:
        self.nodes[name] = NodeFacts(name, labels=labels)
        return self.index.set_node(name, labels)


def test_member_of_etcd_affects_all_pools_with_members() -> None:
    watched, member = Watched(), {"node-role.kubernetes.io/master": ""}
    for name in ("a", "b", "c"):
        watched.set_pool(name, {"matchLabels": {"pool": name}})
    watched.set_node("a0", {**member, "pool": "a"})
    watched.set_node("c0", {"pool": "c"})
    assert watched.set_node("b0", {**member, "pool": "b"}) == {"a", "b"}
    assert watched.set_node("c0", {"pool": "c"}) == {"c"}
    assert watched.set_node("none", member) == {"a", "b"}
    assert [node.name for node in watched.index.list_etcd_members()] == ["a0", "b0", "none"]
    assert watched.set_node("none", {}) == {"a", "b"}
    assert [node.name for node in watched.index.list_etcd_members()] == ["a0", "b0"]


@pytest.mark.parametrize("seed", range(20))
def test_index_agrees_with_grouping_after_random_changes(seed: int) -> None:
    chance, watched = random.Random(seed), Watched()
    for _ in range(120):
        name = f"n{chance.randrange(6)}"
        match chance.randrange(6):
            case 0:
                watched.set_pool(chance.choice(POOLS), chance.choice(SELECTORS))
            case 1 if watched.pools:
                gone = chance.choice(list(watched.pools))
                del watched.pools[gone]
                watched.index.set_pool(gone, None)
            case 2 if name in watched.nodes:
                del watched.nodes[name]
                watched.index.set_node(name, None)
            case 3 if name in watched.nodes:
                # The watch shows other labels, and its handler has not run yet.
                watched.nodes[name] = NodeFacts(name, labels=watched.nodes[name].labels | {"x": ""})
            case _:
                watched.set_node(name, dict(chance.choice(LABELS)))
        expected = group_nodes(watched.pools, watched.nodes)
        for each in POOLS:
            found = watched.index.read_pool(each)
            wanted = expected.find_pool(each)
            assert (found is None) == (wanted is None)
            if found is not None and wanted is not None:
                assert found.nodes == wanted.nodes
                assert found.unreadable_pools == wanted.unreadable_pools
                assert list(map(str, found.membership_errors)) == list(
                    map(str, wanted.membership_errors)
                )


def test_change_of_labels_affects_the_old_and_the_new_pool() -> None:
    watched = Watched()
    watched.set_pool("infra", SELECTORS[0])
    watched.set_pool("gpu", SELECTORS[1])
    assert watched.set_node("n", {"role": "infra"}) == {"infra"}
    assert watched.set_node("n", {"role": "gpu"}) == {"infra", "gpu"}
    assert watched.index.set_node("n", None) == {"gpu"}


def test_deleted_pool_has_no_nodes_at_the_first_look() -> None:
    """A node in no pool releases its lock; no later event would repeat a wrong answer."""
    watched = Watched()
    watched.set_pool("gpu", {"matchLabels": {"role": "gpu"}})
    watched.set_node("n0", {"role": "gpu"})
    assert watched.index.find_pools("n0", {"role": "gpu"}) == {"gpu"}
    del watched.pools["gpu"]
    watched.index.set_pool("gpu", None)
    assert watched.index.find_pools("n0", {"role": "gpu"}) == frozenset()


class CountedSelector(LabelSelector):
    """Counts how often any of them is evaluated."""

    evaluated = 0

    def matches(self, labels: Mapping[str, str]) -> bool:
        CountedSelector.evaluated += 1
        return super().matches(labels)


def test_status_writes_of_other_pools_evaluate_no_selector() -> None:
    """A pool that changes, but not in its selector, keeps the memberships of all nodes."""
    watched = Watched()
    for number in range(50):
        found = pool(f"p{number}", {"matchLabels": {f"role/{number}": ""}})
        selector = CountedSelector(found.pool.node_selector.requirements)
        watched.pools[f"p{number}"] = replace(
            found, pool=replace(found.pool, node_selector=selector)
        )
        watched.index.set_pool(f"p{number}", watched.pools[f"p{number}"])
    for number in range(200):
        watched.set_node(f"n{number}", {f"role/{number % 50}": ""})
    assert len(watched.index.read_pool("p7").nodes) == 4  # type: ignore[union-attr]  # it exists
    CountedSelector.evaluated = 0
    for name in list(watched.pools):
        # An informer moves what changed last to the end.
        watched.pools[name] = watched.pools.pop(name)
        watched.index.set_pool(name, watched.pools[name])
        assert len(watched.index.read_pool(name).nodes) == 4  # type: ignore[union-attr]  # it exists
    assert CountedSelector.evaluated == 0
    watched.set_node("n7", {"role/8": ""})
    # Few, and not 50.
    assert 1 <= CountedSelector.evaluated <= 3
