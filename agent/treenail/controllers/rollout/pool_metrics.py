"""Metrics of pools: nodes by state, conditions, halts, waits by reason, durations of updates."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from treenail import clocks, errors
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.pools import holders, node_facts, pool_membership, pool_status
from treenail.controllers.runtime import controller_metrics

NODE_STATES = ("Done", "Working", "Degraded", "Unreconcilable", "Unknown")
CONDITIONS = ("Updated", "Updating", "Degraded", "Stalled")

ReadPools = Callable[[], Iterable[pool_membership.PoolSnapshot]]


class PoolMetrics:
    """Computes the gauges of pools at each scrape, and measures updates of nodes as they end."""

    def __init__(
        self,
        metrics: controller_metrics.ControllerMetrics,
        clock: clocks.Clock,
        read_pools: ReadPools,
        find_start: Callable[[node_facts.NodeFacts], float | None],
        find_strays: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """``find_start`` returns when the controller assigned the node its target, or None.

        ``find_strays`` describes nodes with an agent whose pool is none or not the expected one.
        """
        self._clock = clock
        self._find_start = find_start
        self._read_pools = read_pools
        self._durations = metrics.add_histogram(
            "update_duration_seconds",
            "Time from the assignment of a target to a node until the node has it.",
            buckets=controller_metrics.SLOW_BUCKETS_S,
        )
        metrics.add_tables(lambda: compute_pool_tables(self._read_pools(), self._clock.now()))
        metrics.add_tables(
            lambda: [
                controller_metrics.MetricTable(
                    "stray_nodes",
                    "Nodes with an agent whose pool is none or not the expected one.",
                    (),
                    {(): float(len(find_strays()))},
                )
            ]
        )

    def observe_node(
        self, before: node_facts.NodeFacts | None, after: node_facts.NodeFacts | None
    ) -> None:
        """Record the duration of an update that ends with this change of the node."""
        if before is None or after is None or not (after.is_done and not before.is_done):
            return
        started_at = self._find_start(after) if before.desired_config else None
        if started_at is not None:
            self._durations.observe(max(0.0, self._clock.now() - started_at))


def compute_pool_tables(
    pools: Iterable[pool_membership.PoolSnapshot], now: float
) -> Iterator[controller_metrics.MetricTable]:
    """Return the gauges of all pools; ``now`` is in seconds since the epoch."""
    nodes = controller_metrics.MetricTable(
        "pool_nodes", "Nodes of a pool by state.", ("pool", "state")
    )
    counts = controller_metrics.MetricTable(
        "pool_machines", "Nodes of a pool as its status counts them.", ("pool", "count")
    )
    conditions = controller_metrics.MetricTable(
        "pool_condition", "1 if the condition is True.", ("pool", "type")
    )
    halted = controller_metrics.MetricTable(
        "pool_halted", "1 if failed nodes halted the rollout until a user acts.", ("pool",)
    )
    waiting = controller_metrics.MetricTable(
        "pool_waiting", "1 for the reason why no further node gets the target now.",
        ("pool", "reason"),
    )  # fmt: skip
    age = controller_metrics.MetricTable(
        "pool_target_age_seconds",
        "Time since the pool is updating to its present target; 0 if all nodes have it.",
        ("pool",),
    )
    for snapshot in pools:
        pool = snapshot.observed.pool
        states = Counter(_find_state(node) for node in snapshot.nodes)
        nodes.values.update(
            {(pool.name, state): float(states.get(state, 0)) for state in NODE_STATES}
        )
        counts.values.update(
            {(pool.name, name): float(value) for name, value in _read_counts(pool)}
        )
        conditions_by_type = {condition.type: condition for condition in pool.conditions}
        for name in CONDITIONS:
            is_true = name in conditions_by_type and conditions_by_type[name].status == "True"
            conditions.values[pool.name, name] = float(is_true)
        degraded, updating = conditions_by_type.get("Degraded"), conditions_by_type.get("Updating")
        is_halted = degraded is not None and (degraded.status, degraded.reason) == (
            "True",
            "Halted",
        )
        halted.values[pool.name,] = float(is_halted)
        is_updating = updating is not None and updating.status == "True"
        reason = ""
        if updating is not None and is_updating and updating.reason == "Waiting":
            reason = holders.classify_wait(updating.message)
        waiting.values.update(
            {
                (pool.name, wait_reason): float(wait_reason == reason)
                for wait_reason in holders.WAIT_REASONS
            }
        )
        since = (
            clocks.parse_rfc3339(updating.last_transition_time) if updating is not None else None
        )
        is_known = is_updating and since is not None
        age.values[pool.name,] = max(0.0, now - (since or 0.0)) if is_known else 0.0
    return iter((nodes, counts, conditions, halted, waiting, age))


def _find_state(node: node_facts.NodeFacts) -> str:
    return node.state if node.state in NODE_STATES else "Unknown"


def _read_counts(pool: MachineConfigPool) -> list[tuple[str, int]]:
    try:
        counts = pool_status.read_reported_status(pool).counts
    except errors.ConfigError:
        return []
    return [
        ("total", counts.total),
        ("updated", counts.updated),
        ("ready", counts.ready),
        ("unavailable", counts.unavailable),
        ("degraded", counts.degraded),
    ]
