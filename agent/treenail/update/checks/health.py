"""The verdict on a node that booted its target: commit it, wait, or roll back.

A node is healthy once all health checks have passed for ``settle_s`` without a break. It rolls back
if a check still fails at the deadline. Three rules prevent the rollback of good nodes:

* A check that does not apply, because its subject is not installed, counts as passed.
* An unreachable API server counts only if it answered right before the reboot and has not answered
  since. It rolls a node back from the same target only once.
* Nothing is decided before the deadline: a check may pass late.
"""

from dataclasses import dataclass

from treenail.update.state.boot_trial import BootTrial
from treenail.update.state.record import Target

API_SERVER = "ApiServer"
NODE_READY = "NodeReady"
KUBELET = "Kubelet"
CONTAINER_RUNTIME = "ContainerRuntime"
GREENBOOT = "Greenboot"
LEDGER = "Ledger"
CONFIGURATION = "Configuration"
AGENT = "Agent"
BOOT = "Boot"
OWN_CHECK_PREFIX = "health.d/"
"""Prefix of the names of the administrator's own checks."""


@dataclass(frozen=True, slots=True)
class HealthCheckResult:
    """The last result of a health check; ``is_passing`` is None if the check does not apply."""

    name: str
    is_passing: bool | None
    problem: str = ""
    """The cause of the failure, for users."""
    since_s: float = 0.0
    """Seconds since the result changed."""


@dataclass(frozen=True, slots=True)
class BootTrialStatus:
    """One observation of a boot trial."""

    elapsed_s: float
    """Seconds since the trial began in this boot."""
    deadline_s: float
    settle_s: float
    """Seconds for which all checks must pass without a break."""
    checks: tuple[HealthCheckResult, ...] = ()
    is_api_reachable: bool = False
    healthy_for_s: float = 0.0
    """Seconds for which all checks have passed; 0 while one fails."""


@dataclass(frozen=True, slots=True)
class HealthyVerdict:
    """The node is healthy: commit the target."""

    inconclusive: tuple[str, ...] = ()
    """The failing checks that do not count."""


@dataclass(frozen=True, slots=True)
class PendingVerdict:
    """The trial continues."""

    reason: str


@dataclass(frozen=True, slots=True)
class UnhealthyVerdict:
    """The node is unhealthy: roll back."""

    check: HealthCheckResult


BootVerdict = HealthyVerdict | PendingVerdict | UnhealthyVerdict


def decide_verdict(
    status: BootTrialStatus, boot_trial: BootTrial, *, is_api_blamed: bool
) -> BootVerdict:
    """Return the verdict so far.

    ``is_api_blamed``: this target was already rolled back because of the API server.
    """
    failing = [each for each in status.checks if each.is_passing is False]
    is_past_deadline = status.elapsed_s >= status.deadline_s
    if not failing and (status.healthy_for_s >= status.settle_s or is_past_deadline):
        return HealthyVerdict()
    if not is_past_deadline:
        return PendingVerdict(_format_waiting(status, failing))
    is_api_lost = boot_trial.has_api_before_reboot and not boot_trial.has_api_since_reboot
    counts_api = is_api_lost and not is_api_blamed
    counted = [each for each in failing if each.name != API_SERVER or counts_api]
    if counted:
        return UnhealthyVerdict(counted[0])
    return HealthyVerdict(inconclusive=tuple(each.name for each in failing))


def format_unhealthy(target: Target, failed: HealthCheckResult) -> str:
    """Return the reason for the quarantine of a target that failed a health check."""
    duration = f" for {failed.since_s:.0f} s" if failed.since_s >= 1 else ""
    return f"{target} is not healthy: check {failed.name} failed{duration}: {failed.problem}"


def format_not_booted(target: Target, booted_digest: str) -> str:
    """Return the reason for the quarantine of a target that did not boot."""
    return (
        f"{target} did not boot: {booted_digest or 'another deployment'} was booted, by the boot "
        "loader after a failure or by a user's choice"
    )


def _format_waiting(status: BootTrialStatus, failing: list[HealthCheckResult]) -> str:
    if not failing:
        return "all health checks pass; waiting until they have passed for settle_s"
    remaining_s = max(status.deadline_s - status.elapsed_s, 0.0)
    listed = "; ".join(f"{each.name}: {each.problem}" for each in failing)
    return f"waiting up to {remaining_s:.0f} s for {listed}"
