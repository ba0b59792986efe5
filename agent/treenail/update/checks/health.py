"""The verdict on a node that booted its target: commit it, wait, or roll back.

A node is healthy once all health checks have passed for ``settle_s`` without a break. A check rolls
the node back only under the conditions of `ROLLBACK_RULES`. `decide_verdict` implements them, the
tables in docs/health.md and treenail(8) are copies, and a test compares the three. `CheckHistory`
measures how long each check has had its result, and what time counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from treenail.update.state.boot_trial import BootTrial, HealthCheckMode, TrialLimits
from treenail.update.state.ledger_record import Target

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
    failing = tuple(check for check in status.checks if check.is_passing is False)
    waiting = tuple(check for check in status.checks if check.is_waiting)
    excused = tuple(check for check in failing if check.is_excused(boot_trial))
    current = tuple(check for check in failing if check not in excused)
    lasting = (check for check in current if check.since_s >= limits.failing_s)
    pending = PendingVerdict(
        _format_waiting(status, (*current, *waiting)),
        problem=_format_failing(check for check in lasting if not check.is_external),
    )
    # The checks may begin late: the agent runs none while it cannot read the deployments.
    is_last = status.elapsed_s >= limits.last_s and status.observed_s >= limits.observed_s
    if not current and not waiting:
        is_settled = status.healthy_for_s >= limits.settle_s
        return HealthyVerdict(excused) if is_settled or is_last else pending
    if status.elapsed_s < limits.deadline_s or status.is_paused:
        return pending
    blamable = [
        check
        for check in current
        if check.name != API_SERVER or _is_api_lost(boot_trial, is_api_blamed=is_api_blamed)
    ]
    counted = [check for check in blamable if _has_failed_long_enough(check, status)]
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
        f"check {check.name} {'failed' if check.is_passing is False else 'has no result'}: "
        f"{check.problem}" + " (it failed before the reboot, too)" * check.is_excused(trial)
        for check in checks
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
    return "; ".join(f"check {check.name} fails: {check.problem}" for check in checks)


def _format_waiting(status: BootTrialStatus, checks: tuple[HealthCheckResult, ...]) -> str:
    if not checks:
        return "all health checks pass; waiting until they have passed for settle_s"
    listed = "; ".join(f"{check.name}: {check.problem}" for check in checks)
    if status.is_paused:
        left_s = max(status.limits.outage_s - status.paused_s, 0.0)
        return f"not counting the time, for up to {left_s:.0f} s more, because of {listed}"
    limits = status.limits
    if status.elapsed_s < limits.deadline_s:
        left_s = limits.deadline_s - status.elapsed_s
    else:
        left_s = max(limits.last_s - status.elapsed_s, limits.observed_s - status.observed_s, 0.0)
    return f"waiting up to {left_s:.0f} s for {listed}"


_RECORDED_S = 30.0
"""The clock's pauses are recorded in steps of this length, to spare the disk."""
_MIN_GAP_S = 60.0
"""A shorter time between two runs of the checks is no gap: an own check may take 30 s."""


@dataclass(frozen=True, slots=True)
class _CheckAge:
    """Since when a check has its result; ``broken_at`` is when a failing one began to pass."""

    is_passing: bool | None
    since: float
    broken_at: float | None = None

    def find_start(self, result: HealthCheckResult) -> float:
        """Return since when the check has this result."""
        if result.is_passing and self.broken_at is not None:
            return self.broken_at
        return self.since


