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
from treenail.api.machineconfigpool import API_VERSION, Configuration, MachineConfigPool
from treenail.api.meta import Condition, renewed
from treenail.controllers.rollout.gates import building
from treenail.controllers.rollout.gates.os_image import ImageBuild, ImageConfig
from treenail.controllers.rollout.nodes import NodeFacts, Target
from treenail.controllers.rollout.reported import Reported

UPDATED = "Updated"
UPDATING = "Updating"
NODE_DEGRADED = "NodeDegraded"
RENDER_DEGRADED = "RenderDegraded"
IMAGE_BUILD_DEGRADED = building.IMAGE_BUILD_DEGRADED
PINNED_IMAGE_SETS_DEGRADED = "PinnedImageSetsDegraded"
DEGRADED = "Degraded"
RECONCILING = "Reconciling"
STALLED = "Stalled"

NAMED_AT_MOST = 10
"""Nodes that a message names; the others are counted."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How many nodes of a pool are how far."""

    total: int = 0
    updated: int = 0
    ready: int = 0
    """Updated, and in service."""
    unavailable: int = 0
    degraded: int = 0


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something a person has to look at: a reason in CamelCase and a sentence."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class View:
    """All that the status of a pool is made from."""

    pool: MachineConfigPool
    target: Target
    nodes: Sequence[NodeFacts]
    image_config: ImageConfig | None = None
    image_build: ImageBuild | None = None
    reports: Mapping[str, Reported] | None = None
    """By node; when given, being updated and being degraded are counted from them."""
    waiting: str = ""
    """Why no node is given the target just now; empty when nothing is waited for."""
    remaining: str = ""
    """How much is left and how long it may take."""
    trouble: Trouble | None = None
    """Why the rollout can't go on by itself."""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """What to write into the pool's status; fields of other writers are not among it."""

    counts: Counts
    configuration: Configuration
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


def count(
    nodes: Iterable[NodeFacts], target: Target, reports: Mapping[str, Reported] | None = None
) -> Counts:
    """The nodes counted, by their annotations or, where there are reports, by those."""
    total = updated = ready = unavailable = degraded = 0
    for node in nodes:
        report = Reported(node.name) if reports is None else reports.get(node.name)
        if reports is None:
            has, fails = node.has(target), node.degraded
        else:
            has = report is not None and report.has(target)
            fails = report is not None and report.degraded is not None
        total += 1
        updated += has
        ready += has and node.in_service
        unavailable += node.unavailable
        degraded += fails
    return Counts(total, updated, ready, unavailable, degraded)


def calculate(view: View, *, now: str) -> PoolStatus:
    """The pool's status; ``now`` (RFC 3339) is when conditions that changed did so."""
    counts = count(view.nodes, view.target, view.reports)
    complete = (
        counts.updated == counts.ready == counts.total
        and counts.unavailable == 0
        and not building.unfinished(view.image_config, view.image_build)
    )
    before = {condition.type: condition for condition in view.pool.conditions}
    updating = _updating(view, complete=complete)
    found = [
        _updated(view, complete=complete),
        updating,
        _node_degraded(view, counts),
        *building.degraded(view.image_config, view.image_build, before.get(IMAGE_BUILD_DEGRADED)),
    ]
    known = {**before, **{condition.type: condition for condition in found}}
    degraded = _degraded(view, known)
    stalled = view.trouble is not None or degraded.status == "True"
    found += [
        degraded,
        Condition(RECONCILING, _status(not complete), updating.reason, updating.message),
        Condition(STALLED, _status(stalled), degraded.reason, degraded.message),
    ]
    return PoolStatus(
        counts=counts,
        configuration=view.pool.configuration if complete else view.pool.reported,
        conditions=renewed(view.pool.conditions, found, now=now),
        observed_generation=view.pool.metadata.generation,
    )


def update_line(target: Target) -> str:
    """What the nodes are updated to, for people."""
    image = f" / Image {target.image}" if target.image else ""
    return f"MachineConfig {target.config}{image}"


def _status(true: bool) -> str:  # noqa: FBT001  # reads as what it converts
    return "True" if true else "False"


def _updated(view: View, *, complete: bool) -> Condition:
    if complete:
        line = update_line(view.target)
        return Condition(UPDATED, "True", "AllNodesUpdated", f"All nodes are updated with {line}")
    return Condition(UPDATED, "False", "NodesOutdated")


def _updating(view: View, *, complete: bool) -> Condition:
    built = building.updating(
        view.image_config,
        view.image_build,
        complete=complete,
        paused=view.pool.paused,
        degraded=_was_degraded(view.pool),
    )
    if built is not None:
        return Condition(UPDATING, *built)
    if complete:
        return Condition(UPDATING, "False", "AllNodesUpdated")
    line = update_line(view.target)
    if view.pool.paused:
        return Condition(UPDATING, "False", "Paused", f"Pool is paused; will not update to {line}")
    said = [f"All nodes are updating to {line}", view.waiting, view.remaining]
    reason = "Waiting" if view.waiting else "RollingOut"
    return Condition(UPDATING, "True", reason, "; ".join(filter(None, said)))


def _was_degraded(pool: MachineConfigPool) -> bool:
    kinds = (RENDER_DEGRADED, NODE_DEGRADED, PINNED_IMAGE_SETS_DEGRADED)
    return any(found.type in kinds and found.status == "True" for found in pool.conditions)


def _node_degraded(view: View, counts: Counts) -> Condition:
    if not counts.degraded:
        return Condition(NODE_DEGRADED, "False", "NoNodeDegraded")
    sentences = [
        _complaint(node.name, said)
        for node in view.nodes
        if (said := _said(node, view.reports)) is not None
    ]
    more = len(sentences) - NAMED_AT_MOST
    named = ", ".join(sentences[:NAMED_AT_MOST]) + (f", and {more} more" if more > 0 else "")
    return Condition(NODE_DEGRADED, "True", "NodesDegraded", named)


def _said(node: NodeFacts, reports: Mapping[str, Reported] | None) -> str | None:
    report = None if reports is None else reports.get(node.name)
    if report is not None and report.degraded is not None:
        return node.reason or report.degraded
    return node.reason if reports is None and node.degraded else None


def _complaint(node: str, said: str) -> str:
    if not said:
        return f"Node {node} is degraded and does not say why"
    return f"Node {node} is reporting: {json.dumps(said, ensure_ascii=False)}"


def _degraded(view: View, known: Mapping[str, Condition]) -> Condition:
    if view.trouble is not None:
        return Condition(DEGRADED, "True", view.trouble.reason, view.trouble.message)
    for kind, default in (
        (NODE_DEGRADED, ""),
        (IMAGE_BUILD_DEGRADED, "Custom OS image build failed"),
        (RENDER_DEGRADED, "The configuration can't be rendered"),
        (PINNED_IMAGE_SETS_DEGRADED, "The pinned images can't be pulled"),
    ):
        found = known.get(kind)
        if found is not None and found.status == "True":
            message = default if kind == IMAGE_BUILD_DEGRADED else found.message or default
            return Condition(DEGRADED, "True", kind, message)
    return Condition(DEGRADED, "False", "AsExpected")
