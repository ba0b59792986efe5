"""Status of a pool: counts, conditions, and when a change is worth a write.

Counts, states and messages are those of the Machine Config Operator (status.go). Four differences
are deliberate: every reason is a CamelCase word; counts come from Nodes, and never from
MachineConfigNodes; a Degraded condition that is True has a message; a pool without a config, or
with a node of two pools, is not Updated. The conditions Reconciling and Stalled follow the
conventions of kstatus.

While the OS image is built in the cluster, `compute_build_updating` and `compute_build_degraded`
compute the conditions.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from treenail.api import machineconfigpool, machineosbuild, machineosconfig, object_meta
from treenail.controllers.pools import node_facts, rollout_policy
from treenail.encoding import codec
from treenail.errors import ConfigError

IMAGE_BUILD_DEGRADED = "ImageBuildDegraded"


UPDATED = "Updated"
UPDATING = "Updating"
NODE_DEGRADED = "NodeDegraded"
RENDER_DEGRADED = "RenderDegraded"
PINNED_IMAGE_SETS_DEGRADED = "PinnedImageSetsDegraded"
DEGRADED = "Degraded"
RECONCILING = "Reconciling"
STALLED = "Stalled"
OPEN_WAVE_SELECTOR = "OpenWaveSelector"
"""A warning that blocks nothing."""
PROGRESS_DEADLINE = "ProgressDeadlineExceeded"
"""Reason of Stalled, as in the conditions of a Deployment."""
NODE_IN_TWO_POOLS = "NodeInTwoPools"
"""Reason of Degraded: two custom pools select a node."""

_MESSAGE_CHARS = 16_384
MAX_NAMED_NODES = 10
"""Nodes that a message names; it counts the others."""
COUNTS_INTERVAL_S = 5.0
"""Minimum interval between writes of counts alone, so that many finished nodes cost one write."""

_ESTIMATE = re.compile(r"; \d+ of \d+ nodes are updated, [^;]*$")


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Node counts of a pool."""

    total: Annotated[int, codec.Key("machineCount")] = 0
    updated: Annotated[int, codec.Key("updatedMachineCount")] = 0
    ready: Annotated[int, codec.Key("readyMachineCount")] = 0
    """Updated and in service."""
    unavailable: Annotated[int, codec.Key("unavailableMachineCount")] = 0
    degraded: Annotated[int, codec.Key("degradedMachineCount")] = 0


