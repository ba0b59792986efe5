"""The verdict on a node that booted its target: commit it, wait, or roll back.

A node is healthy once all health checks have passed for ``settle_s`` without a break. A check rolls
the node back only under the conditions of `ROLLBACK_RULES`. `decide_verdict` implements them, the
tables in docs/health.md and treenail(8) are copies, and a test compares the three.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from treenail.update.checks.trial_limits import TrialLimits
from treenail.update.state.boot_trial import BootTrial, HealthCheckMode
from treenail.update.state.record import Target

API_SERVER = "ApiServer"
NODE_READY = "NodeReady"
KUBELET = "Kubelet"
CONTAINER_RUNTIME = "ContainerRuntime"
NETWORK = "Network"
GREENBOOT = "Greenboot"
LEDGER = "Ledger"
CONFIGURATION = "Configuration"
AGENT = "Agent"
BOOT = "Boot"
OWN_CHECK_PREFIX = "health.d/"
"""Prefix of the names of the administrator's own checks."""

_OUTAGE_CHECKS = (API_SERVER, NODE_READY)
"""Checks that an outage of the cluster may fail on each node."""


@dataclass(frozen=True, slots=True)
class RollbackRule:
    """The condition under which one check rolls the node back."""

    check: str
    condition: str


_FOR_FAILING_S = "it failed for failing_s without a break, at the deadline"

ROLLBACK_RULES = (
    RollbackRule(
        KUBELET,
        f"{_FOR_FAILING_S}, while the kubelet does not wait for its client certificate",
    ),
    RollbackRule(CONTAINER_RUNTIME, _FOR_FAILING_S),
    RollbackRule(
        NETWORK,
        f"{_FOR_FAILING_S}, and the node had a default route before the reboot",
    ),
    RollbackRule(GREENBOOT, _FOR_FAILING_S),
    RollbackRule(
        API_SERVER,
        f"{_FOR_FAILING_S}, if the API server answered directly before the reboot and never "
        "since, and the target was not rolled back for this check before",
    ),
    RollbackRule(
        NODE_READY,
        f"{_FOR_FAILING_S}, and the API server has answered for ready_s without a break",
    ),
    RollbackRule(LEDGER, _FOR_FAILING_S),
    RollbackRule(CONFIGURATION, _FOR_FAILING_S),
    RollbackRule(f"{OWN_CHECK_PREFIX}NAME", _FOR_FAILING_S),
    RollbackRule(
        AGENT,
        "the agent crashed 5 times in one boot, or the fourth boot into the target began without "
        "a verdict; a restart by an administrator is no crash",
    ),
    RollbackRule(
        BOOT,
        "another deployment was booted, by the boot loader or by a user; the node is already back",
    ),
)
"""All causes of a rollback."""


@dataclass(frozen=True, slots=True)
class HealthCheckResult:
    """The last result of a health check.

    ``is_passing`` is None if the check does not apply, or if what it waits for is external.
    """

    name: str
    is_passing: bool | None
    problem: str = ""
    """The cause of the failure, or what the check waits for, for users."""
    since_s: float = 0.0
    """Seconds since the result changed. A pass shorter than ``settle_s`` does not change it."""
    is_external: bool = False
    """The cause is outside this node: the clock of the trial stands still."""

    @property
    def is_waiting(self) -> bool:
        """The check waits for another component before it can pass or fail."""
        return self.is_passing is None and self.is_external

    def is_excused(self, trial: BootTrial) -> bool:
        """Return whether it fails as it did before the reboot."""
        has_failed_before = self.name in trial.failed_before
        return self.is_passing is False and has_failed_before and self.name != API_SERVER


@dataclass(frozen=True, slots=True)
class BootTrialStatus:
    """One observation of a boot trial."""

    elapsed_s: float
    """Seconds on the clock of the trial."""
    limits: TrialLimits
    checks: tuple[HealthCheckResult, ...] = ()
    is_api_reachable: bool = False
    api_for_s: float = 0.0
    """Seconds for which the API server has answered; 0 while it does not."""
    healthy_for_s: float = 0.0
    """Seconds for which all checks that count have passed; 0 while one fails."""
    observed_s: float = 0.0
    """Seconds for which the checks have run without a long gap."""
    paused_s: float = 0.0
    """Seconds for which the clock stood still."""
    is_paused: bool = False


@dataclass(frozen=True, slots=True)
class HealthyVerdict:
    """The node is healthy: commit the target."""

    inconclusive: tuple[HealthCheckResult, ...] = ()
    """The failing checks that do not count."""


@dataclass(frozen=True, slots=True)
class PendingVerdict:
    """The trial continues."""

    reason: str
    problem: str = ""
    """The checks of this node that have failed for ``failing_s``; empty without one."""


@dataclass(frozen=True, slots=True)
class UnhealthyVerdict:
    """The node is unhealthy: roll back."""

    check: HealthCheckResult
    is_only: bool = True
    """No other check counts against the target."""


BootVerdict = HealthyVerdict | PendingVerdict | UnhealthyVerdict


