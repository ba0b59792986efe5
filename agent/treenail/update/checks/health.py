"""Whether a node that booted into its target may stay there: what the checks found to a verdict.

A node is healthy once every check passes and has done so for a while. One whose checks do not all
pass by the deadline goes back. Three rules keep good nodes from being sent back:

* What could not be asked, as no such thing is installed, counts as passed.
* That the API server is away counts only if it answered right before the reboot and has not
  answered since, and sends a node back from the same target only once.
* Passing late is passing: until the deadline nothing is decided.
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
"""What the names of the owner's own checks begin with."""


@dataclass(frozen=True, slots=True)
class HealthCheckResult:
    """What one check found last; ``is_passing`` is None when there was nothing to ask."""

    name: str
    is_passing: bool | None
    problem: str = ""
    """What is wrong, for people."""
    since_s: float = 0.0
    """For how long it has been so."""


@dataclass(frozen=True, slots=True)
class BootTrialStatus:
    """One look at a boot on trial."""

    elapsed_s: float
    """Since the trial began in this boot."""
    deadline_s: float
    settle_s: float
    """How long all has to be well without a break."""
    checks: tuple[HealthCheckResult, ...] = ()
    is_api_reachable: bool = False
    """The API server answers now."""
    healthy_for_s: float = 0.0
    """For how long all checks have passed; 0 while one does not."""


@dataclass(frozen=True, slots=True)
class HealthyVerdict:
    """The target may stay."""

    inconclusive: tuple[str, ...] = ()
    """The checks that could not be made and were not waited for any longer."""


@dataclass(frozen=True, slots=True)
class PendingVerdict:
    """The trial goes on."""

    reason: str


@dataclass(frozen=True, slots=True)
class UnhealthyVerdict:
    """The target has to go."""

    check: HealthCheckResult


BootVerdict = HealthyVerdict | PendingVerdict | UnhealthyVerdict


def decide_verdict(
    status: BootTrialStatus, boot_trial: BootTrial, *, is_api_blamed: bool
) -> BootVerdict:
    """What the trial has come to.

    ``is_api_blamed``: the node was sent back from this target for the API server's sake already.
    """
    failing = [each for each in status.checks if each.is_passing is False]
    if not failing and (status.healthy_for_s >= status.settle_s or _is_past_deadline(status)):
        return HealthyVerdict()
    if not _is_past_deadline(status):
        return PendingVerdict(_format_waiting(status, failing))
    blames_api = (
        boot_trial.has_api_before_reboot
        and not boot_trial.has_api_since_reboot
        and not is_api_blamed
    )
    counted = [each for each in failing if each.name != API_SERVER or blames_api]
    if counted:
        return UnhealthyVerdict(counted[0])
    return HealthyVerdict(inconclusive=tuple(each.name for each in failing))


def format_unhealthy(target: Target, failed: HealthCheckResult) -> str:
    """The sentence that says why the target is set aside."""
    lasted = f" for {failed.since_s:.0f} s" if failed.since_s >= 1 else ""
    return f"{target} was booted and is not healthy: {failed.name} failed{lasted}: {failed.problem}"


def format_not_booted(target: Target, booted: str) -> str:
    """The sentence that says that something else was booted than what was deployed."""
    return (
        f"{target} was deployed, but {booted or 'another deployment'} was booted: it failed to "
        "boot, or somebody chose the earlier one"
    )


def _is_past_deadline(trial: BootTrialStatus) -> bool:
    return trial.elapsed_s >= trial.deadline_s


def _format_waiting(trial: BootTrialStatus, failing: list[HealthCheckResult]) -> str:
    left_s = max(trial.deadline_s - trial.elapsed_s, 0.0)
    if not failing:
        return "all is well; seeing whether it stays so"
    listed = "; ".join(f"{each.name}: {each.problem}" for each in failing)
    return f"waiting {left_s:.0f} s more for {listed}"
