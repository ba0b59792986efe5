"""Reports the progress of an OS transaction to the API server, a few times at most."""

import logging
from collections.abc import Callable

from treenail.clock import Clock
from treenail.errors import ClusterError
from treenail.host.ostree.deployments import TransactionProgress

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
"""Minimum interval between two writes, and from the first percentage to the first write."""
STEP_PERCENT = 10


class ProgressReporter:
    """Writes percentages of an update: ten at most, however long its transaction takes.

    Each costs the API server a write of the Node. A failed write ends the reports of this update,
    so that an API server without an answer does not delay the transaction again.
    """

    def __init__(self, write: Callable[[int], None], clock: Clock) -> None:
        self._write = write
        self._clock = clock
        self._update_id = ""
        self._written_percent = 0
        self._not_before = 0.0

    def handle_progress(self, update_id: str, progress: TransactionProgress) -> None:
        """Write the percentage if it grew enough since the last write. Never raises."""
        if progress.percent is None:
            return
        now = self._clock.monotonic()
        if update_id != self._update_id:
            self._update_id, self._written_percent = update_id, 0
            self._not_before = now + INTERVAL_S
        if now < self._not_before or progress.percent < self._written_percent + STEP_PERCENT:
            return
        self._not_before, self._written_percent = now + INTERVAL_S, progress.percent
        try:
            self._write(progress.percent)
        except ClusterError as error:
            log.debug("cannot write the progress: %s", error)
            self._not_before = float("inf")
