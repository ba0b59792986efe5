"""Counters, gauges and histograms, and their text for Prometheus.

The labels are few and their values known beforehand (controllers, results, states), never names
of nodes or pools: what Prometheus keeps does not grow with the cluster.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

PREFIX = "treenail_controller_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# client-go's buckets for the time that a key takes, and some for what takes minutes.
FAST_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SLOW_S = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0)

Labels = tuple[str, ...]


class Metrics:
    """All metrics of a process, by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, _Metric] = {}

    def counter(self, name: str, about: str, labels: Sequence[str] = ()) -> "Counter":
        """A number that only grows; ``name`` without the prefix, by convention with ``_total``."""
        return self._made(Counter(name, about, labels, self._lock))

    def gauge(self, name: str, about: str, labels: Sequence[str] = ()) -> "Gauge":
        """A number that is asked for when somebody wants to know."""
        return self._made(Gauge(name, about, labels, self._lock))

    def histogram(
        self, name: str, about: str, labels: Sequence[str] = (), *, buckets: Sequence[float]
    ) -> "Histogram":
        """How often something took how long; ``name`` by convention with ``_seconds``."""
        return self._made(Histogram(name, about, labels, self._lock, buckets))

    def text(self) -> str:
        """All of them, in the text exposition format."""
        with self._lock:
            metrics = sorted(self._metrics.items())
        lines: list[str] = []
        for name, metric in metrics:
            lines += (f"# HELP {name} {metric.about}", f"# TYPE {name} {metric.kind}")
            lines += (f"{sample} {_number(value)}" for sample, value in metric.samples())
        return "\n".join([*lines, ""])

    def _made(self, metric: "_M") -> "_M":
        with self._lock:
            if metric.name in self._metrics:
                raise ValueError(f"there are two metrics {metric.name}")
            self._metrics[metric.name] = metric
        return metric


class Counter:
    """See `Metrics.counter`."""

    kind = "counter"

    def __init__(self, name: str, about: str, labels: Sequence[str], lock: threading.Lock) -> None:
        self.name = PREFIX + name
        self.about = about
        self._labels = tuple(labels)
        self._lock = lock
        self._values: dict[Labels, float] = {}

    def add(self, *labels: str, amount: float = 1.0) -> None:
        """Count one more, or ``amount``, for the values of its labels."""
        with self._lock:
            self._values[labels] = self._values.get(labels, 0.0) + amount

    def samples(self) -> Iterator[tuple[str, float]]:
        with self._lock:
            values = sorted(self._values.items())
        for labels, value in values:
            yield _sample(self.name, self._labels, labels), value


class Gauge:
    """See `Metrics.gauge`."""

    kind = "gauge"

    def __init__(self, name: str, about: str, labels: Sequence[str], lock: threading.Lock) -> None:
        self.name = PREFIX + name
        self.about = about
        self._labels = tuple(labels)
        self._lock = lock
        self._read: dict[Labels, Callable[[], float]] = {}

    def read(self, *labels: str, by: Callable[[], float]) -> None:
        """For these values of its labels the number is what ``by`` returns."""
        with self._lock:
            self._read[labels] = by

    def samples(self) -> Iterator[tuple[str, float]]:
        with self._lock:
            readers = sorted(self._read.items(), key=lambda item: item[0])
        # Not under the lock: what is asked may have one of its own.
        for labels, by in readers:
            yield _sample(self.name, self._labels, labels), by()


class Histogram:
    """See `Metrics.histogram`."""

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
        self.about = about
        self._labels = tuple(labels)
        self._lock = lock
        self._bounds = (*sorted(buckets), float("inf"))
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def observe(self, value: float, *labels: str) -> None:
        """Count something that took ``value`` seconds."""
        with self._lock:
            counts = self._counts.setdefault(labels, [0] * len(self._bounds))
            for index, bound in enumerate(self._bounds):
                counts[index] += value <= bound
            self._sums[labels] = self._sums.get(labels, 0.0) + value

    def samples(self) -> Iterator[tuple[str, float]]:
        with self._lock:
            found = [(labels, tuple(counts)) for labels, counts in sorted(self._counts.items())]
            sums = dict(self._sums)
        for labels, counts in found:
            for bound, number in zip(self._bounds, counts, strict=True):
                names, values = (*self._labels, "le"), (*labels, _number(bound))
                yield _sample(f"{self.name}_bucket", names, values), number
            yield _sample(f"{self.name}_sum", self._labels, labels), sums[labels]
            yield _sample(f"{self.name}_count", self._labels, labels), counts[-1]


_Metric = Counter | Gauge | Histogram
_M = TypeVar("_M", Counter, Gauge, Histogram)


def _sample(name: str, names: Labels, values: Labels) -> str:
    if len(names) != len(values):
        raise ValueError(f"{name}: expected values for {names}, found {values}")
    pairs = ",".join(f'{key}="{_escaped(value)}"' for key, value in zip(names, values, strict=True))
    return f"{name}{{{pairs}}}" if pairs else name


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if float(value).is_integer() else repr(float(value))
