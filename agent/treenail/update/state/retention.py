"""The previous deployment, kept from being dropped by anybody until it is not needed any more."""

from dataclasses import dataclass, replace

from treenail.update.state import json_types

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class RetainedDeployment:
    """A deployment that the agent has pinned, or is about to."""

    id: str
    healthy_since: float | None = None
    """When what took its place was found healthy, seconds since the epoch; None on trial."""

    def end_trial(self, *, is_healthy: bool, now: float) -> "RetainedDeployment":
        """As the update ends that it was pinned for; without success it is needed no more."""
        if self.healthy_since is not None:
            return self
        return replace(self, healthy_since=now if is_healthy else 0.0)

    def is_expired(self, *, now: float, retention_s: float) -> bool:
        """Whether it was kept for long enough."""
        return self.healthy_since is not None and now >= self.healthy_since + retention_s


def to_json(retained: RetainedDeployment | None) -> Json | None:
    """As the ledger keeps it."""
    return None if retained is None else {"id": retained.id, "since": retained.healthy_since}


def from_json(found: object) -> RetainedDeployment | None:
    """What `to_json` wrote; the ledger of a version without it keeps none."""
    if found is None:
        return None
    document = json_types.expect_object(found)
    since = document["since"]
    return RetainedDeployment(
        json_types.expect_string(document["id"]),
        None if since is None else json_types.expect_number(since),
    )
