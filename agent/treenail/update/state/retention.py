"""The previous deployment, kept from being dropped by anybody until it is not needed any more."""

from dataclasses import dataclass, replace

from treenail.update.state import json_types

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Retained:
    """A deployment that the agent has pinned, or is about to."""

    id: str
    since: float | None = None
    """When what took its place was found healthy, seconds since the epoch; None on trial."""

    def closed(self, *, healthy: bool, now: float) -> "Retained":
        """As the update ends that it was pinned for; without success it is needed no more."""
        if self.since is not None:
            return self
        return replace(self, since=now if healthy else 0.0)

    def over(self, *, now: float, keep_s: float) -> bool:
        """Whether it was kept for long enough."""
        return self.since is not None and now >= self.since + keep_s


def to_json(retained: Retained | None) -> Json | None:
    """As the ledger keeps it."""
    return None if retained is None else {"id": retained.id, "since": retained.since}


def from_json(found: object) -> Retained | None:
    """What `to_json` wrote; the ledger of a version without it keeps none."""
    if found is None:
        return None
    document = json_types.mapping(found)
    since = document["since"]
    return Retained(
        json_types.text(document["id"]), None if since is None else json_types.number(since)
    )
