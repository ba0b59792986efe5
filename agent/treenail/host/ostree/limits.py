"""Time limits of transactions."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransactionLimits:
    """Time limits of a transaction.

    ``stall_s`` is long because rpm-ostree reports no progress within a layer, however large.
    """

    transaction_s: float = 3 * 3600.0
    stall_s: float = 1800.0
    cancel_s: float = 120.0
