"""The boot trial: what the ledger records of a target from its first boot until it is healthy."""

from dataclasses import dataclass, field, replace

from treenail.codec import key

BOOTS_ALLOWED = 3
"""Boots into a target that may end before a verdict: a power cut may end one."""
AGENT_STARTS_ALLOWED = 5
"""Starts of the agent in one boot, after which the agent counts as crashing at each start."""


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
    """Starts of the agent in the boot on trial."""
    rollback_reboots: int = field(default=0, metadata=key("rollbackReboots"))
    """Reboots that were requested to roll back."""
    is_healthy: bool = field(default=False, metadata=key("healthy"))
    """The verdict. No rollback is possible after it: the agent removes the undo log next."""

    def count_start(self, boot_id: str, now: float) -> "BootTrial":
        """Return the trial after one more start of the agent; ``now`` is monotonic."""
        if boot_id == self.boot_id:
            return replace(self, agent_starts=self.agent_starts + 1)
        return replace(
            self,
            has_api_since_reboot=False,
            boot_id=boot_id,
            began_monotonic=now,
            boot_count=self.boot_count + 1,
            agent_starts=1,
        )

    @property
    def failure(self) -> str:
        """The reason why the trial failed without a verdict, as a sentence; empty if it did not."""
        if self.is_healthy:
            return ""
        if self.boot_count > BOOTS_ALLOWED:
            return f"it was booted {self.boot_count} times, and no boot lasted until a verdict"
        if self.agent_starts > AGENT_STARTS_ALLOWED:
            return f"the agent was started {self.agent_starts} times in one boot, without a verdict"
        return ""
