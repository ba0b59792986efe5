"""Callback and time limits for watching a transaction of any back end."""

from collections.abc import Callable
from dataclasses import dataclass

from treenail.host.ostree.deployments import TransactionProgress, WatchVerdict

WatchCallback = Callable[[TransactionProgress], WatchVerdict]


@dataclass(frozen=True, slots=True)
class TransactionLimits:
    """Time limits of a transaction.

    ``stall_s`` is long because rpm-ostree reports no progress within a layer, however large.
    """

    transaction_s: float = 3 * 3600.0
    stall_s: float = 1800.0
    cancel_s: float = 120.0
