"""What is remembered of a target from the reboot into it until it is found healthy."""

from dataclasses import dataclass, replace

Json = dict[str, object]

BOOTS_ALLOWED = 3
"""Boots into a target that end before a verdict: a power cut may end one."""
STARTS_ALLOWED = 5
"""Starts of the agent in one boot on trial, before it is taken to crash at each."""


@dataclass(frozen=True, slots=True)
class Probation:
    """How the trial of a target gets on."""

    api_before: bool = False
    """The API server answered right before the reboot."""
    api_seen: bool = False
    """The API server answered since then."""
    boot_id: str = ""
    """The boot on trial; empty before the first."""
    since: float = 0.0
    """When the trial of this boot began, on the monotonic clock of that boot."""
    boots: int = 0
    """Boots into the target so far."""
    starts: int = 0
    """Starts of the agent in the boot on trial."""
    returns: int = 0
    """Reboots that were to lead back."""
    healthy: bool = False
    """The verdict: from here on there is no way back, for what was before is being cleaned up."""

    def started(self, boot_id: str, now: float) -> "Probation":
        """After another start of the agent; ``now`` is on the monotonic clock."""
        if boot_id == self.boot_id:
            return replace(self, starts=self.starts + 1)
        boots = self.boots + 1
        return replace(self, api_seen=False, boot_id=boot_id, since=now, boots=boots, starts=1)

    @property
    def crashes(self) -> str:
        """Why the trial is lost without a verdict, as a sentence; empty while it is not."""
        if self.healthy:
            return ""
        if self.boots > BOOTS_ALLOWED:
            return f"it was booted {self.boots} times, and no boot lasted until a verdict"
        if self.starts > STARTS_ALLOWED:
            return f"the agent was started {self.starts} times in one boot, without a verdict"
        return ""


def to_json(probation: Probation) -> Json:
    """As the ledger keeps it."""
    return {
        "apiBefore": probation.api_before,
        "apiSeen": probation.api_seen,
        "bootID": probation.boot_id,
        "since": probation.since,
        "boots": probation.boots,
        "starts": probation.starts,
        "returns": probation.returns,
        "healthy": probation.healthy,
    }


def from_json(found: object) -> Probation:
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
            return Probation(
                api_before, api_seen, boot_id, float(since), boots, starts, returns, healthy
            )
        case None:
            return Probation()
        case _:
            raise ValueError(f"expected a probation, found {type(found).__name__}")
