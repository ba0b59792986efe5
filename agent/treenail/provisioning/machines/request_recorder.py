"""Record of each request, in the metrics and in the log of the cluster.

No label of a metric contains an address, a token or a machine.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from treenail.api import component_names
from treenail.clocks import Clock
from treenail.config.ignition.emit import VERSIONS_SERVED
from treenail.controllers.runtime import controller_metrics
from treenail.kube import api_client, event_recorder
from treenail.provisioning.content.source import PoolSource
from treenail.provisioning.machines import logged_requests, missing_machines, request_log
from treenail.provisioning.tokens import tokens

log = logging.getLogger(__name__)


class RequestRecorder:
    """A `treenail.provisioning.machines.logged_requests.ConfigRequestLog` of several."""

    def __init__(self, *logs: logged_requests.ConfigRequestLog) -> None:
        self._logs = logs

    def record(self, row: logged_requests.RequestRow) -> None:
        """Record the request in each log."""
        for receiver in self._logs:
            try:
                receiver.record(row)
            except Exception:
                # One log must not hide the request from the others.
                log.exception("cannot record a request of %s", row.address)


@dataclass(frozen=True, slots=True)
class RequestLogSettings:
    """Settings of the log of requests in a cluster."""

    client: api_client.Client
    namespace: str
    name: str
    """Name of the ConfigMap."""
    instance: str
    """Name of the server in Events."""
    expect_s: float
    """Time in which the Node of a machine must appear."""


@contextmanager
def open_request_log(
    settings: RequestLogSettings | None,
    source: PoolSource,
    metrics: controller_metrics.ControllerMetrics,
    clock: Clock,
) -> Iterator[logged_requests.ConfigRequestLog]:
    """Record requests while the context lasts, then write the rows that wait.

    Without settings the requests are only counted.
    """
    counted = RequestMetrics(metrics, source.has_pool)
    if settings is None:
        yield counted
        return
    store = request_log.RequestStore(settings.client, settings.namespace, settings.name)
    reporter = missing_machines.MissingMachineReporter(
        settings.client,
        store,
        source.get_pools,
        event_recorder.EventRecorder(
            settings.client, component_names.IGNITION_SERVER, settings.instance, clock
        ),
        clock,
        expect_s=settings.expect_s,
    )
    writer = request_log.RequestLogWriter(store, clock, after_write=reporter.check_periodically)
    writer.start()
    try:
        yield RequestRecorder(counted, writer)
    finally:
        writer.stop()


OTHER = "(other)"
"""Label of a pool that does not exist. No pool can have this name."""


class RequestMetrics:
    """A `treenail.provisioning.machines.logged_requests.ConfigRequestLog` that counts."""

    def __init__(
        self, metrics: controller_metrics.ControllerMetrics, has_pool: Callable[[str], bool]
    ) -> None:
        """``has_pool`` bounds the label ``pool``: clients choose the name in a request."""
        self._has_pool = has_pool
        self._total = metrics.add_counter(
            "ignition_requests_total",
            "Requests for configs by pool, version of Ignition and outcome.",
            ("pool", "version", "outcome"),
        )
        self._bytes = metrics.add_counter(
            "ignition_response_bytes_total", "Bytes of the bodies of responses.", ("pool",)
        )
        self._without_token = metrics.add_counter(
            "ignition_served_without_token_total",
            "Configs that machines without an access token received.",
            ("pool",),
        )
        self._durations = metrics.add_histogram(
            "ignition_request_duration_seconds",
            "Time from a complete request to the last byte of its response.",
            ("pool",),
            buckets=controller_metrics.FAST_BUCKETS_S,
        )
        self._lookups = metrics.add_counter(
            "ignition_cache_lookups_total",
            "Configs that were requested, by whether the cache had them.",
            ("result",),
        )

    def record(self, row: logged_requests.RequestRow) -> None:
        """Count the request."""
        pool = row.pool if self._has_pool(row.pool) else OTHER
        version = row.version if row.version in VERSIONS_SERVED else ""
        self._total.increment(pool, version, row.outcome.value)
        self._bytes.increment(pool, amount=row.bytes)
        self._durations.observe(row.seconds, pool)
        if row.outcome is logged_requests.RequestOutcome.SERVED and not row.token:
            self._without_token.increment(pool)
        if row.rendered:
            self._lookups.increment("hit" if row.is_cached else "miss")


def add_token_metrics(
    metrics: controller_metrics.ControllerMetrics,
    get_token_table: Callable[[], tokens.TokenTable | None],
    clock: Clock,
) -> None:
    """Add the gauge of access tokens by state, which is computed at each scrape.

    It has no values while ``get_token_table`` returns None: the Secret cannot be read.
    """

    def compute() -> Iterator[controller_metrics.MetricTable]:
        table = controller_metrics.MetricTable(
            "ignition_tokens", "Access tokens by state.", ("state",)
        )
        token_table = get_token_table()
        if token_table is not None:
            now = clock.now()
            counts = Counter(
                tokens.find_state(record, now) for record in token_table.tokens.values()
            )
            table.values.update({(state,): float(counts[state]) for state in tokens.TOKEN_STATES})
        yield table

    metrics.add_tables(compute)
