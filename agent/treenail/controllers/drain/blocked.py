"""What is in the way of a drain, named on the Node: for people, and for the next controller.

A refusal that is over in half a minute is how evictions go while replacements start, so it is not
worth a word. What lasts longer is named before it has lasted a minute.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from treenail.api.decode import Fields, Json, load_json
from treenail.api.moment import moment
from treenail.clock import rfc3339
from treenail.errors import ConfigError
from treenail.kube.eviction import Blocker, Progress

NAMED_AFTER_S = 30.0
RENAMED_AFTER_S = 30.0
"""How often the names may change: a node whose pods go one by one is not written for each."""

_SAID_CHARS = 300

Key = tuple[str, str]
"""Of a blocker: the pod, and the reason."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """The blockers to be named, the oldest first, and how many there are beside them."""

    blockers: tuple[Blocker, ...] = ()
    more: int = 0
    due_in_s: float | None = None
    """When there may be more to name; None when nothing else is in the way."""

    @property
    def keys(self) -> frozenset[Key]:
        return frozenset((blocker.pod, str(blocker.reason)) for blocker in self.blockers)

    @property
    def text(self) -> str:
        """For the annotation; empty when there is nothing to name."""
        return json.dumps([_to_json(each) for each in self.blockers]) if self.blockers else ""

    @property
    def sentence(self) -> str:
        """For events and conditions."""
        named = "; ".join(blocker.sentence for blocker in self.blockers)
        return f"{named}; and {self.more} more" if self.more else named


def blocked(
    progress: Progress, named: str, now: float, *, after_s: float = NAMED_AFTER_S
) -> Blocked:
    """What to name now; ``named`` is the annotation, which knows for how long already.

    Only what has been in the way for ``after_s`` is named.
    """
    since = {key: at for key, at in _since(named).items() if at <= now}
    found = [
        replace(each, since=min(each.since, since.get((each.pod, str(each.reason)), each.since)))
        for each in progress.blockers
    ]
    due = [each for each in found if now - each.since >= after_s]
    waits = [after_s - (now - each.since) for each in found if each not in due]
    due.sort(key=lambda each: (each.since, each.pod))
    more = progress.blocked - len(progress.blockers) if due else 0
    return Blocked(tuple(due), more, min(waits, default=None))


def keys_of(named: str) -> frozenset[Key]:
    """What an annotation names."""
    return frozenset(_since(named))


def _since(named: str) -> Mapping[Key, float]:
    """Since when what an annotation names is in the way; empty for one that can't be read."""
    if not named:
        return {}
    try:
        entries: Sequence[Fields] = tuple(
            Fields.of({"blocked": load_json(named, where="blocked")}, "").objects("blocked")
        )
        return dict(_entries(entries))
    except ConfigError:
        return {}


def _entries(entries: Iterable[Fields]) -> Iterable[tuple[Key, float]]:
    for fields in entries:
        since = moment(fields.text("since"))
        if since is not None:
            yield (fields.text("pod"), fields.text("reason")), since


def _to_json(blocker: Blocker) -> Json:
    found: Json = {
        "pod": blocker.pod,
        "reason": str(blocker.reason),
        "message": blocker.said[:_SAID_CHARS],
        "since": rfc3339(blocker.since),
    }
    if blocker.budgets:
        found["budgets"] = [
            {"name": budget.name, "disruptionsAllowed": budget.disruptions_allowed}
            for budget in blocker.budgets
        ]
    return found
