"""Simulation of the boot trials of 500 nodes: how many healthy ones roll back, and dead ones stay.

Outages of the API server, of 10 s to 2 h, meet every phase of the trials. Kubelets flap, networks
come up slowly, and client certificates are issued late. The rules are those of the agent, on the
clock of the simulation.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from bench.result import Result
from treenail.update.checks.health import (
    API_SERVER,
    CONTAINER_RUNTIME,
    KUBELET,
    NODE_READY,
    CheckHistory,
    HealthCheckResult,
    HealthyVerdict,
    PendingVerdict,
    UnhealthyVerdict,
    decide_verdict,
    record_trial_status,
)
from treenail.update.state.boot_trial import BootTrial, TrialLimits

NODES = 500
SEED = 12
INTERVAL_S = 5.0
LIMIT_S = 36_000.0
_OUTAGES_S = (10, 30, 60, 120, 300, 600, 1200, 3600, 7200)
_DEAD_EVERY = 5


class KubeletKind(StrEnum):
    """How a kubelet behaves after the boot."""

    STEADY = "steady"
    FLAPPING = "flapping"
    """It restarts every two minutes or so, and is Ready in between."""
    LATE = "late"
    """It gets its client certificate late."""
    FAILED = "failed"
    CRASH_LOOP = "crash loop"
    HANGING = "hanging"
    """Its unit stays in activating."""
    UNREADY = "unready"
    """Its unit is active, and the Node never becomes Ready."""


HEALTHY_KINDS = (KubeletKind.STEADY, KubeletKind.FLAPPING, KubeletKind.LATE)
DEAD_KINDS = (
    KubeletKind.FAILED,
    KubeletKind.CRASH_LOOP,
    KubeletKind.HANGING,
    KubeletKind.UNREADY,
)


@dataclass(frozen=True, slots=True)
class SimulatedNode:
    """A node in the boot of its target; times are seconds since the boot."""

    kind: KubeletKind
    outage_at: float
    outage_s: float
    ready_after_s: float
    """Seconds with the API server until the Node is Ready for the first time."""
    certificate_at: float = 0.0
    period_s: float = 120.0
    down_s: float = 15.0

    @property
    def is_dead(self) -> bool:
        return self.kind in DEAD_KINDS

    def has_api(self, now: float) -> bool:
        return not self.outage_at <= now < self.outage_at + self.outage_s

    def run_checks(self, now: float) -> tuple[HealthCheckResult, ...]:
        """Return what the checks of the agent would find."""
        is_waiting = self.kind is KubeletKind.LATE and now < self.certificate_at
        if is_waiting:
            kubelet = HealthCheckResult(KUBELET, None, "no certificate", is_external=True)
            return (
                kubelet,
                HealthCheckResult(CONTAINER_RUNTIME, is_passing=True),
                HealthCheckResult(API_SERVER, None, "no certificate"),
                HealthCheckResult(NODE_READY, None, "no certificate"),
            )
        has_api = self.has_api(now)
        ready = HealthCheckResult(NODE_READY, None)
        if has_api:
            ready = HealthCheckResult(NODE_READY, self._is_ready(now), "not Ready")
        return (
            HealthCheckResult(KUBELET, self._is_active(now), "not active"),
            HealthCheckResult(CONTAINER_RUNTIME, is_passing=True),
            HealthCheckResult(API_SERVER, has_api, "no answer", is_external=not has_api),
            ready,
        )

    def _is_active(self, now: float) -> bool:
        match self.kind:
            case KubeletKind.STEADY | KubeletKind.LATE | KubeletKind.UNREADY:
                return True
            case KubeletKind.FLAPPING:
                return now % self.period_s >= self.down_s
            case KubeletKind.CRASH_LOOP:
                return now % 13.0 < 3.0  # RestartSec=10, and 3 s until it crashes
            case KubeletKind.FAILED | KubeletKind.HANGING:
                return False

    def _is_ready(self, now: float) -> bool:
        """Return whether the Node is Ready; after an outage the kubelet needs a minute for that."""
        if self.is_dead:
            return False
        began = max(self.certificate_at, 0.0)
        outage_end = self.outage_at + self.outage_s
        if outage_end <= began:
            with_api_s = now - began
        else:
            before_s = min(max(self.outage_at - began, 0.0), now - began)
            with_api_s = before_s + max(now - max(outage_end, began), 0.0)
        is_back = now < self.outage_at or now >= outage_end + 60.0
        return with_api_s >= self.ready_after_s and is_back


def create_nodes(count: int, *, seed: int) -> Iterator[SimulatedNode]:
    """Return nodes with outages at every phase: before the boot, during the trial, at its end."""
    choices = random.Random(seed)
    for number in range(count):
        is_dead = number % _DEAD_EVERY == 0
        kind = (DEAD_KINDS if is_dead else HEALTHY_KINDS)[
            number // _DEAD_EVERY % (4 if is_dead else 3)
        ]
        yield SimulatedNode(
            kind=kind,
            outage_at=choices.uniform(-120.0, 900.0),
            outage_s=choices.choice(_OUTAGES_S) * choices.uniform(0.9, 1.0),
            ready_after_s=choices.choice((20.0, 60.0, 180.0, 480.0)),
            certificate_at=choices.uniform(30.0, 5400.0) if kind is KubeletKind.LATE else 0.0,
            period_s=choices.uniform(90.0, 180.0),
            down_s=choices.uniform(5.0, 30.0),
        )


def run_trial(node: SimulatedNode, limits: TrialLimits) -> tuple[bool, float]:
    """Return whether the node rolls back, and when its trial ends."""
    trial = BootTrial(
        has_api_before_reboot=node.has_api(-60.0), boot_id="b", boot_count=1, began_monotonic=0.0
    )
    clock, now = CheckHistory(limits), 0.0
    while now < LIMIT_S:
        status = clock.observe(node.run_checks(now), trial, now)
        trial = record_trial_status(trial, status)
        match decide_verdict(status, trial, is_api_blamed=False):
            case UnhealthyVerdict():
                return True, now
            case HealthyVerdict():
                return False, now
            case PendingVerdict():
                now += INTERVAL_S
    raise AssertionError(f"the trial of {node} does not end")


def run_fleet(nodes: Iterator[SimulatedNode]) -> tuple[Counter[str], list[float]]:
    """Return the counts of outcomes, and the durations of the rollbacks, outages excluded."""
    counts: Counter[str] = Counter()
    rollbacks_s: list[float] = []
    for node in nodes:
        is_back, _ = run_trial(node, TrialLimits())
        counts["dead" if node.is_dead else "healthy"] += 1
        if is_back and not node.is_dead:
            counts["healthy rolled back"] += 1
        if node.is_dead and not is_back:
            counts["dead stayed"] += 1
        if is_back:
            undisturbed = replace(node, outage_s=0.0)
            rollbacks_s.append(run_trial(undisturbed, TrialLimits())[1])
    return counts, rollbacks_s


def measure(_seconds: float) -> Iterator[Result]:
    """Yield the counts of the fleet."""
    counts, rollbacks_s = run_fleet(create_nodes(NODES, seed=SEED))
    healthy, dead = counts["healthy"], counts["dead"]
    yield Result(
        f"health: rolled back of {healthy} healthy nodes", "nodes", counts["healthy rolled back"], 0
    )
    yield Result(f"health: stayed of {dead} dead kubelets", "nodes", counts["dead stayed"], 0)
    yield Result("health: longest rollback without an outage", "s", max(rollbacks_s), 900)
