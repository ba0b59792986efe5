"""Metrics of requests for configs. No label contains an address, a token or a machine."""

from collections import Counter
from collections.abc import Callable, Iterator

from treenail.clock import Clock
from treenail.config.ignition_emit import VERSIONS_SERVED
from treenail.controllers.runtime.metrics import FAST_BUCKETS_S, ControllerMetrics, MetricTable
from treenail.provisioning.server.access import RequestOutcome, RequestRow
from treenail.provisioning.tokens.tokens import TOKEN_STATES, TokenBook, find_state

OTHER = "(other)"
"""Label of a pool that does not exist. No pool can have this name."""


class RequestMetrics:
    """A `treenail.provisioning.server.access.ConfigRequestLog` that counts."""

    def __init__(self, metrics: ControllerMetrics, has_pool: Callable[[str], bool]) -> None:
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
            buckets=FAST_BUCKETS_S,
        )
        self._lookups = metrics.add_counter(
            "ignition_cache_lookups_total",
            "Configs that were requested, by whether the cache had them.",
            ("result",),
        )

    def record(self, row: RequestRow) -> None:
        """Count the request."""
        pool = row.pool if self._has_pool(row.pool) else OTHER
        version = row.version if row.version in VERSIONS_SERVED else ""
        self._total.increment(pool, version, row.outcome.value)
        self._bytes.increment(pool, amount=row.bytes)
        self._durations.observe(row.seconds, pool)
        if row.outcome is RequestOutcome.SERVED and not row.token:
            self._without_token.increment(pool)
        if row.rendered:
            self._lookups.increment("hit" if row.is_cached else "miss")


def add_token_metrics(
    metrics: ControllerMetrics, get_book: Callable[[], TokenBook | None], clock: Clock
) -> None:
    """Add the gauge of access tokens by state, which is computed at each scrape.

    It has no values while ``get_book`` returns None: the Secret cannot be read.
    """

    def compute() -> Iterator[MetricTable]:
        table = MetricTable("ignition_tokens", "Access tokens by state.", ("state",))
        book = get_book()
        if book is not None:
            now = clock.now()
            found = Counter(find_state(each, now) for each in book.tokens.values())
            table.values.update({(state,): float(found[state]) for state in TOKEN_STATES})
        yield table

    metrics.add_tables(compute)
