"""The boot trial: what the ledger records of a target until it is healthy, and its time limits."""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from treenail.codec import key


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

    has_api_before_reboot: bool = field(default=False, metadata=key("apiBeforeReboot"))
    """The API server answered right before the reboot."""
    has_api_since_reboot: bool = field(default=False, metadata=key("apiSinceReboot"))
    """The API server has answered since then."""
    boot_id: str = field(default="", metadata=key("bootID"))
    """The boot on trial; empty before the first."""
    began_monotonic: float = field(default=0.0, metadata=key("beganMonotonic"))
    """The start of the trial in this boot, in seconds of that boot's monotonic clock."""
    boot_count: int = field(default=0, metadata=key("bootCount"))
    """Boots into the target so far."""
    agent_starts: int = field(default=0, metadata=key("agentStarts"))
    """Version 0.1.0 reads it. The crash record counts the starts."""
    rollback_reboots: int = field(default=0, metadata=key("rollbackReboots"))
    """Reboots that were requested to roll back."""
    is_healthy: bool = field(default=False, metadata=key("healthy"))
    """The verdict. No rollback is possible after it: the agent removes the undo log next."""
    mode: HealthCheckMode = field(
        default=HealthCheckMode.ENFORCE,
        metadata=key("healthMode", fallback=HealthCheckMode.ENFORCE),
    )
    """The mode right before the reboot, for a node that cannot read its Node."""
    failed_before: tuple[str, ...] = field(default=(), metadata=key("failedBefore"))
    """The checks that failed right before the reboot. They cannot fail the target."""
    passed_before: tuple[str, ...] = field(default=(), metadata=key("passedBefore"))
    """The checks that passed then."""
    paused_s: float = field(default=0.0, metadata=key("pausedSeconds"))
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
