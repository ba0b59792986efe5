"""Which pools a node belongs to: every recorded decision, and the rules one by one."""

from typing import Any

import pytest

from tests.oracle import needs_oracle, records
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.pools.pool_membership import (
    Membership,
    describe_stray,
    find_membership,
    try_find_membership,
)
from treenail.errors import ConfigError


def pool(name: str, selector: dict[str, Any] | None) -> MachineConfigPool:
    return MachineConfigPool.from_json(
        {"metadata": {"name": name}, "spec": {"nodeSelector": selector}}
    )


def by_label(name: str) -> MachineConfigPool:
    return pool(name, {"matchLabels": {f"role/{name}": ""}})


POOLS = [by_label(name) for name in ("worker", "infra", "gpu", "master", "arbiter")]


@needs_oracle
def test_membership_agrees_with_the_mco() -> None:
    seen = 0
    for record in records("pools_for_node"):
        pools = [pool(found["name"], found["nodeSelector"]) for found in record["pools"]]
        labels = record["labels"] or {}
        seen += 1
        if record["err"]:
            with pytest.raises(ConfigError, match="selected by 2 custom pools"):
                find_membership(record["node"], labels, pools)
            continue
        found = find_membership(record["node"], labels, pools)
        assert list(found.pools if found else ()) == record["out"]
        assert bool(found and found.ignored) == bool(record["metric"])
    assert seen == 55


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({}, None),
        ({"role/worker": ""}, Membership("worker")),
        ({"role/master": ""}, Membership("master")),
        ({"role/infra": ""}, Membership("infra")),
        ({"role/infra": "", "role/worker": ""}, Membership("infra", "worker")),
        ({"role/master": "", "role/worker": ""}, Membership("master")),
        ({"role/master": "", "role/infra": ""}, Membership("master", ignored="infra")),
        (
            {"role/master": "", "role/infra": "", "role/worker": ""},
            Membership("master", "worker", ignored="infra"),
        ),
        ({"role/arbiter": ""}, Membership("arbiter")),
        ({"role/worker": "", "kubernetes.io/os": "windows"}, None),
        ({"role/worker": "", "kubernetes.io/os": "linux"}, Membership("worker")),
    ],
)
def test_custom_pool_wins_over_worker_and_master_over_both(
    labels: dict[str, str], expected: Membership | None
) -> None:
    assert find_membership("node-0", labels, POOLS) == expected


def test_node_in_two_custom_pools_is_rejected() -> None:
    with pytest.raises(ConfigError) as raised:
        find_membership("node-0", {"role/gpu": "", "role/infra": "", "role/master": ""}, POOLS)
    assert str(raised.value) == "node node-0 is selected by 2 custom pools: gpu, infra"
    assert "only one" in raised.value.remedy


@pytest.mark.parametrize("selector", [None, {}])
def test_empty_selector_selects_no_node(selector: dict[str, Any] | None) -> None:
    assert find_membership("node-0", {"role/worker": ""}, [pool("worker", selector)]) is None


def test_membership_ignores_order_of_pools() -> None:
    labels = {"role/infra": "", "role/worker": ""}
    assert find_membership("n", labels, POOLS) == find_membership("n", labels, POOLS[::-1])


@pytest.mark.parametrize(
    ("labels", "config", "expected"),
    [
        ({}, "rendered-1", "belongs to no pool, so that nothing updates it"),
        ({"role/other": ""}, "rendered-1", "has an agent and the config rendered-1"),
        ({}, "", ""),
        ({"role/worker": ""}, "rendered-1", ""),
        ({"role/infra": "", "role/worker": ""}, "rendered-1", ""),
        ({"role/master": "", "role/infra": ""}, "rendered-1", "although pool infra selects it"),
        ({"role/gpu": "", "role/infra": ""}, "rendered-1", ""),
    ],
)
def test_node_with_agent_and_unexpected_pool_is_named(
    labels: dict[str, str], config: str, expected: str
) -> None:
    text = describe_stray("n", config, try_find_membership("n", labels, POOLS))
    assert expected in text
    assert bool(text) == bool(expected)
