"""Why a pool waits, as a word for metrics, tables and pages."""

import re

# The first word that the message of a waiting pool contains; see gates and `decide`.
_WAIT_REASONS = (
    ("maxUnavailable", re.compile("maxUnavailable")),
    ("window", re.compile("maintenance window")),
    ("soak", re.compile("soaking")),
    ("lock", re.compile(r"\block\b|FleetLock")),
    ("alert", re.compile(r"\balerts?\b|Prometheus")),
    ("prestage", re.compile(r"pre-?stag")),
    ("build", re.compile(r"\bbuil[dt]")),
    ("stale", re.compile("the watch of|are not listed yet")),
    ("wave", re.compile(r"\bwave\b")),
    ("nodes", re.compile(r"^waiting for |^waiting: (?:arbiter|master) ")),
)
_UPDATING = "All nodes are updating to "
WAIT_REASONS = (*(name for name, _ in _WAIT_REASONS), "other")


def classify_wait(message: str) -> str:
    """Return one of `WAIT_REASONS` for the message of a pool that waits."""
    if message.startswith(_UPDATING):
        # The names of the config and the image may contain any word.
        message = message.partition("; ")[2]
    for name, pattern in _WAIT_REASONS:
        if pattern.search(message):
            return name
    return "other"
