"""Counters, gauges and histograms in the text format of Prometheus.

Label values are known in advance (controllers, results, states) and never names of nodes or pools,
so that the number of time series does not grow with the cluster.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

PREFIX = "treenail_controller_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Buckets for syncs, from 1 ms to 1 min, and for drains and updates, from 1 s to 4 h.
FAST_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SLOW_BUCKETS_S = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0)

MetricLabels = tuple[str, ...]


class ControllerMetrics:
    """All metrics of a process by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, _Metric] = {}

    def add_counter(self, name: str, about: str, labels: Sequence[str] = ()) -> "CounterMetric":
        """Add a counter; ``name`` has no prefix and by convention ends in ``_total``."""
        return self._register(CounterMetric(name, about, labels, self._lock))

    def add_gauge(self, name: str, about: str, labels: Sequence[str] = ()) -> "GaugeMetric":
        """Add a gauge, whose functions run at each scrape."""
        return self._register(GaugeMetric(name, about, labels, self._lock))

    def add_histogram(
        self, name: str, about: str, labels: Sequence[str] = (), *, buckets: Sequence[float]
    ) -> "HistogramMetric":
        """Add a histogram; ``name`` by convention ends in ``_seconds``."""
        return self._register(HistogramMetric(name, about, labels, self._lock, buckets))

    def render_text(self) -> str:
        """Format all metrics in the text exposition format."""
        with self._lock:
            metrics = sorted(self._metrics.items())
        lines: list[str] = []
        for name, metric in metrics:
            lines += (f"# HELP {name} {metric.help_text}", f"# TYPE {name} {metric.kind}")
            lines += (
                f"{sample} {_format_number(value)}" for sample, value in metric.iter_samples()
            )
        return "\n".join([*lines, ""])

    def _register(self, metric: "_M") -> "_M":
        with self._lock:
            if metric.name in self._metrics:
                raise ValueError(f"duplicate metric {metric.name}")
            self._metrics[metric.name] = metric
        return metric


class CounterMetric:
    """See `ControllerMetrics.add_counter`."""

    kind = "counter"

    def __init__(self, name: str, about: str, labels: Sequence[str], lock: threading.Lock) -> None:
        self.name = PREFIX + name
        self.help_text = about
        self._labels = tuple(labels)
        self._lock = lock
        self._values: dict[MetricLabels, float] = {}

    def increment(self, *labels: str, amount: float = 1.0) -> None:
        """Add ``amount`` for these label values."""
        with self._lock:
            self._values[labels] = self._values.get(labels, 0.0) + amount

    def iter_samples(self) -> Iterator[tuple[str, float]]:
        with self._lock:
            values = sorted(self._values.items())
        for labels, value in values:
            yield _format_sample(self.name, self._labels, labels), value


class GaugeMetric:
    """See `ControllerMetrics.add_gauge`."""

    kind = "gauge"

    def __init__(self, name: str, about: str, labels: Sequence[str], lock: threading.Lock) -> None:
        self.name = PREFIX + name
        self.help_text = about
        self._labels = tuple(labels)
        self._lock = lock
        self._read: dict[MetricLabels, Callable[[], float]] = {}

    def set_function(self, *labels: str, by: Callable[[], float]) -> None:
        """Read the value for these label values from ``by`` at each scrape."""
        with self._lock:
            self._read[labels] = by

    def iter_samples(self) -> Iterator[tuple[str, float]]:
        with self._lock:
            readers = sorted(self._read.items(), key=lambda item: item[0])
        # Without the lock: the functions may take other locks.
        for labels, by in readers:
            yield _format_sample(self.name, self._labels, labels), by()


class HistogramMetric:
    """See `ControllerMetrics.add_histogram`."""

    kind = "histogram"

    def __init__(
        self,
        name: str,
        about: str,
        labels: Sequence[str],
        lock: threading.Lock,
        buckets: Sequence[float],
    ) -> None:
        self.name = PREFIX + name
        self.help_text = about
        self._labels = tuple(labels)
        self._lock = lock
        self._bounds = (*sorted(buckets), float("inf"))
        self._counts: dict[MetricLabels, list[int]] = {}
        self._sums: dict[MetricLabels, float] = {}

    def observe(self, value: float, *labels: str) -> None:
        """Record a duration in seconds."""
        with self._lock:
            counts = self._counts.setdefault(labels, [0] * len(self._bounds))
            for index, bound in enumerate(self._bounds):
                counts[index] += value <= bound
            self._sums[labels] = self._sums.get(labels, 0.0) + value

    def iter_samples(self) -> Iterator[tuple[str, float]]:
        with self._lock:
            found = [(labels, tuple(counts)) for labels, counts in sorted(self._counts.items())]
            sums = dict(self._sums)
        for labels, counts in found:
            for bound, number in zip(self._bounds, counts, strict=True):
                names, values = (*self._labels, "le"), (*labels, _format_number(bound))
                yield _format_sample(f"{self.name}_bucket", names, values), number
            yield _format_sample(f"{self.name}_sum", self._labels, labels), sums[labels]
            yield _format_sample(f"{self.name}_count", self._labels, labels), counts[-1]


_Metric = CounterMetric | GaugeMetric | HistogramMetric
_M = TypeVar("_M", CounterMetric, GaugeMetric, HistogramMetric)


def _format_sample(name: str, names: MetricLabels, values: MetricLabels) -> str:
    if len(names) != len(values):
        raise ValueError(f"{name}: expected values for {names}, found {values}")
    pairs = ",".join(
        f'{key}="{_escape_label(value)}"' for key, value in zip(names, values, strict=True)
    )
    return f"{name}{{{pairs}}}" if pairs else name


def _escape_label(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _format_number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if float(value).is_integer() else repr(float(value))
