"""When a target whose step failed is tried again."""

from itertools import takewhile

from treenail.clock import format_rfc3339
from treenail.update.state.record import LedgerRecord, Target, UpdateOutcome

FIRST_DELAY_S = 120.0
FIRST_DRAIN_DELAY_S = 600.0
"""The first delay if each try drains the node."""
LAST_DELAY_S = 6 * 3600.0
_ROUNDING_S = 1.0
"""The time of the next try is a whole second."""


def compute_retry_delay(record: LedgerRecord, target: Target, *, needs_drain: bool) -> float:
    """Return the seconds until the next try: each failure of the target in a row doubles them."""
    failures = takewhile(
        lambda past: past.target == target and past.outcome is UpdateOutcome.FAILED, record.history
    )
    doublings = min(sum(1 for _ in failures), 16)
    first_s = FIRST_DRAIN_DELAY_S if needs_drain else FIRST_DELAY_S
    return min(first_s * 2.0**doublings, LAST_DELAY_S)


def is_retry_due(record: LedgerRecord, now: float) -> bool:
    """Return whether the quarantined target failed in a step whose delay is over.

    A time that no delay explains comes from a clock that has been set back since.
    """
    quarantined = record.quarantined
    if quarantined is None or quarantined.retry_at <= 0:
        return False
    left_s = quarantined.retry_at - now
    return left_s <= 0 or left_s > LAST_DELAY_S + _ROUNDING_S


def format_retry_remedy(remedy: str, retry_at: float) -> str:
    """Return the remedy of the failed step, with the time of the next try."""
    again = (
        f"the agent tries again at {format_rfc3339(retry_at)}; "
        "to try at once, run on this node: treenail retry"
    )
    return f"{remedy}; {again}" if remedy else again
