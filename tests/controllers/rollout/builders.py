"""Short builders of nodes and pools for tests."""

import json
from dataclasses import replace
from typing import Any

from treenail.api.annotations import CURRENT_BUILD, DESIRED_IMAGE
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosbuild import BuildState, MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.api.object_meta import Condition, ObjectMeta
from treenail.controllers.pools.node_facts import NodeFacts, RolloutTarget
from treenail.controllers.pools.os_image import GateOpen
from treenail.controllers.pools.rollout_policy import RolloutPolicy, parse_policy
from treenail.controllers.rollout import decide
from treenail.controllers.rollout.decide import RolloutContext, RolloutDecision

OLD, NEW, NEWER = RolloutTarget("old"), RolloutTarget("new"), RolloutTarget("newer")


def image(config: str, digit: str) -> RolloutTarget:
    return RolloutTarget(config, f"registry.example.com/os@sha256:{digit * 64}")


def node(name: str = "n", target: RolloutTarget = OLD, **more: Any) -> NodeFacts:
    """A node to which the controller assigned its target, and that is in service."""
    facts = NodeFacts(
        name=name,
        current_config=target.config,
        desired_config=target.config,
        current_image=target.image,
        desired_image=target.image,
        state="Done",
        created_at="2026-01-01T00:00:00Z",
        started_at=0.0,
    )
    return replace(facts, **more)


def on_its_way(name: str, to: RolloutTarget = NEW, **more: Any) -> NodeFacts:
    """A node that is updating to a target."""
    return replace(node(name).with_target(to, 0.0), **{"state": "Working", **more})


def failed(name: str, to: RolloutTarget = NEW, **more: Any) -> NodeFacts:
    """A node that failed to update to a target."""
    return on_its_way(name, to, **{"state": "Degraded", "reason": "no space left", **more})


def pool(
    policy: Any = None, *, annotations: dict[str, str] | None = None, **spec: Any
) -> MachineConfigPool:
    """A pool named worker with the target NEW."""
    if policy is not None:
        # The name of the policy is its spec, so that one value carries both.
        spec = {"rolloutPolicy": json.dumps(policy), **spec}
    metadata = {"name": "worker", "generation": 7, "annotations": annotations or {}}
    return MachineConfigPool.from_json(
        {
            "metadata": metadata,
            "spec": {"configuration": {"name": "new"}, **spec},
            "status": {"configuration": {"name": "old"}},
        }
    )


def read_policy(found: MachineConfigPool) -> RolloutPolicy:
    """The policy of a pool that `pool` built."""
    if not found.rollout_policy:
        return RolloutPolicy()
    return parse_policy({"spec": json.loads(found.rollout_policy)}, "careful")


def decide_rollout(found: Any, *inputs: Any, **more: Any) -> RolloutDecision:
    """Decide with the policy of a pool that `pool` built; ``more`` is the context."""
    now = more.pop("now")
    context = RolloutContext(policy=read_policy(found), **more)
    return decide.decide_rollout(found, *inputs, now=now, context=context)


def proceed(target: RolloutTarget = NEW) -> GateOpen:
    return GateOpen(target, "")


def recorded_nodes(record: dict[str, Any]) -> list[NodeFacts]:
    return [NodeFacts.from_json(found, image_key=DESIRED_IMAGE) for found in record["nodes"]]


def recorded_image(record: dict[str, Any]) -> tuple[MachineOSConfig | None, MachineOSBuild | None]:
    config, build = record["mosc"], record["mosb"]
    return (
        None if config is None else MachineOSConfig.from_json(config),
        None if build is None else MachineOSBuild.from_json(build),
    )


def image_config(name: str = "worker", pull_spec: str = "", **more: str) -> MachineOSConfig:
    """A MachineOSConfig; ``current_build``, ``created`` and ``problem`` are properties."""
    annotations = {CURRENT_BUILD: more["current_build"]} if "current_build" in more else {}
    problem = more.get("problem")
    return MachineOSConfig(
        ObjectMeta(
            name,
            annotations=annotations,
            others={"creationTimestamp": more["created"]} if "created" in more else {},
        ),
        pool=more.get("pool", "worker"),
        pull_spec=pull_spec,
        conditions=(Condition("Accepted", "False", "PoolTaken", problem),) if problem else (),
    )


def image_build(
    name: str,
    config: str = "new",
    pull_spec: str = "",
    state: BuildState = BuildState.INITIAL,
    **more: str,
) -> MachineOSBuild:
    """A MachineOSBuild of the MachineOSConfig worker."""
    message = more.get("message", "")
    return MachineOSBuild(
        ObjectMeta(name, others={"creationTimestamp": more.get("created", "")}),
        config=config,
        image_config=more.get("image_config", "worker"),
        pull_spec=pull_spec,
        conditions=(Condition(state, "True", state, message),) if state else (),
    )
