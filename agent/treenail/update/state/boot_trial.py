"""The boot trial: what the ledger records of a target until it is healthy, and its time limits."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from treenail.encoding import codec


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """The time limits of a boot trial, in seconds."""

    deadline_s: float = 600.0
    """The time on the trial's clock before which no check rolls back."""
    settle_s: float = 10.0
    """How long all checks must pass without a break."""
    failing_s: float = 120.0
    """How long a check must fail without a break before it can cause a rollback."""
    ready_s: float = 300.0
    """How long the API server must answer before NodeReady can cause a rollback."""
    outage_s: float = 10_800.0
    """The longest time for which the clock of the trial stands still."""

    @property
    def last_s(self) -> float:
        """The time on the trial's clock at which the trial ends in any case.

        Not before the checks have run for `observed_s`.
        """
        return 2 * self.deadline_s + self.failing_s + self.ready_s

    @property
    def observed_s(self) -> float:
        """How long the checks must run so that each failure can last long enough to count."""
        return max(self.failing_s, self.ready_s)


class HealthCheckMode(StrEnum):
    """The effect of a failed health check."""

    ENFORCE = "enforce"
    """A rollback."""
    REPORT = "report"
    """A Warning Event and a log message; the target stays."""
    OFF = "off"
    """Nothing: no check runs."""


@dataclass(frozen=True, slots=True)
class BootTrial:
    """The state of a target's boot trial."""

    has_api_before_reboot: Annotated[bool, codec.Key("apiBeforeReboot")] = False
    """The API server answered right before the reboot."""
    has_api_since_reboot: Annotated[bool, codec.Key("apiSinceReboot")] = False
    """The API server has answered since then."""
    boot_id: Annotated[str, codec.Key("bootID")] = ""
    """The boot on trial; empty before the first."""
    began_monotonic: Annotated[float, codec.Key("beganMonotonic")] = 0.0
    """The start of the trial in this boot, in seconds of that boot's monotonic clock."""
    boot_count: Annotated[int, codec.Key("bootCount")] = 0
    """Boots into the target so far."""
    agent_starts: Annotated[int, codec.Key("agentStarts")] = 0
    """Version 0.1.0 reads it. The crash record counts the starts."""
    rollback_reboots: Annotated[int, codec.Key("rollbackReboots")] = 0
    """Reboots that were requested to roll back."""
    is_healthy: Annotated[bool, codec.Key("healthy")] = False
    """The verdict. No rollback is possible after it: the agent removes the undo log next."""
    mode: Annotated[HealthCheckMode, codec.Key("healthMode", fallback=HealthCheckMode.ENFORCE)] = (
        HealthCheckMode.ENFORCE
    )
    """The mode right before the reboot, for a node that cannot read its Node."""
    failed_before: Annotated[tuple[str, ...], codec.Key("failedBefore")] = ()
    """The checks that failed right before the reboot. They cannot fail the target."""
    passed_before: Annotated[tuple[str, ...], codec.Key("passedBefore")] = ()
    """The checks that passed then."""
    paused_s: Annotated[float, codec.Key("pausedSeconds")] = 0.0
    """Seconds of this boot that do not count, because the API server did not answer."""

    def begin_boot(self, boot_id: str, now: float) -> "BootTrial":
        """Return the trial at the beginning of another boot; ``now`` is monotonic."""
        return replace(
            self,
            has_api_since_reboot=False,
            boot_id=boot_id,
            began_monotonic=now,
            boot_count=self.boot_count + 1,
            agent_starts=1,
            paused_s=0.0,
        )