@dataclass(frozen=True, slots=True)
class PoolProblem:
    """A problem that needs a user: a CamelCase reason and a message."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PoolStatusInput:
    """Input of `compute_status`."""

    pool: machineconfigpool.MachineConfigPool
    target: node_facts.RolloutTarget
    nodes: Sequence[node_facts.NodeFacts]
    image_config: machineosconfig.MachineOSConfig | None = None
    image_build: machineosbuild.MachineOSBuild | None = None
    waiting_reason: str = ""
    """Why no further node gets the target now, or empty."""
    progress_message: str = ""
    """How many nodes are updated, and the estimated time left."""
    problem: PoolProblem | None = None
    """Why the rollout cannot continue without a user."""
    image_tag: object_meta.Condition | None = None
    """OSImageResolved; None for a pool that never had a tag."""
    open_labels: tuple[str, ...] = ()
    """Labels in the selectors of waves that a node may set on itself."""
    stalled_message: str = ""
    """Why the rollout exceeds its progress deadline; empty while it does not."""


@dataclass(frozen=True, slots=True)
class PoolStatus(codec.JsonObject, where="status"):
    """The status fields that the rollout controller writes."""

    counts: Annotated[PoolCounts, codec.INLINE]
    configuration: machineconfigpool.PoolConfiguration
    conditions: tuple[object_meta.Condition, ...]
    observed_generation: int


def count_nodes(
    nodes: Iterable[node_facts.NodeFacts], target: node_facts.RolloutTarget
) -> PoolCounts:
    """Count the nodes by their annotations."""
    total = updated = ready = unavailable = degraded = 0
    for node in nodes:
        has_target = node.is_updated_to(target)
        total += 1
        updated += has_target
        ready += has_target and node.is_in_service
        unavailable += node.is_unavailable
        degraded += node.is_degraded
    return PoolCounts(total, updated, ready, unavailable, degraded)


def compute_status(status_input: PoolStatusInput, *, now: str) -> PoolStatus:
    """Compute the pool's status; ``now`` (RFC 3339) becomes the time of changed conditions."""
    counts = count_nodes(status_input.nodes, status_input.target)
    is_complete = (
        _has_known_goal(status_input)
        and counts.updated == counts.ready == counts.total
        and counts.unavailable == 0
        and not is_build_unfinished(status_input.image_config, status_input.image_build)
    )
    before = {condition.type: condition for condition in status_input.pool.conditions}
    updating = _compute_updating(status_input, is_complete=is_complete)
    computed = [
        _compute_updated(status_input, is_complete=is_complete),
        updating,
        _compute_node_degraded(status_input, counts),
        *compute_build_degraded(
            status_input.image_config, status_input.image_build, before.get(IMAGE_BUILD_DEGRADED)
        ),
        *(() if status_input.image_tag is None else (status_input.image_tag,)),
        *_compute_open_waves(status_input, before),
    ]
    conditions = {**before, **{condition.type: condition for condition in computed}}
    degraded = _compute_degraded(status_input, conditions)
    stalled = _compute_stalled(status_input, degraded)
    reconciling = object_meta.Condition(
        RECONCILING, _format_bool(not is_complete), updating.reason, updating.message
    )
    if stalled.status == "True":
        # kstatus reads Reconciling first: while it is True, a stalled object is in progress.
        reconciling = object_meta.Condition(RECONCILING, "False", stalled.reason, stalled.message)
        if updating.status == "True" and stalled.reason == PROGRESS_DEADLINE:
            # As in the MCO, Updating stays True until all nodes have the target. kstatus does not
            # read it; its reason tells users that nothing moves.
            computed[1] = replace(updating, reason=STALLED)
    computed += [degraded, reconciling, stalled]
    return PoolStatus(
        counts=counts,
        configuration=status_input.pool.configuration
        if is_complete
        else status_input.pool.status_configuration,
        conditions=object_meta.merge_conditions(status_input.pool.conditions, computed, now=now),
        observed_generation=status_input.pool.metadata.generation,
    )


def _compute_open_waves(
    status_input: PoolStatusInput, before: Mapping[str, object_meta.Condition]
) -> Iterator[object_meta.Condition]:
    """Yield a warning; nothing for a pool that never had one."""
    if status_input.open_labels:
        message = (
            f"canary.nodeSelector of RolloutPolicy {status_input.pool.rollout_policy} uses "
            f"{', '.join(status_input.open_labels[:MAX_NAMED_NODES])}, which each node can set on "
            "itself to become a canary: use a label such as "
            "node-restriction.kubernetes.io/canary, which only users can set"
        )
        yield object_meta.Condition(OPEN_WAVE_SELECTOR, "True", "NodesMaySetLabel", message)
    elif OPEN_WAVE_SELECTOR in before:
        yield object_meta.Condition(OPEN_WAVE_SELECTOR, "False", "AsExpected")


def _has_known_goal(status_input: PoolStatusInput) -> bool:
    """Whether the counts cover every selected node, and a config exists to compare them with."""
    problem = status_input.problem
    # Nodes that two pools select are in no pool's counts.
    return bool(status_input.target.config) and (
        problem is None or problem.reason != NODE_IN_TWO_POOLS
    )


def format_target(target: node_facts.RolloutTarget) -> str:
    """Format the target as the Machine Config Operator does in its conditions."""
    image = f" / Image {target.image}" if target.image else ""
    return f"MachineConfig {target.config}{image}"


def _format_bool(value: bool) -> str:  # noqa: FBT001  # converts its argument
    return "True" if value else "False"