def decide_verdict(
    status: BootTrialStatus,
    boot_trial: BootTrial,
    *,
    is_api_blamed: bool,
    mode: HealthCheckMode = HealthCheckMode.ENFORCE,
) -> BootVerdict:
    """Return the verdict so far.

    ``is_api_blamed``: this target was already rolled back because of the API server.
    """
    limits = status.limits
    failing = tuple(each for each in status.checks if each.is_passing is False)
    waiting = tuple(each for each in status.checks if each.is_waiting)
    excused = tuple(each for each in failing if each.is_excused(boot_trial))
    current = tuple(each for each in failing if each not in excused)
    lasting = (each for each in current if each.since_s >= limits.failing_s)
    pending = PendingVerdict(
        _format_waiting(status, (*current, *waiting)),
        problem=_format_failing(each for each in lasting if not each.is_external),
    )
    # The checks may begin late: the agent runs none while it cannot read the deployments.
    is_last = status.elapsed_s >= limits.last_s and status.observed_s >= limits.observed_s
    if not current and not waiting:
        is_settled = status.healthy_for_s >= limits.settle_s
        return HealthyVerdict(excused) if is_settled or is_last else pending
    if status.elapsed_s < limits.deadline_s or status.is_paused:
        return pending
    blamable = [
        each
        for each in current
        if each.name != API_SERVER or _is_api_lost(boot_trial, is_api_blamed=is_api_blamed)
    ]
    counted = [each for each in blamable if _has_failed_long_enough(each, status)]
    if counted and mode is HealthCheckMode.ENFORCE:
        return UnhealthyVerdict(counted[0], is_only=len(blamable) == 1)
    if blamable and not counted and not is_last:
        return pending
    return HealthyVerdict((*failing, *waiting))


def is_outage_check(name: str) -> bool:
    """Return whether an outage of the cluster may fail the check on a healthy node."""
    return name in _OUTAGE_CHECKS


class OriginCheck(StrEnum):
    """The check that failed a target, on the previous deployment after the rollback."""

    UNKNOWN = "unknown"
    FAILS = "fails"
    """It fails there too, for so long that the reboot does not explain it."""
    PASSES = "passes"


def judge_origin_check(result: HealthCheckResult, limits: TrialLimits) -> OriginCheck:
    """Return what a check's result on the previous deployment says about the rollback."""
    if result.is_passing and result.since_s >= limits.settle_s:
        return OriginCheck.PASSES
    needed_s = limits.ready_s if result.name == NODE_READY else limits.failing_s
    if result.is_passing is False and result.since_s >= needed_s:
        return OriginCheck.FAILS
    return OriginCheck.UNKNOWN


def format_unhealthy(target: Target, failed: HealthCheckResult) -> str:
    """Return the reason for the quarantine of a target that failed a health check."""
    duration = f" for {failed.since_s:.0f} s" if failed.since_s >= 1 else ""
    return f"{target} is not healthy: check {failed.name} failed{duration}: {failed.problem}"


def format_inconclusive(checks: tuple[HealthCheckResult, ...], trial: BootTrial) -> str:
    """Return the checks that did not pass although the target stays, with the reason."""
    return "; ".join(
        f"check {each.name} {'failed' if each.is_passing is False else 'has no result'}: "
        f"{each.problem}" + " (it failed before the reboot, too)" * each.is_excused(trial)
        for each in checks
    )


def format_not_booted(target: Target, booted_digest: str) -> str:
    """Return the reason for the quarantine of a target that did not boot."""
    return (
        f"{target} did not boot: {booted_digest or 'another deployment'} was booted, by the boot "
        "loader after a failure, by a user's choice, or by a rollback that has no record"
    )


def _is_api_lost(boot_trial: BootTrial, *, is_api_blamed: bool) -> bool:
    is_lost = boot_trial.has_api_before_reboot and not boot_trial.has_api_since_reboot
    return is_lost and not is_api_blamed


def _has_failed_long_enough(check: HealthCheckResult, status: BootTrialStatus) -> bool:
    if check.name == NODE_READY and status.api_for_s < status.limits.ready_s:
        return False
    return check.since_s >= status.limits.failing_s


def _format_failing(checks: Iterable[HealthCheckResult]) -> str:
    # No seconds: each change of the text is a write to the Node.
    return "; ".join(f"check {each.name} fails: {each.problem}" for each in checks)


def _format_waiting(status: BootTrialStatus, checks: tuple[HealthCheckResult, ...]) -> str:
    if not checks:
        return "all health checks pass; waiting until they have passed for settle_s"
    listed = "; ".join(f"{each.name}: {each.problem}" for each in checks)
    if status.is_paused:
        left_s = max(status.limits.outage_s - status.paused_s, 0.0)
        return f"not counting the time, for up to {left_s:.0f} s more, because of {listed}"
    limits = status.limits
    if status.elapsed_s < limits.deadline_s:
        left_s = limits.deadline_s - status.elapsed_s
    else:
        left_s = max(limits.last_s - status.elapsed_s, limits.observed_s - status.observed_s, 0.0)
    return f"waiting up to {left_s:.0f} s for {listed}"
