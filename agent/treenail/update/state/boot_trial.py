"""What is remembered of a target from the reboot into it until it is found healthy."""

from dataclasses import dataclass, replace

Json = dict[str, object]

BOOTS_ALLOWED = 3
"""Boots into a target that end before a verdict: a power cut may end one."""
AGENT_STARTS_ALLOWED = 5
"""Starts of the agent in one boot on trial, before it is taken to crash at each."""


@dataclass(frozen=True, slots=True)
class BootTrial:
    """How the trial of a target gets on."""

    has_api_before_reboot: bool = False
    """The API server answered right before the reboot."""
    has_api_since_reboot: bool = False
    """The API server answered since then."""
    boot_id: str = ""
    """The boot on trial; empty before the first."""
    began_monotonic: float = 0.0
    """When the trial of this boot began, on the monotonic clock of that boot."""
    boot_count: int = 0
    """Boots into the target so far."""
    agent_starts: int = 0
    """Starts of the agent in the boot on trial."""
    rollback_reboots: int = 0
    """Reboots that were to lead back."""
    is_healthy: bool = False
    """The verdict: from here on there is no way back, for what was before is being cleaned up."""

    def count_start(self, boot_id: str, now: float) -> "BootTrial":
        """After another start of the agent; ``now`` is on the monotonic clock."""
        if boot_id == self.boot_id:
            return replace(self, agent_starts=self.agent_starts + 1)
        boots = self.boot_count + 1
        return replace(
            self,
            has_api_since_reboot=False,
            boot_id=boot_id,
            began_monotonic=now,
            boot_count=boots,
            agent_starts=1,
        )

    @property
    def failure(self) -> str:
        """Why the trial is lost without a verdict, as a sentence; empty while it is not."""
        if self.is_healthy:
            return ""
        if self.boot_count > BOOTS_ALLOWED:
            return f"it was booted {self.boot_count} times, and no boot lasted until a verdict"
        if self.agent_starts > AGENT_STARTS_ALLOWED:
            return f"the agent was started {self.agent_starts} times in one boot, without a verdict"
        return ""


def to_json(boot_trial: BootTrial) -> Json:
    """As the ledger keeps it."""
    return {
        "apiBefore": boot_trial.has_api_before_reboot,
        "apiSeen": boot_trial.has_api_since_reboot,
        "bootID": boot_trial.boot_id,
        "since": boot_trial.began_monotonic,
        "boots": boot_trial.boot_count,
        "starts": boot_trial.agent_starts,
        "returns": boot_trial.rollback_reboots,
        "healthy": boot_trial.is_healthy,
    }


def from_json(found: object) -> BootTrial:
    """What `to_json` wrote; the ledger of a version without it has none."""
    match found:
        case {
            "apiBefore": bool(api_before),
            "apiSeen": bool(api_seen),
            "bootID": str(boot_id),
            "since": int() | float() as since,
            "boots": int(boots),
            "starts": int(starts),
            "returns": int(returns),
            "healthy": bool(healthy),
        }:
            return BootTrial(
                api_before, api_seen, boot_id, float(since), boots, starts, returns, healthy
            )
        case None:
            return BootTrial()
        case _:
            raise ValueError(f"expected a probation, found {type(found).__name__}")
