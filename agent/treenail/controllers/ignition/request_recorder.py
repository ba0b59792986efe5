"""Passes each request to the metrics and to the log in the cluster."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from treenail.clock import Clock
from treenail.controllers.ignition.access import ConfigRequestLog, RequestRow
from treenail.controllers.ignition.request_log import RequestLogWriter, RequestStore
from treenail.controllers.ignition.request_metrics import RequestMetrics
from treenail.controllers.runtime.metrics import ControllerMetrics

log = logging.getLogger(__name__)


class RequestRecorder:
    """A `treenail.controllers.ignition.access.ConfigRequestLog` of several."""

    def __init__(self, *logs: ConfigRequestLog) -> None:
        self._logs = logs

    def record(self, row: RequestRow) -> None:
        """Record the request in each log."""
        for each in self._logs:
            try:
                each.record(row)
            except Exception:
                # One log must not hide the request from the others.
                log.exception("cannot record a request of %s", row.address)


@contextmanager
def open_request_log(
    store: RequestStore | None,
    metrics: ControllerMetrics,
    has_pool: Callable[[str], bool],
    clock: Clock,
) -> Iterator[ConfigRequestLog]:
    """Record requests while the context lasts, then write the rows that wait.

    Without a store the requests are only counted.
    """
    counted = RequestMetrics(metrics, has_pool)
    if store is None:
        yield counted
        return
    writer = RequestLogWriter(store, clock)
    writer.start()
    try:
        yield RequestRecorder(counted, writer)
    finally:
        writer.stop()
