"""The clock of a boot trial: how long each check has had its result, and what time counts."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from treenail.update.checks.health import API_SERVER, BootTrialStatus, HealthCheckResult
from treenail.update.checks.trial_limits import TrialLimits
from treenail.update.state.boot_trial import BootTrial

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


class TrialClock:
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
        is_external = any(each.is_external for each in checks)
        self._is_paused = is_external and self._paused_s < self._limits.outage_s
        is_api_reachable = any(each.name == API_SERVER and each.is_passing for each in checks)
        self._api_since = _keep_since(self._api_since, now, is_kept=is_api_reachable)
        is_healthy = not any(
            each.is_waiting or (each.is_passing is False and not each.is_excused(boot_trial))
            for each in checks
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
        found = tuple(results)
        ages = {each.name: self._compute_age(each, now) for each in found}
        self._ages = ages
        return tuple(
            replace(each, since_s=now - ages[each.name].find_start(each)) for each in found
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
