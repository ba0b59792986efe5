"""Labels of new Nodes: which one gets them, and why another does not."""

from dataclasses import replace

import pytest

from treenail.api.machineconfigpool import MachineConfigPool
from treenail.errors import ConfigError
from treenail.provisioning.approval.pool_labels import MAX_AGE_S, RegisteredNode, choose_labels

ROLE = "node-role.kubernetes.io"
NOW = 10_000.0
NODE = RegisteredNode("worker-1", "uid", NOW - 1, (("kubernetes.io/os", "linux"),))


def make_pool(name: str, selector: object) -> MachineConfigPool:
    return MachineConfigPool.from_json({
        "metadata": {"name": name}, "spec": {"nodeSelector": selector},
    })  # fmt: skip


WORKER = make_pool("worker", {"matchLabels": {f"{ROLE}/worker": ""}})
INFRA = make_pool("infra", {"matchLabels": {f"{ROLE}/infra": "", "site": "a"}})
MASTER = make_pool("master", {"matchLabels": {f"{ROLE}/master": ""}})
POOLS = (WORKER, INFRA, MASTER)


def choose(
    node: RegisteredNode = NODE, pool: str = "worker", pools: tuple[MachineConfigPool, ...] = POOLS
) -> dict[str, str]:
    return dict(choose_labels(node, pool, pools, requested_at=NOW - 30, age_s=1.0))


def with_label(name: str, value: str = "") -> RegisteredNode:
    return replace(NODE, labels=(*NODE.labels, (name, value)))


def test_new_node_gets_the_labels_of_its_pool() -> None:
    assert choose() == {f"{ROLE}/worker": ""}
    assert choose(pool="infra") == {f"{ROLE}/infra": "", "site": "a"}
    assert choose(with_label("site", "a"), "infra") == {f"{ROLE}/infra": ""}


def test_node_that_a_pool_selects_gets_no_label() -> None:
    assert choose(with_label(f"{ROLE}/worker")) == {}
    assert choose(with_label(f"{ROLE}/worker"), "infra") == {}


def test_node_older_than_the_request_gets_no_label() -> None:
    assert choose(replace(NODE, created_at=NOW - 60)) == {}


def test_node_registered_long_ago_gets_no_label() -> None:
    age_s = MAX_AGE_S + 1
    assert choose_labels(NODE, "worker", POOLS, requested_at=NOW - 5000, age_s=age_s) == {}


@pytest.mark.parametrize(
    ("pool", "pools", "problem"),
    [
        ("gone", POOLS, "MachineConfigPool gone does not exist"),
        ("worker", (make_pool("worker", {}),), "requirements other than matchLabels"),
        ("worker", (make_pool("worker", None),), "requirements other than matchLabels"),
        (
            "worker",
            (make_pool("worker", {"matchExpressions": [{"key": "a", "operator": "Exists"}]}),),
            "requirements other than matchLabels",
        ),
        (
            "infra",
            (make_pool("infra", {"matchLabels": {f"{ROLE}/master": ""}}), MASTER),
            "it would be a member of master",
        ),
        (
            "infra",
            (INFRA, make_pool("other", {"matchLabels": {"site": "a"}})),
            "is selected by 2 custom pools",
        ),
    ],
)
def test_node_without_possible_labels_has_a_problem(
    pool: str, pools: tuple[MachineConfigPool, ...], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        choose(pool=pool, pools=pools)
