"""Figures of a long simulation: memory, descriptors, threads, objects and logs."""

import gc
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from tests.simulation.rollout import Rollout


class LogCounter(logging.Handler):
    """Counts the bytes of log messages from INFO on."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.bytes = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.bytes += len(record.getMessage())


@contextmanager
def count_log() -> Iterator[LogCounter]:
    """Count what treenail logs, and let no other handler have it.

    Open it in the test itself: for each phase of a test, pytest adds a handler that keeps all
    records with their tracebacks, also to loggers that do not propagate (catching_logs).
    """
    counter = LogCounter()
    logger = logging.getLogger("treenail")
    handlers, level, propagates = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [counter], False
    logger.setLevel(logging.INFO)
    try:
        yield counter
    finally:
        logger.handlers, logger.propagate = handlers, propagates
        logger.setLevel(level)


@dataclass(frozen=True)
class Usage:
    """Figures at one moment; writes, those of Events and log are of the time since the last."""

    rss_kib: int
    objects: int
    """Python objects of treenail's own classes."""
    descriptors: int
    threads: int
    ledger_bytes: int
    """Of the largest ledger."""
    stored: int
    """Objects of the API server, without Events."""
    events: int
    writes: int
    log_bytes: int

    def list_growth(self, later: "Usage", limits: dict[str, float]) -> list[str]:
        """Return the figures that grew by more than the factor in ``limits``."""
        found = []
        for each in fields(self):
            first, last = getattr(self, each.name), getattr(later, each.name)
            if last > first * limits.get(each.name, 1.0):
                found.append(f"{each.name} grew from {first} to {last}")
        return found


class UsageMeter:
    """Measures a simulation again and again."""

    def __init__(self, run: Rollout, log: LogCounter) -> None:
        self._run, self._log = run, log
        self._before = Counter({"events": 0, "writes": 0, "log": log.bytes})

    def measure(self, writes: Counter[str]) -> Usage:
        """Return the present figures; ``writes`` are all writes so far, by kind."""
        gc.collect()
        store = self._run.cluster.api.store
        kinds = {storage[1]: len(objects) for storage, objects in store.dump_objects()}
        now = Counter(
            {"events": writes["events"], "writes": writes.total(), "log": self._log.bytes}
        )
        since = {name: now[name] - self._before[name] for name in now}
        self._before = now
        ledgers = [machine.world.ledger or "" for machine in self._run.machines.values()]
        return Usage(
            rss_kib=read_rss_kib(),
            objects=count_objects(),
            descriptors=len(list(Path("/proc/self/fd").iterdir())),
            threads=threading.active_count(),
            ledger_bytes=max(map(len, ledgers)),
            stored=sum(count for plural, count in kinds.items() if plural != "events"),
            events=since["events"],
            writes=since["writes"],
            log_bytes=since["log"],
        )


def read_rss_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def count_objects() -> int:
    """Count the objects of treenail's classes, without remembered Events: at most 256 each."""
    modules = (str(type(each).__module__) for each in gc.get_objects())
    return sum(
        each.startswith("treenail.") and each != "treenail.kube.event_recorder" for each in modules
    )
