"""Invalid input of users: the condition, its message, and that no node changes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.controllers.rollout.world import World, build_reconciler
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.render import render
from treenail.controllers.render.render import ControllerConfig
from treenail.errors import ConfigError

WORKER = {"matchLabels": {"node-role.kubernetes.io/worker": ""}}


def start() -> World:
    """Two nodes at the target of their pool."""
    found = World()
    for name in ("n0", "n1"):
        found.add_node(name, "old")
    found.set_pool("worker", "old")
    return found


def looked_at(found: World, *pools: str) -> None:
    found.deliver()
    controlled = build_reconciler(found)
    for _ in range(3):
        for pool in pools:
            controlled.sync_pool(pool)
        found.deliver()
        found.pass_time(600)
        found.deliver()


def everything(found: World) -> None:
    found.set_pool("infra", "new", nodeSelector={})


def percentage(found: World) -> None:
    found.set_pool("worker", "new", maxUnavailable="5 %")


def negative(found: World) -> None:
    found.set_pool("worker", "new", maxUnavailable=-1)


def two_pools(found: World) -> None:
    for name in ("infra", "gpu"):
        found.set_pool(name, "new", nodeSelector=WORKER)


def selector(found: World) -> None:
    wrong = {"matchExpressions": [{"key": "role", "operator": "In"}]}
    found.set_pool("infra", "new", nodeSelector=wrong)
    found.set_pool("worker", "new")


def policy(found: World) -> None:
    found.set_pool("worker", "new", "{canary: {nodes: none}}")


def unknown_field(found: World) -> None:
    found.set_pool("worker", "new", "{soakTime: 5m}")


def gate(found: World) -> None:
    found.set_pool("worker", "new", "{alerts: {url: prometheus, names: [ApiErrors]}}")


def image(found: World) -> None:
    found.set_pool("worker", "new", osImage="registry.example.com/os:latest")


def record(found: World) -> None:
    found.set_pool("worker", "new")
    found.change("machineconfigpools", "worker", {"status": {"rollout": {"wave": "1"}}})


def missing_policy(found: World) -> None:
    found.set_pool("worker", "new", rolloutPolicy="carefull")


def stream(found: World) -> None:
    found.set_pool("worker", "new", osImageStream={"name": "rhel-10"})


def pinned(found: World) -> None:
    found.set_pool("worker", "new", pinnedImageSets=[{"name": "base"}])


def absent(found: World) -> None:
    found.set_pool("worker", "new")
    del found.objects["machineconfigs"]["new"]


@dataclass(frozen=True)
class Case:
    write: Callable[[World], None]
    pool: str
    reason: str
    sentence: str


CASES = {
    "a pool with an empty selector": Case(
        everything, "infra", "InvalidConfiguration",
        "spec.nodeSelector of pool infra is empty, so the pool selects no node; "
        "write a nodeSelector with at least one requirement",
    ),
    "two custom pools on one node": Case(
        two_pools, "gpu", "NodeInTwoPools",
        "node n0 is selected by 2 custom pools: gpu, infra; change the labels of the node or the "
        "nodeSelector of a pool, so that only one custom pool selects it; until then the node "
        "keeps its configuration; and 1 more such nodes",
    ),
    "a wrong percentage": Case(
        percentage, "worker", "InvalidConfiguration",
        "spec.maxUnavailable of pool worker is '5 %', which is neither a count nor a percentage; "
        "set it to a number such as 2, or to a percentage such as 10%",
    ),
    "a negative count": Case(
        negative, "worker", "InvalidConfiguration",
        "spec.maxUnavailable of pool worker is -1, which is neither a count nor a percentage; "
        "set it to a number such as 2, or to a percentage such as 10%",
    ),
    "a selector without values": Case(
        selector, "infra", "InvalidConfiguration",
        "spec.nodeSelector.matchExpressions[0].values: expected at least one beside In, found 0",
    ),
    "a policy with a wrong value": Case(
        policy, "worker", "InvalidConfiguration",
        "RolloutPolicy worker: spec.canary.nodes: expected a count of nodes "
        "or a percentage from 1% to 100%, found 'none'",
    ),
    "a policy with an unknown field": Case(
        unknown_field, "worker", "InvalidConfiguration",
        "RolloutPolicy worker: spec.soakTime: unknown field; did you mean soak?",
    ),
    "a gate that is nowhere": Case(
        gate, "worker", "InvalidConfiguration",
        "RolloutPolicy worker: spec.alerts.url: expected an http or https URL "
        "without user, query and fragment, found a string",
    ),
    "an image by tag": Case(
        image, "worker", "InvalidConfiguration",
        "spec.osImage of pool worker",
    ),
    "a record that a user edited": Case(
        record, "worker", "InvalidConfiguration", "status.rollout.wave: expected an integer",
    ),
    "a policy that does not exist": Case(
        missing_policy, "worker", "MissingRolloutPolicy",
        "RolloutPolicy carefull does not exist, and spec.rolloutPolicy of pool worker names it; "
        "create it, or correct spec.rolloutPolicy; until then no node is assigned",
    ),
    "an image stream": Case(
        stream, "worker", "InvalidConfiguration",
        "spec.osImageStream of pool worker is not supported, found rhel-10; remove it, and name "
        "the image of the stream in spec.osImage",
    ),
    "a pinned image set": Case(
        pinned, "worker", "InvalidConfiguration",
        "spec.pinnedImageSets of pool worker is not supported, found base; remove it, and pull "
        "the images in another way, such as with a DaemonSet",
    ),
    "a config that does not exist": Case(
        absent, "worker", "MissingMachineConfig",
        "cannot assign MachineConfig new: it does not exist; create it, or correct "
        "spec.configuration of pool worker",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_invalid_input_is_reported_and_changes_no_node(case: Case) -> None:
    found = start()
    looked_at(found, "worker")
    before = dict(found.objects["nodes"])
    case.write(found)
    looked_at(found, *found.objects["machineconfigpools"])
    conditions = found.conditions(case.pool)
    for kind in ("Degraded", "Stalled"):
        assert (conditions[kind]["status"], conditions[kind]["reason"]) == ("True", case.reason)
        assert conditions[kind]["message"].startswith(case.sentence)
    assert conditions.get("Updated", {}).get("status") != "True" or case.pool in ("gpu", "infra")
    assert found.objects["nodes"] == before


def test_nodes_of_unknown_pool_are_not_assigned() -> None:
    found = start()
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

    found = start()
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