def _compute_updated(status_input: PoolStatusInput, *, is_complete: bool) -> object_meta.Condition:
    if is_complete:
        line = format_target(status_input.target)
        return object_meta.Condition(
            UPDATED, "True", "AllNodesUpdated", f"All nodes are updated with {line}"
        )
    if not status_input.target.config:
        return object_meta.Condition(UPDATED, "False", "NotRendered")
    return object_meta.Condition(UPDATED, "False", "NodesOutdated")


def _compute_updating(status_input: PoolStatusInput, *, is_complete: bool) -> object_meta.Condition:
    built = compute_build_updating(
        status_input.image_config,
        status_input.image_build,
        is_complete=is_complete,
        is_paused=status_input.pool.paused,
        is_degraded=_was_degraded(status_input.pool),
    )
    if built is not None:
        return object_meta.Condition(UPDATING, *built)
    if is_complete:
        return object_meta.Condition(UPDATING, "False", "AllNodesUpdated")
    if not status_input.target.config:
        message = f"No MachineConfig is rendered yet for pool {status_input.pool.name}"
        return object_meta.Condition(UPDATING, "False", "NotRendered", message)
    line = format_target(status_input.target)
    if status_input.pool.paused:
        return object_meta.Condition(
            UPDATING, "False", "Paused", f"Pool is paused; will not update to {line}"
        )
    sentences = [
        f"All nodes are updating to {line}",
        status_input.waiting_reason,
        status_input.progress_message,
    ]
    reason = "Waiting" if status_input.waiting_reason else "RollingOut"
    return object_meta.Condition(UPDATING, "True", reason, "; ".join(filter(None, sentences)))


def _was_degraded(pool: machineconfigpool.MachineConfigPool) -> bool:
    kinds = (RENDER_DEGRADED, NODE_DEGRADED, PINNED_IMAGE_SETS_DEGRADED)
    return any(
        condition.type in kinds and condition.status == "True" for condition in pool.conditions
    )


def _compute_node_degraded(
    status_input: PoolStatusInput, counts: PoolCounts
) -> object_meta.Condition:
    if not counts.degraded:
        return object_meta.Condition(NODE_DEGRADED, "False", "NoNodeDegraded")
    sentences = [
        _format_node_message(node.name, node.reason)
        for node in status_input.nodes
        if node.is_degraded
    ]
    more = len(sentences) - MAX_NAMED_NODES
    named = ", ".join(sentences[:MAX_NAMED_NODES]) + (f", and {more} more" if more > 0 else "")
    return object_meta.Condition(NODE_DEGRADED, "True", "NodesDegraded", named[:_MESSAGE_CHARS])


def _format_node_message(node: str, message: str) -> str:
    if not message:
        return f"Node {node} is degraded and reports no reason"
    return f"Node {node} is reporting: {json.dumps(message, ensure_ascii=False)}"


def _compute_degraded(
    status_input: PoolStatusInput, conditions: Mapping[str, object_meta.Condition]
) -> object_meta.Condition:
    if status_input.problem is not None:
        return object_meta.Condition(
            DEGRADED, "True", status_input.problem.reason, status_input.problem.message
        )
    for kind, default in (
        (NODE_DEGRADED, ""),
        (IMAGE_BUILD_DEGRADED, "Custom OS image build failed"),
        (RENDER_DEGRADED, "The configuration cannot be rendered"),
        (PINNED_IMAGE_SETS_DEGRADED, "The pinned images cannot be pulled"),
    ):
        condition = conditions.get(kind)
        if condition is not None and condition.status == "True":
            message = default if kind == IMAGE_BUILD_DEGRADED else condition.message or default
            return object_meta.Condition(DEGRADED, "True", kind, message)
    return object_meta.Condition(DEGRADED, "False", "AsExpected")


def _compute_stalled(
    status_input: PoolStatusInput, degraded: object_meta.Condition
) -> object_meta.Condition:
    if status_input.problem is None and degraded.status != "True" and status_input.stalled_message:
        return object_meta.Condition(
            STALLED, "True", PROGRESS_DEADLINE, status_input.stalled_message
        )
    is_stalled = status_input.problem is not None or degraded.status == "True"
    return object_meta.Condition(
        STALLED, _format_bool(is_stalled), degraded.reason, degraded.message
    )


