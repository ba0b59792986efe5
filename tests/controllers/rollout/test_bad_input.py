"""Invalid input of users: the condition, its message, and that no node changes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.controllers.rollout.world import World, world
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.render import render
from treenail.controllers.render.render import ControllerConfig
from treenail.errors import ConfigError

WORKER = {"matchLabels": {"node-role.kubernetes.io/worker": ""}}


def looked_at(found: World, *pools: str) -> None:
    found.start().turn(0.0, *pools)
    found.turn(600, *pools, times=3)


def two_pools(found: World) -> None:
    for name in ("infra", "gpu"):
        found.set_pool(name, "new", nodeSelector=WORKER)


def selector(found: World) -> None:
    wrong = {"matchExpressions": [{"key": "role", "operator": "In"}]}
    found.set_pool("infra", "new", nodeSelector=wrong)
    found.set_pool("worker", "new")


def record(found: World) -> None:
    found.set_pool("worker", "new")
    found.change("machineconfigpools", "worker", {"status": {"rollout": {"wave": "1"}}})


def absent(found: World) -> None:
    found.set_pool("worker", "new")
    del found.objects["machineconfigs"]["new"]


@dataclass(frozen=True)
class Case:
    sentence: str
    pool: str = "worker"
    reason: str = "InvalidConfiguration"
    policy: str | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    write: Callable[[World], None] | None = None
    """Writes all of the input, in place of a pool with the policy and the spec."""


CASES = {
    "a pool with an empty selector": Case(
        "spec.nodeSelector of pool infra is empty, so the pool selects no node; "
        "write a nodeSelector with at least one requirement",
        "infra", spec={"nodeSelector": {}},
    ),
    "two custom pools on one node": Case(
        "node n0 is selected by 2 custom pools: gpu, infra; change the labels of the node or the "
        "nodeSelector of a pool, so that only one custom pool selects it; until then the node "
        "keeps its configuration; and 1 more such nodes",
        "gpu", "NodeInTwoPools", write=two_pools,
    ),
    "a wrong percentage": Case(
        "spec.maxUnavailable of pool worker is '5 %', which is neither a count nor a percentage; "
        "set it to a number such as 2, or to a percentage such as 10%",
        spec={"maxUnavailable": "5 %"},
    ),
    "a negative count": Case(
        "spec.maxUnavailable of pool worker is -1, which is neither a count",
        spec={"maxUnavailable": -1},
    ),
    "a selector without values": Case(
        "spec.nodeSelector.matchExpressions[0].values: expected at least one beside In, found 0",
        "infra", write=selector,
    ),
    "a policy with a wrong value": Case(
        "RolloutPolicy worker: spec.canary.nodes: expected a count of nodes "
        "or a percentage from 1% to 100%, found 'none'",
        policy="{canary: {nodes: none}}",
    ),
    "a policy with an unknown field": Case(
        "RolloutPolicy worker: spec.soakTime: unknown field; did you mean soak?",
        policy="{soakTime: 5m}",
    ),
    "a gate that is nowhere": Case(
        "RolloutPolicy worker: spec.alerts.url: expected an http or https URL "
        "without user, query and fragment, found a string",
        policy="{alerts: {url: prometheus, names: [ApiErrors]}}",
    ),
    "an image by tag": Case(
        "spec.osImage of pool worker", spec={"osImage": "registry.example.com/os:latest"},
    ),
    "a record that a user edited": Case(
        "status.rollout.wave: expected an integer", write=record,
    ),
    "a policy that does not exist": Case(
        "RolloutPolicy carefull does not exist, and spec.rolloutPolicy of pool worker names it; "
        "create it, or correct spec.rolloutPolicy; until then no node is assigned",
        reason="MissingRolloutPolicy", spec={"rolloutPolicy": "carefull"},
    ),
    "a config that does not exist": Case(
        "cannot assign MachineConfig new: it does not exist; create it, or correct "
        "spec.configuration of pool worker",
        reason="MissingMachineConfig", write=absent,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_invalid_input_is_reported_and_changes_no_node(case: Case) -> None:
    found = world(2, config="old")
    looked_at(found, "worker")
    before = dict(found.objects["nodes"])
    if case.write is None:
        found.set_pool(case.pool, "new", case.policy, **case.spec)
    else:
        case.write(found)
    looked_at(found, *found.objects["machineconfigpools"])
    conditions = found.conditions(case.pool)
    for kind in ("Degraded", "Stalled"):
        assert (conditions[kind]["status"], conditions[kind]["reason"]) == ("True", case.reason)
        assert conditions[kind]["message"].startswith(case.sentence)
    assert conditions.get("Updated", {}).get("status") != "True" or case.pool in ("gpu", "infra")
    assert found.objects["nodes"] == before


def test_nodes_of_unknown_pool_are_not_assigned() -> None:
    found = world(2, config="old")
    selector(found)
    looked_at(found, "worker", "infra")
    assert "the spec of pool infra is invalid" in found.conditions("worker")["Updating"]["message"]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"config": {"ignition": {"version": "3.9.0"}}}, "MachineConfig 50-wrong"),
        (
            {"config": {"ignition": {"version": "3.5.0"}, "storage": {"files": [
                {"path": "/etc/large", "contents": {"source": "data:," + "x" * 1_600_000}}]}}},
            "the rendered config of pool worker",
        ),
    ],
    ids=["invalid Ignition", "an over-large result"],
)  # fmt: skip
def test_render_error_is_reported_and_changes_no_node(spec: dict[str, Any], sentence: str) -> None:
    pool = MachineConfigPool.from_json(
        {
            "metadata": {"name": "worker"},
            "spec": {"machineConfigSelector": {"matchLabels": {"role": "worker"}}},
        }
    )
    config = {"metadata": {"name": "50-wrong", "labels": {"role": "worker"}}, "spec": spec}
    with pytest.raises(ConfigError) as raised:
        render.render_pool(pool, [MachineConfig.from_json(config)], ControllerConfig())
    assert sentence in str(raised.value)

    found = world(2, config="old")
    condition = {"type": "RenderDegraded", "status": "True", "reason": "RenderFailed",
                 "message": str(raised.value)}  # fmt: skip
    found.change("machineconfigpools", "worker", {"status": {"conditions": [condition]}})
    before = dict(found.objects["nodes"])
    looked_at(found, "worker")
    conditions = found.conditions()
    assert (conditions["Degraded"]["status"], conditions["Degraded"]["reason"]) == (
        "True",
        "RenderDegraded",
    )
    assert conditions["Degraded"]["message"] == str(raised.value)
    assert found.objects["nodes"] == before
