"""What is in the way of a drain, named on the Node: for people, and for the next controller.

A refusal that is over in half a minute is how evictions go while replacements start, so it is not
worth a word. What lasts longer is named before it has lasted a minute.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from treenail.api.decode import Fields, Json, load_json
from treenail.api.moment import parse_rfc3339
from treenail.clock import format_rfc3339
from treenail.errors import ConfigError
from treenail.kube.eviction import Blocker, DrainProgress

REPORT_AFTER_S = 30.0
REPORT_INTERVAL_S = 30.0
"""How often the names may change: a node whose pods go one by one is not written for each."""

_MESSAGE_CHARS = 300

BlockerKey = tuple[str, str]
"""Of a blocker: the pod, and the reason."""


@dataclass(frozen=True, slots=True)
class ReportedBlockers:
    """The blockers to be named, the oldest first, and how many there are beside them."""

    blockers: tuple[Blocker, ...] = ()
    unnamed_count: int = 0
    next_report_in_s: float | None = None
    """When there may be more to name; None when nothing else is in the way."""

    @property
    def keys(self) -> frozenset[BlockerKey]:
        return frozenset((blocker.pod, str(blocker.reason)) for blocker in self.blockers)

    @property
    def annotation(self) -> str:
        """For the annotation; empty when there is nothing to name."""
        return (
            json.dumps([_format_blocker(each) for each in self.blockers]) if self.blockers else ""
        )

    @property
    def message(self) -> str:
        """For events and conditions."""
        named = "; ".join(blocker.summary for blocker in self.blockers)
        return f"{named}; and {self.unnamed_count} more" if self.unnamed_count else named


def find_reportable(
    progress: DrainProgress, annotation: str, now: float, *, report_after_s: float = REPORT_AFTER_S
) -> ReportedBlockers:
    """What to name now; ``annotation`` is the annotation, which knows for how long already.

    Only what has been in the way for ``report_after_s`` is named.
    """
    since = {key: at for key, at in _parse_since(annotation).items() if at <= now}
    found = [
        replace(each, since=min(each.since, since.get((each.pod, str(each.reason)), each.since)))
        for each in progress.blockers
    ]
    due = [each for each in found if now - each.since >= report_after_s]
    waits = [report_after_s - (now - each.since) for each in found if each not in due]
    due.sort(key=lambda each: (each.since, each.pod))
    more = progress.blocked_count - len(progress.blockers) if due else 0
    return ReportedBlockers(tuple(due), more, min(waits, default=None))


def parse_keys(annotation: str) -> frozenset[BlockerKey]:
    """What an annotation names."""
    return frozenset(_parse_since(annotation))


def _parse_since(annotation: str) -> Mapping[BlockerKey, float]:
    """Since when what an annotation names is in the way; empty for one that can't be read."""
    if not annotation:
        return {}
    try:
        entries: Sequence[Fields] = tuple(
            Fields.from_json({"blocked": load_json(annotation, where="blocked")}, "").iter_objects(
                "blocked"
            )
        )
        return dict(_parse_entries(entries))
    except ConfigError:
        return {}


def _parse_entries(entries: Iterable[Fields]) -> Iterable[tuple[BlockerKey, float]]:
    for fields in entries:
        since = parse_rfc3339(fields.get_text("since"))
        if since is not None:
            yield (fields.get_text("pod"), fields.get_text("reason")), since


def _format_blocker(blocker: Blocker) -> Json:
    found: Json = {
        "pod": blocker.pod,
        "reason": str(blocker.reason),
        "message": blocker.message[:_MESSAGE_CHARS],
        "since": format_rfc3339(blocker.since),
    }
    if blocker.budgets:
        found["budgets"] = [
            {"name": budget.name, "disruptionsAllowed": budget.disruptions_allowed}
            for budget in blocker.budgets
        ]
    return found