class CheckHistory:
    """Turns results of checks into the status of a trial. It reads no clock itself.

    The state is lost with the process. A new process therefore observes each failure for its
    minimum time again before it rolls back.
    """

    def __init__(self, limits: TrialLimits) -> None:
        self._limits = limits
        self._trial: tuple[str, float] | None = None
        self._ages: dict[str, _CheckAge] = {}
        self._healthy_since: float | None = None
        self._api_since: float | None = None
        self._last: float | None = None
        self._observed_since = 0.0
        self._paused_s = 0.0
        self._is_paused = False

    def observe(
        self, results: Iterable[HealthCheckResult], boot_trial: BootTrial, now: float
    ) -> BootTrialStatus:
        """Return the status at ``now``, in seconds of the boot's monotonic clock."""
        trial = (boot_trial.boot_id, boot_trial.began_monotonic)
        if trial != self._trial:
            self._begin_trial(trial, boot_trial.paused_s)
        if self._is_paused and self._last is not None:
            self._paused_s = min(self._paused_s + now - self._last, self._limits.outage_s)
        if self._last is None or now - self._last > max(self._limits.observed_s, _MIN_GAP_S):
            # What lasted before the gap may have ended in it.
            self._ages, self._healthy_since, self._api_since = {}, None, None
            self._observed_since = now
        self._last = now
        checks = self.add_ages(results, now)
        is_external = any(check.is_external for check in checks)
        self._is_paused = is_external and self._paused_s < self._limits.outage_s
        is_api_reachable = any(check.name == API_SERVER and check.is_passing for check in checks)
        self._api_since = _keep_since(self._api_since, now, is_kept=is_api_reachable)
        is_healthy = not any(
            check.is_waiting or (check.is_passing is False and not check.is_excused(boot_trial))
            for check in checks
        )
        self._healthy_since = _keep_since(self._healthy_since, now, is_kept=is_healthy)
        return BootTrialStatus(
            elapsed_s=max(now - boot_trial.began_monotonic - self._paused_s, 0.0),
            limits=self._limits,
            checks=checks,
            is_api_reachable=is_api_reachable,
            api_for_s=0.0 if self._api_since is None else now - self._api_since,
            healthy_for_s=0.0 if self._healthy_since is None else now - self._healthy_since,
            observed_s=now - self._observed_since,
            paused_s=self._paused_s,
            is_paused=self._is_paused,
        )

    def add_ages(
        self, results: Iterable[HealthCheckResult], now: float
    ) -> tuple[HealthCheckResult, ...]:
        """Return the results with their ages. A check without a result loses its age."""
        checks = tuple(results)
        ages = {check.name: self._compute_age(check, now) for check in checks}
        self._ages = ages
        return tuple(
            replace(check, since_s=now - ages[check.name].find_start(check)) for check in checks
        )

    def _compute_age(self, result: HealthCheckResult, now: float) -> _CheckAge:
        age = self._ages.get(result.name)
        if age is None:
            return _CheckAge(result.is_passing, now)
        if result.is_passing is age.is_passing and age.broken_at is None:
            return age
        if age.is_passing is not False or result.is_passing is None:
            return _CheckAge(result.is_passing, now)
        # A crash loop passes for moments: only a pass of settle_s ends a failure.
        if result.is_passing is False:
            return replace(age, broken_at=None)
        broken_at = now if age.broken_at is None else age.broken_at
        if now - broken_at >= self._limits.settle_s:
            return _CheckAge(is_passing=True, since=broken_at)
        return replace(age, broken_at=broken_at)

    def _begin_trial(self, trial: tuple[str, float], paused_s: float) -> None:
        self._trial, self._last = trial, None
        self._paused_s, self._is_paused = paused_s, False


def record_trial_status(boot_trial: BootTrial, status: BootTrialStatus) -> BootTrial:
    """Return the trial with what a restart of the agent must not forget."""
    if status.is_api_reachable:
        boot_trial = replace(boot_trial, has_api_since_reboot=True)
    has_grown = status.paused_s - boot_trial.paused_s >= _RECORDED_S
    has_ended = not status.is_paused and status.paused_s != boot_trial.paused_s
    if has_grown or has_ended:
        boot_trial = replace(boot_trial, paused_s=status.paused_s)
    return boot_trial


def _keep_since(since: float | None, now: float, *, is_kept: bool) -> float | None:
    if not is_kept:
        return None
    return now if since is None else since
