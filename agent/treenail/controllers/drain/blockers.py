"""Blockers of a drain, reported in an annotation of the Node, in Events and in conditions.

Evictions are often refused for some seconds while replacement pods start, so only blockers that
last longer are reported. The annotation also tells the next controller process since when.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from treenail import clocks, errors
from treenail.api import decode
from treenail.kube import eviction

REPORT_AFTER_S = 30.0
REPORT_INTERVAL_S = 30.0
"""Minimum interval between writes, so that pods that leave one by one do not cost one each."""

_MESSAGE_CHARS = 300

BlockerKey = tuple[str, str]
"""Pod and reason of a blocker."""


@dataclass(frozen=True, slots=True)
class ReportedBlockers:
    """The blockers to report, the oldest first, and how many more there are."""

    blockers: tuple[eviction.Blocker, ...] = ()
    unnamed_count: int = 0
    next_report_in_s: float | None = None
    """Delay until another blocker may become reportable; None when there is no other."""

    @property
    def keys(self) -> frozenset[BlockerKey]:
        return frozenset((blocker.pod, str(blocker.reason)) for blocker in self.blockers)

    @property
    def annotation(self) -> str:
        """JSON for the annotation; empty without blockers."""
        return (
            json.dumps([_format_blocker(blocker) for blocker in self.blockers])
            if self.blockers
            else ""
        )

    @property
    def message(self) -> str:
        """Message for Events and conditions."""
        summaries = "; ".join(blocker.summary for blocker in self.blockers)
        return f"{summaries}; and {self.unnamed_count} more" if self.unnamed_count else summaries


def find_reportable(
    progress: eviction.DrainProgress,
    annotation: str,
    now: float,
    *,
    report_after_s: float = REPORT_AFTER_S,
) -> ReportedBlockers:
    """Find the blockers that have lasted for ``report_after_s``.

    ``annotation`` is the present annotation, which holds the times from an earlier process.
    """
    known_since = {key: at for key, at in _parse_since(annotation).items() if at <= now}
    blockers = [
        replace(
            blocker,
            since=min(
                blocker.since, known_since.get((blocker.pod, str(blocker.reason)), blocker.since)
            ),
        )
        for blocker in progress.blockers
    ]
    due = [blocker for blocker in blockers if now - blocker.since >= report_after_s]
    waits = [report_after_s - (now - blocker.since) for blocker in blockers if blocker not in due]
    due.sort(key=lambda blocker: (blocker.since, blocker.pod))
    more = progress.blocked_count - len(progress.blockers) if due else 0
    return ReportedBlockers(tuple(due), more, min(waits, default=None))


def parse_keys(annotation: str) -> frozenset[BlockerKey]:
    """Parse pod and reason of each blocker in the annotation."""
    return frozenset(_parse_since(annotation))


def _parse_since(annotation: str) -> Mapping[BlockerKey, float]:
    """Parse since when each blocker lasts; empty for an invalid annotation."""
    if not annotation:
        return {}
    try:
        entries: Sequence[decode.Fields] = tuple(
            decode.Fields.from_json(
                {"blocked": decode.load_json(annotation, where="blocked")}, ""
            ).iter_objects("blocked")
        )
        return dict(_parse_entries(entries))
    except errors.ConfigError:
        return {}


def _parse_entries(entries: Iterable[decode.Fields]) -> Iterable[tuple[BlockerKey, float]]:
    for fields in entries:
        since = clocks.parse_rfc3339(fields.get_text("since"))
        if since is not None:
            yield (fields.get_text("pod"), fields.get_text("reason")), since


def _format_blocker(blocker: eviction.Blocker) -> decode.Json:
    document: decode.Json = {
        "pod": blocker.pod,
        "reason": str(blocker.reason),
        "message": blocker.message[:_MESSAGE_CHARS],
        "since": clocks.format_rfc3339(blocker.since),
    }
    if blocker.budgets:
        document["budgets"] = [
            {"name": budget.name, "disruptionsAllowed": budget.disruptions_allowed}
            for budget in blocker.budgets
        ]
    return document
