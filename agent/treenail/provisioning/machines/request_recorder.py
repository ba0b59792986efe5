"""Passes each request to the metrics and to the log in the cluster."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from treenail.clock import Clock
from treenail.controllers.runtime.metrics import ControllerMetrics
from treenail.kube.client import Client
from treenail.kube.events import EventRecorder
from treenail.provisioning.content.source import PoolSource
from treenail.provisioning.machines.missing_machines import MissingMachineReporter
from treenail.provisioning.machines.request_log import RequestLogWriter, RequestStore
from treenail.provisioning.machines.request_metrics import RequestMetrics
from treenail.provisioning.server.access import ConfigRequestLog, RequestRow
from treenail.provisioning.tokens.pool_events import COMPONENT_NAME

log = logging.getLogger(__name__)


class RequestRecorder:
    """A `treenail.provisioning.server.access.ConfigRequestLog` of several."""

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


@dataclass(frozen=True, slots=True)
class ClusterLog:
    """The log of requests in a cluster."""

    client: Client
    namespace: str
    name: str
    """Name of the ConfigMap."""
    instance: str
    """Name of the server in Events."""
    expect_s: float
    """Time in which the Node of a machine must appear."""


@contextmanager
def open_request_log(
    place: ClusterLog | None, source: PoolSource, metrics: ControllerMetrics, clock: Clock
) -> Iterator[ConfigRequestLog]:
    """Record requests while the context lasts, then write the rows that wait.

    Without a place the requests are only counted.
    """
    counted = RequestMetrics(metrics, source.has_pool)
    if place is None:
        yield counted
        return
    store = RequestStore(place.client, place.namespace, place.name)
    reporter = MissingMachineReporter(
        place.client,
        store,
        source.get_pools,
        EventRecorder(place.client, COMPONENT_NAME, place.instance, clock),
        clock,
        expect_s=place.expect_s,
    )
    writer = RequestLogWriter(store, clock, after_write=reporter.check_periodically)
    writer.start()
    try:
        yield RequestRecorder(counted, writer)
    finally:
        writer.stop()