def read_reported_status(pool: machineconfigpool.MachineConfigPool) -> PoolStatus:
    """Parse the pool's present status."""
    return PoolStatus.from_json(pool.status)


def read_reported_counts(pool: machineconfigpool.MachineConfigPool) -> PoolCounts | None:
    """Return the counts in the pool's status; None before the first report, and if invalid."""
    if "machineCount" not in pool.status:
        return None
    try:
        return read_reported_status(pool).counts
    except ConfigError:
        return None


def compute_write_delay_s(
    pool: machineconfigpool.MachineConfigPool, desired: PoolStatus, since_last_s: float
) -> float | None:
    """Compute how long the write of the status can wait; None when there is nothing to write.

    A new estimate alone is not written: it would cost a write every minute.
    """
    present = read_reported_status(pool)
    if _strip_estimate(present) == _strip_estimate(desired):
        return None
    if _extract_significant(present) != _extract_significant(desired):
        return 0.0
    return max(0.0, COUNTS_INTERVAL_S - since_last_s)


def build_unusable_status(
    pool: machineconfigpool.MachineConfigPool, problem: PoolProblem, *, now: str
) -> PoolStatus:
    """Build the status of a pool with an invalid spec: the counts stay, the conditions say why."""
    computed = [
        # A client that waits for the new spec must not read what the previous one reached.
        object_meta.Condition(UPDATED, "False", problem.reason),
        object_meta.Condition(DEGRADED, "True", problem.reason, problem.message),
        object_meta.Condition(RECONCILING, "False", problem.reason, problem.message),
        object_meta.Condition(STALLED, "True", problem.reason, problem.message),
    ]
    return replace(
        read_reported_status(pool),
        conditions=object_meta.merge_conditions(pool.conditions, computed, now=now),
        observed_generation=pool.metadata.generation,
    )


def find_new_problems(
    pool: machineconfigpool.MachineConfigPool, written: PoolStatus
) -> list[object_meta.Condition]:
    """Return the conditions that report a problem which is new or has another message."""
    before = [
        (condition.type, condition.status, condition.message) for condition in pool.conditions
    ]
    return [
        condition
        for condition in written.conditions
        if (
            condition.type == DEGRADED
            or (condition.type, condition.reason) == (STALLED, PROGRESS_DEADLINE)
        )
        and condition.status == "True"
        and (condition.type, condition.status, condition.message) not in before
    ]


def _strip_estimate(status: PoolStatus) -> PoolStatus:
    conditions = tuple(
        replace(condition, message=_ESTIMATE.sub("", condition.message))
        for condition in status.conditions
    )
    return replace(status, conditions=conditions)


def _extract_significant(status: PoolStatus) -> tuple[object, ...]:
    states = [
        (condition.type, condition.status, condition.reason) for condition in status.conditions
    ]
    return (
        states,
        status.configuration,
        status.observed_generation,
        [condition.message for condition in status.conditions if condition.type == DEGRADED],
    )


def build_config_problem(error: ConfigError) -> PoolProblem:
    """Build the problem of a pool with an invalid spec or policy."""
    remedy = f"; {error.remedy}" if error.remedy else ""
    is_missing = isinstance(error, rollout_policy.MissingPolicyError)
    reason = "MissingRolloutPolicy" if is_missing else "InvalidConfiguration"
    return PoolProblem(reason, f"{error}{remedy}")


def is_build_unfinished(
    config: machineosconfig.MachineOSConfig | None, build: machineosbuild.MachineOSBuild | None
) -> bool:
    """True while the image that the pool waits for is not built yet."""
    if config is None or build is None:
        return False
    if build.state is machineosbuild.BuildState.SUCCEEDED:
        return build.pull_spec not in ("", config.pull_spec)
    return build.state in (
        machineosbuild.BuildState.PREPARED,
        machineosbuild.BuildState.BUILDING,
        machineosbuild.BuildState.FAILED,
    )


