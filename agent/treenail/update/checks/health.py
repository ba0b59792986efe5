"""Whether a node that booted into its target may stay there: what the checks found to a verdict.

A node is healthy once every check passes and has done so for a while. One whose checks do not all
pass by the deadline goes back. Three rules keep good nodes from being sent back:

* What could not be asked, as no such thing is installed, counts as passed.
* That the API server is away counts only if it answered right before the reboot and has not
  answered since, and sends a node back from the same target only once.
* Passing late is passing: until the deadline nothing is decided.
"""

from dataclasses import dataclass

from treenail.update.state.boot_trial import Probation
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
OWN = "health.d/"
"""What the names of the owner's own checks begin with."""


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found last; ``well`` is None when there was nothing to ask."""

    name: str
    well: bool | None
    text: str = ""
    """What is wrong, for people."""
    since_s: float = 0.0
    """For how long it has been so."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One look at a boot on trial."""

    elapsed_s: float
    """Since the trial began in this boot."""
    deadline_s: float
    settle_s: float
    """How long all has to be well without a break."""
    checks: tuple[Check, ...] = ()
    api_answers: bool = False
    """The API server answers now."""
    well_for_s: float = 0.0
    """For how long all checks have passed; 0 while one does not."""


@dataclass(frozen=True, slots=True)
class Healthy:
    """The target may stay."""

    untold: tuple[str, ...] = ()
    """The checks that could not be made and were not waited for any longer."""


@dataclass(frozen=True, slots=True)
class NotYet:
    """The trial goes on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The target has to go."""

    check: Check


Verdict = Healthy | NotYet | Failed


def verdict(trial: Trial, probation: Probation, *, blamed_before: bool) -> Verdict:
    """What the trial has come to.

    ``blamed_before``: the node was sent back from this target for the API server's sake already.
    """
    failing = [each for each in trial.checks if each.well is False]
    if not failing and (trial.well_for_s >= trial.settle_s or _over(trial)):
        return Healthy()
    if not _over(trial):
        return NotYet(_waiting(trial, failing))
    blames_api = probation.api_before and not probation.api_seen and not blamed_before
    counted = [each for each in failing if each.name != API_SERVER or blames_api]
    if counted:
        return Failed(counted[0])
    return Healthy(untold=tuple(each.name for each in failing))


def unhealthy(target: Target, failed: Check) -> str:
    """The sentence that says why the target is set aside."""
    lasted = f" for {failed.since_s:.0f} s" if failed.since_s >= 1 else ""
    return f"{target} was booted and is not healthy: {failed.name} failed{lasted}: {failed.text}"


def did_not_boot(target: Target, booted: str) -> str:
    """The sentence that says that something else was booted than what was deployed."""
    return (
        f"{target} was deployed, but {booted or 'another deployment'} was booted: it failed to "
        "boot, or somebody chose the earlier one"
    )


def _over(trial: Trial) -> bool:
    return trial.elapsed_s >= trial.deadline_s


def _waiting(trial: Trial, failing: list[Check]) -> str:
    left_s = max(trial.deadline_s - trial.elapsed_s, 0.0)
    if not failing:
        return "all is well; seeing whether it stays so"
    listed = "; ".join(f"{each.name}: {each.text}" for each in failing)
    return f"waiting {left_s:.0f} s more for {listed}"
