"""The status of a pool: counts and conditions, always from what is seen now.

Counts, states and messages are those of the Machine Config Operator. Deliberate differences:
every reason is a CamelCase word, a node is named once however many places report it, one silent
node hides no other, and a Degraded condition that is True says why. The conditions Reconciling
and Stalled are added for tools that follow the conventions of kstatus.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from treenail.api.decode import Json
from treenail.api.machineconfigpool import API_VERSION, MachineConfigPool, PoolConfiguration
from treenail.api.meta import Condition, merge_conditions
from treenail.controllers.rollout.gates import building
from treenail.controllers.rollout.gates.os_image import MachineOSBuild, MachineOSConfig
from treenail.controllers.rollout.nodes import NodeFacts, RolloutTarget
from treenail.controllers.rollout.reported import NodeReport

UPDATED = "Updated"
UPDATING = "Updating"
NODE_DEGRADED = "NodeDegraded"
RENDER_DEGRADED = "RenderDegraded"
IMAGE_BUILD_DEGRADED = building.IMAGE_BUILD_DEGRADED
PINNED_IMAGE_SETS_DEGRADED = "PinnedImageSetsDegraded"
DEGRADED = "Degraded"
RECONCILING = "Reconciling"
STALLED = "Stalled"

MAX_NAMED_NODES = 10
"""Nodes that a message names; the others are counted."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """How many nodes of a pool are how far."""

    total: int = 0
    updated: int = 0
    ready: int = 0
    """Updated, and in service."""
    unavailable: int = 0
    degraded: int = 0


@dataclass(frozen=True, slots=True)
class PoolProblem:
    """Something a person has to look at: a reason in CamelCase and a sentence."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PoolStatusInput:
    """All that the status of a pool is made from."""

    pool: MachineConfigPool
    target: RolloutTarget
    nodes: Sequence[NodeFacts]
    image_config: MachineOSConfig | None = None
    image_build: MachineOSBuild | None = None
    reports: Mapping[str, NodeReport] | None = None
    """By node; when given, being updated and being degraded are counted from them."""
    waiting_reason: str = ""
    """Why no node is given the target just now; empty when nothing is waited for."""
    progress_message: str = ""
    """How much is left and how long it may take."""
    problem: PoolProblem | None = None
    """Why the rollout can't go on by itself."""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """What to write into the pool's status; fields of other writers are not among it."""

    counts: PoolCounts
    configuration: PoolConfiguration
    conditions: tuple[Condition, ...]
    observed_generation: int

    def to_json(self) -> Json:
        source = [
            {"apiVersion": API_VERSION, "kind": "MachineConfig", "name": name}
            for name in self.configuration.source
        ]
        configuration: Json = {"name": self.configuration.name, "source": source}
        return {
            "observedGeneration": self.observed_generation,
            "machineCount": self.counts.total,
            "updatedMachineCount": self.counts.updated,
            "readyMachineCount": self.counts.ready,
            "unavailableMachineCount": self.counts.unavailable,
            "degradedMachineCount": self.counts.degraded,
            "configuration": {key: value for key, value in configuration.items() if value},
            "conditions": [condition.to_json() for condition in self.conditions],
        }


def count_nodes(
    nodes: Iterable[NodeFacts],
    target: RolloutTarget,
    reports: Mapping[str, NodeReport] | None = None,
) -> PoolCounts:
    """The nodes counted, by their annotations or, where there are reports, by those."""
    total = updated = ready = unavailable = degraded = 0
    for node in nodes:
        report = NodeReport(node.name) if reports is None else reports.get(node.name)
        if reports is None:
            has, fails = node.is_updated_to(target), node.is_degraded
        else:
            has = report is not None and report.is_updated_to(target)
            fails = report is not None and report.degraded_message is not None
        total += 1
        updated += has
        ready += has and node.is_in_service
        unavailable += node.is_unavailable
        degraded += fails
    return PoolCounts(total, updated, ready, unavailable, degraded)


