"""How the transactions of every back end are watched, and for how long."""

from collections.abc import Callable
from dataclasses import dataclass

from treenail.host.ostree.deployments import TransactionProgress, WatchVerdict

WatchCallback = Callable[[TransactionProgress], WatchVerdict]


@dataclass(frozen=True, slots=True)
class TransactionLimits:
    """How long a transaction may take; in silence too, for a layer is fetched without a word."""

    transaction_s: float = 3 * 3600.0
    stall_s: float = 1800.0
    cancel_s: float = 120.0
