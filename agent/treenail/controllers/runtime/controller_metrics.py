"""Counters, gauges and histograms of a controller process, served by ``prometheus_client``.

Each process has its own registry, so that two in one test do not share metrics. Label values are
known in advance (controllers, results, states) or names of pools, and never names of nodes, so
that the number of time series does not grow with the nodes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import prometheus_client
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from treenail import __version__

PREFIX = "treenail_controller_"
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_PLAIN_0_0_4
# Buckets for syncs, from 1 ms to 1 min, and for drains and updates, from 1 s to 4 h.
FAST_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SLOW_BUCKETS_S = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0)

# A series with the time of creation beside each counter: nothing here uses it.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # the package's gap

MetricLabels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MetricTable:
    """A gauge with all of its values, computed at a scrape."""

    name: str
    about: str
    labels: MetricLabels
    values: dict[MetricLabels, float] = field(default_factory=dict)
    prefix: str = PREFIX
    """Empty for a metric with the name that the Machine Config Operator gives it."""


class ControllerMetrics:
    """All metrics of a process by name. Thread-safe."""

    def __init__(self) -> None:
        self._registry = prometheus_client.CollectorRegistry()
        self._names: set[str] = set()
        info = self.add_gauge("build_info", "1, with the version of treenail.", ("version",))
        info.set_function(__version__, by=lambda: 1.0)

    def add_counter(
        self, name: str, about: str, labels: Sequence[str] = (), *, prefix: str = PREFIX
    ) -> "CounterMetric":
        """Add a counter; ``name`` has no prefix and by convention ends in ``_total``."""
        self._reserve_name(name)
        counter = prometheus_client.Counter(prefix + name, about, labels, registry=self._registry)
        return CounterMetric(counter)

    def add_gauge(self, name: str, about: str, labels: Sequence[str] = ()) -> "GaugeMetric":
        """Add a gauge, whose functions run at each scrape."""
        self._reserve_name(name)
        gauge = GaugeMetric(PREFIX + name, about, tuple(labels))
        self._registry.register(gauge)
        return gauge

    def add_histogram(
        self,
        name: str,
        about: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        prefix: str = PREFIX,
    ) -> "HistogramMetric":
        """Add a histogram; ``name`` by convention ends in ``_seconds``."""
        self._reserve_name(name)
        histogram = prometheus_client.Histogram(
            prefix + name, about, labels, registry=self._registry, buckets=buckets
        )
        return HistogramMetric(histogram)

    def add_tables(self, compute: Callable[[], Iterable[MetricTable]]) -> None:
        """Add gauges whose label values are known only at a scrape, such as names of pools."""
        self._registry.register(_TableCollector(compute))

    def render_text(self) -> str:
        """Format all metrics in the text exposition format."""
        return prometheus_client.generate_latest(self._registry).decode()

    def _reserve_name(self, name: str) -> None:
        if name in self._names:
            raise ValueError(f"duplicate metric {PREFIX}{name}")
        self._names.add(name)


class CounterMetric:
    """See `ControllerMetrics.add_counter`."""

    def __init__(self, counter: prometheus_client.Counter) -> None:
        self._counter = counter

    def increment(self, *labels: str, amount: float = 1.0) -> None:
        """Add ``amount`` for these label values."""
        _select_labels(self._counter, labels).inc(amount)


class HistogramMetric:
    """See `ControllerMetrics.add_histogram`."""

    def __init__(self, histogram: prometheus_client.Histogram) -> None:
        self._histogram = histogram

    def observe(self, value: float, *labels: str) -> None:
        """Record a duration in seconds."""
        _select_labels(self._histogram, labels).observe(value)


class GaugeMetric(Collector):
    """See `ControllerMetrics.add_gauge`."""

    def __init__(self, name: str, about: str, labels: MetricLabels) -> None:
        self._name = name
        self._about = about
        self._labels = labels
        self._functions: dict[MetricLabels, Callable[[], float]] = {}

    def set_function(self, *labels: str, by: Callable[[], float]) -> None:
        """Read the value for these label values from ``by`` at each scrape."""
        if len(labels) != len(self._labels):
            raise ValueError(f"{self._name}: expected values for {self._labels}, found {labels}")
        # Another dictionary: a scrape may iterate over the present one.
        self._functions = {**self._functions, labels: by}

    def collect(self) -> Iterator[Metric]:
        """Yield the values now, for the registry."""
        family = GaugeMetricFamily(self._name, self._about, labels=self._labels)
        for labels, by in sorted(self._functions.items(), key=lambda item: item[0]):
            family.add_metric(labels, by())
        yield family


class _TableCollector(Collector):
    def __init__(self, compute: Callable[[], Iterable[MetricTable]]) -> None:
        self._compute = compute

    def collect(self) -> Iterator[Metric]:
        for table in self._compute():
            family = GaugeMetricFamily(table.prefix + table.name, table.about, labels=table.labels)
            for labels, value in sorted(table.values.items()):
                family.add_metric(labels, value)
            yield family


_M = TypeVar("_M", prometheus_client.Counter, prometheus_client.Histogram)


def _select_labels(metric: _M, labels: Sequence[str]) -> _M:
    return metric.labels(*labels) if labels else metric