def compute_status(status_input: PoolStatusInput, *, now: str) -> PoolStatus:
    """The pool's status; ``now`` (RFC 3339) is when conditions that changed did so."""
    counts = count_nodes(status_input.nodes, status_input.target, status_input.reports)
    complete = (
        counts.updated == counts.ready == counts.total
        and counts.unavailable == 0
        and not building.is_build_unfinished(status_input.image_config, status_input.image_build)
    )
    before = {condition.type: condition for condition in status_input.pool.conditions}
    updating = _compute_updating(status_input, is_complete=complete)
    found = [
        _compute_updated(status_input, is_complete=complete),
        updating,
        _compute_node_degraded(status_input, counts),
        *building.compute_build_degraded(
            status_input.image_config, status_input.image_build, before.get(IMAGE_BUILD_DEGRADED)
        ),
    ]
    known = {**before, **{condition.type: condition for condition in found}}
    degraded = _compute_degraded(status_input, known)
    stalled = status_input.problem is not None or degraded.status == "True"
    found += [
        degraded,
        Condition(RECONCILING, _format_bool(not complete), updating.reason, updating.message),
        Condition(STALLED, _format_bool(stalled), degraded.reason, degraded.message),
    ]
    return PoolStatus(
        counts=counts,
        configuration=status_input.pool.configuration
        if complete
        else status_input.pool.status_configuration,
        conditions=merge_conditions(status_input.pool.conditions, found, now=now),
        observed_generation=status_input.pool.metadata.generation,
    )


def format_target(target: RolloutTarget) -> str:
    """What the nodes are updated to, for people."""
    image = f" / Image {target.image}" if target.image else ""
    return f"MachineConfig {target.config}{image}"


def _format_bool(value: bool) -> str:  # noqa: FBT001  # reads as what it converts
    return "True" if value else "False"


def _compute_updated(status_input: PoolStatusInput, *, is_complete: bool) -> Condition:
    if is_complete:
        line = format_target(status_input.target)
        return Condition(UPDATED, "True", "AllNodesUpdated", f"All nodes are updated with {line}")
    return Condition(UPDATED, "False", "NodesOutdated")


def _compute_updating(status_input: PoolStatusInput, *, is_complete: bool) -> Condition:
    built = building.compute_build_updating(
        status_input.image_config,
        status_input.image_build,
        is_complete=is_complete,
        is_paused=status_input.pool.paused,
        is_degraded=_was_degraded(status_input.pool),
    )
    if built is not None:
        return Condition(UPDATING, *built)
    if is_complete:
        return Condition(UPDATING, "False", "AllNodesUpdated")
    line = format_target(status_input.target)
    if status_input.pool.paused:
        return Condition(UPDATING, "False", "Paused", f"Pool is paused; will not update to {line}")
    said = [
        f"All nodes are updating to {line}",
        status_input.waiting_reason,
        status_input.progress_message,
    ]
    reason = "Waiting" if status_input.waiting_reason else "RollingOut"
    return Condition(UPDATING, "True", reason, "; ".join(filter(None, said)))


def _was_degraded(pool: MachineConfigPool) -> bool:
    kinds = (RENDER_DEGRADED, NODE_DEGRADED, PINNED_IMAGE_SETS_DEGRADED)
    return any(found.type in kinds and found.status == "True" for found in pool.conditions)


def _compute_node_degraded(status_input: PoolStatusInput, counts: PoolCounts) -> Condition:
    if not counts.degraded:
        return Condition(NODE_DEGRADED, "False", "NoNodeDegraded")
    sentences = [
        _format_node_message(node.name, said)
        for node in status_input.nodes
        if (said := _find_message(node, status_input.reports)) is not None
    ]
    more = len(sentences) - MAX_NAMED_NODES
    named = ", ".join(sentences[:MAX_NAMED_NODES]) + (f", and {more} more" if more > 0 else "")
    return Condition(NODE_DEGRADED, "True", "NodesDegraded", named)


def _find_message(node: NodeFacts, reports: Mapping[str, NodeReport] | None) -> str | None:
    report = None if reports is None else reports.get(node.name)
    if report is not None and report.degraded_message is not None:
        return node.reason or report.degraded_message
    return node.reason if reports is None and node.is_degraded else None


def _format_node_message(node: str, message: str) -> str:
    if not message:
        return f"Node {node} is degraded and does not say why"
    return f"Node {node} is reporting: {json.dumps(message, ensure_ascii=False)}"


def _compute_degraded(
    status_input: PoolStatusInput, conditions: Mapping[str, Condition]
) -> Condition:
    if status_input.problem is not None:
        return Condition(
            DEGRADED, "True", status_input.problem.reason, status_input.problem.message
        )
    for kind, default in (
        (NODE_DEGRADED, ""),
        (IMAGE_BUILD_DEGRADED, "Custom OS image build failed"),
        (RENDER_DEGRADED, "The configuration can't be rendered"),
        (PINNED_IMAGE_SETS_DEGRADED, "The pinned images can't be pulled"),
    ):
        found = conditions.get(kind)
        if found is not None and found.status == "True":
            message = default if kind == IMAGE_BUILD_DEGRADED else found.message or default
            return Condition(DEGRADED, "True", kind, message)
    return Condition(DEGRADED, "False", "AsExpected")