def compute_build_updating(
    config: machineosconfig.MachineOSConfig | None,
    build: machineosbuild.MachineOSBuild | None,
    *,
    is_complete: bool,
    is_paused: bool,
    is_degraded: bool,
) -> tuple[str, str, str] | None:
    """Compute status, reason and message of Updating; None when no build determines them."""
    if config is None:
        return None
    if not is_paused and is_degraded:
        return ("False", "Degraded", "Pool update paused due to degraded condition")
    if build is None:
        waiting = "waiting for a new OS image build to start"
        lead = "Pool is paused; " if is_paused else "Pool is "
        return ("True", "WaitingForBuild", f"{lead}{waiting} (mosc: {config.name})")
    if build.state is machineosbuild.BuildState.SUCCEEDED and is_complete and not is_paused:
        return None
    status, reason, message = (_PAUSED_BY_STATE if is_paused else _UPDATING_BY_STATE)[build.state]
    return (status, reason, f"{message} (mosb: {build.name})")


def compute_build_degraded(
    config: machineosconfig.MachineOSConfig | None,
    build: machineosbuild.MachineOSBuild | None,
    previous: object_meta.Condition | None,
) -> Iterator[object_meta.Condition]:
    """Yield the ImageBuildDegraded condition if it must change.

    The build controller sets it to True. This function resets it when the failed build is over.
    """
    has_failed = previous is not None and previous.status == "True"
    if build is not None and build.state in (
        machineosbuild.BuildState.PREPARED,
        machineosbuild.BuildState.BUILDING,
    ):
        yield object_meta.Condition(IMAGE_BUILD_DEGRADED, "False", "Building", "New build started")
    elif build is not None and build.state is machineosbuild.BuildState.SUCCEEDED:
        yield object_meta.Condition(
            IMAGE_BUILD_DEGRADED, "False", "BuildSuccess", "Build completed successfully"
        )
    elif build is None and has_failed and not (config is not None and config.problem):
        reason, message = (
            ("NoLayeredObjects", "No layered pool objects found")
            if config is None
            else ("BuildPending", "Waiting for a new OS image build")
        )
        yield object_meta.Condition(IMAGE_BUILD_DEGRADED, "False", reason, message)


_UPDATING_BY_STATE = {
    machineosbuild.BuildState.INITIAL: (
        "True", "WaitingForBuild", "Pool is waiting for OS image build to start",
    ),
    machineosbuild.BuildState.PREPARED: (
        "True", "WaitingForBuild", "Pool is waiting for OS image build to start",
    ),
    machineosbuild.BuildState.BUILDING: (
        "True", "Building", "Pool is waiting for OS image build to complete",
    ),
    machineosbuild.BuildState.SUCCEEDED: (
        "True", "RollingOut", "Pool is waiting for nodes to apply OS image",
    ),
    machineosbuild.BuildState.FAILED: (
        "False", "BuildFailed", "Pool update stopped due to OS image build failure",
    ),
    machineosbuild.BuildState.INTERRUPTED: (
        "False", "BuildInterrupted", "Pool update stopped due to OS image build being interrupted",
    ),
}  # fmt: skip

_PAUSED_BY_STATE = {
    machineosbuild.BuildState.INITIAL: (
        "True", "Paused", "Pool is paused; OS image build has been created but not yet started",
    ),
    machineosbuild.BuildState.PREPARED: (
        "True", "Paused", "Pool is paused; OS image build has been prepared but will not rollout",
    ),
    machineosbuild.BuildState.BUILDING: (
        "True", "Paused", "Pool is paused; OS image build in progress",
    ),
    machineosbuild.BuildState.SUCCEEDED: (
        "False", "Paused", "Pool is paused; OS image build completed successfully",
    ),
    machineosbuild.BuildState.FAILED: (
        "False", "Paused", "Pool is paused; OS image build failed",
    ),
    machineosbuild.BuildState.INTERRUPTED: (
        "False", "Paused", "Pool is paused; OS image build was interrupted",
    ),
}  # fmt: skip
