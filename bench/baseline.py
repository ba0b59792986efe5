"""The baseline of a run: what fixed work and a bare interpreter cost on this machine, now.

A figure divided by the baseline of the same run can be compared with that of another machine, or
of the same machine on a busier day.
"""

import hashlib
import json
from dataclasses import dataclass
from time import perf_counter

from bench.interpreter import measure_cost
from bench.result import Result

_TIMES = 7
_SECONDS_OF = {"s": 1.0, "ms": 0.001}


@dataclass(frozen=True, slots=True)
class Baseline:
    """Seconds of the fixed work, and memory in MiB of an interpreter that does nothing."""

    work_s: float
    interpreter_mib: float

    def divide(self, result: Result) -> float | None:
        """Return the ratio of time or memory to the baseline; None for other units."""
        if seconds := _SECONDS_OF.get(result.unit):
            return result.value * seconds / self.work_s
        return result.value / self.interpreter_mib if result.unit == "MiB" else None


def measure_baseline() -> Baseline:
    """Measure the baseline: the fastest of several runs, in a second."""
    work_s = min(_time_work() for _ in range(_TIMES))
    return Baseline(work_s, measure_cost("pass", times=2).rss_mib)


def _time_work() -> float:
    begun = perf_counter()
    document = {f"key-{number}": [number, str(number), {"a": number}] for number in range(20_000)}
    hashlib.sha256(json.dumps(json.loads(json.dumps(document))).encode()).digest()
    return perf_counter() - begun
