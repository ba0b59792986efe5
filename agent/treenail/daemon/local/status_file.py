"""What the agent is doing right now: for systemd's STATUS=, and for ``treenail status``.

The document lies in /run, so that a person at a node whose API server is away reads what the
agent knows. It holds no secret and is lost with the boot; what must not be lost is the ledger's.
"""

import json
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from treenail.clock import Clock, rfc3339
from treenail.config.drift import Drift
from treenail.errors import TreenailError
from treenail.host.ostree.deployments import Progress
from treenail.update.decision.facts import Facts
from treenail.update.state.record import Record, Target
from treenail.update.status import Report

Json = dict[str, object]
PROGRESS_EVERY_S = 1.0
DRIFTS_SHOWN = 20


class Notifier(Protocol):
    """What systemd is told."""

    @property
    def interval_s(self) -> float | None:
        """Seconds between beats of the watchdog; None without one."""

    def status(self, text: str) -> None:
        """Set the line that ``systemctl status`` shows."""

    def watchdog(self) -> None:
        """Say that the process is alive."""


class Live:
    """The live document and its line for systemd, kept up to date and never in the way."""

    def __init__(
        self, *, write: Callable[[bytes], None], notifier: Notifier, clock: Clock, node: str
    ) -> None:
        self._write = write
        self._notifier = notifier
        self._clock = clock
        self._document: Json = {"version": 1, "node": node, "pid": os.getpid()}
        self._written: Json = {}
        self._sentence = "starting"
        self._progress_at = float("-inf")
        # The watch's thread tells of the API server, the main thread of everything else.
        self._lock = threading.Lock()

    @property
    def beat_s(self) -> float:
        """How often `beat` is to be called, in seconds."""
        return self._notifier.interval_s or 60.0

    def beat(self) -> None:
        """Tell systemd's watchdog that the main thread turns."""
        self._notifier.watchdog()

    def show(self, facts: Facts, report: Report, failure: TreenailError | None) -> None:
        """Show a report, and the failure that it may be too early to put on the Node."""
        shown: Json = {
            "sentence": report.sentence,
            "desired": _target(report.desired),
            "failure": None
            if failure is None
            else {"message": str(failure), "remedy": failure.remedy, "state": failure.state},
            "progress": None,
            **_recorded(facts.record),
        }
        with self._lock:
            self._sentence = report.sentence
            self._document |= shown
            self._progress_at = float("-inf")
            self._flush(report.sentence)

    def record(self, record: Record) -> None:
        """Show what the ledger has just been told."""
        with self._lock:
            self._document |= _recorded(record)
            self._flush(self._sentence)

    def progress(self, progress: Progress) -> None:
        """Show how far an OS transaction is; at most once a second."""
        now = self._clock.monotonic()
        if now - self._progress_at < PROGRESS_EVERY_S:
            return
        percent = "" if progress.percent is None else f" {progress.percent} %"
        with self._lock:
            self._progress_at = now
            self._document["progress"] = {"text": progress.text, "percent": progress.percent}
            self._flush(f"{self._sentence}:{percent} {progress.text}".rstrip())

    def backend(self, name: str, why: str) -> None:
        """Show what manages the operating system, and why that."""
        with self._lock:
            self._document["backend"] = {"name": name, "why": why}

    def credential_problems(self, problems: Sequence[str]) -> None:
        """Show what is wrong with pull secrets, and with what a ControllerConfig hands out."""
        with self._lock:
            self._document["credentials"] = list(problems)

    def drift(self, drifts: Sequence[Drift]) -> None:
        """Show what is not as the current config says, the first `DRIFTS_SHOWN` of it."""
        with self._lock:
            self._document["drift"] = [str(each) for each in drifts[:DRIFTS_SHOWN]]

    def api_server(self, *, reachable: bool, problem: str = "") -> None:
        """Show whether the API server answers, since when, and why it does not show our Node."""
        with self._lock:
            before = self._document.get("apiServer")
            known = before if isinstance(before, dict) else {}
            since = known.get("since")
            if known.get("reachable") is not reachable:
                since = rfc3339(self._clock.now())
            self._document["apiServer"] = {
                "reachable": reachable,
                "since": since,
                "problem": problem,
            }
            self._flush(self._sentence)

    def _flush(self, line: str) -> None:
        if self._document == self._written:
            return
        self._written = dict(self._document)
        self._notifier.status(line)
        stamped = self._document | {"written": rfc3339(self._clock.now())}
        self._write(json.dumps(stamped, indent=1).encode())


def _recorded(record: Record) -> Json:
    update = record.update
    return {
        "current": _target(record.current),
        "update": None
        if update is None
        else {
            "id": update.id,
            "phase": str(update.phase),
            "target": _target(update.target),
            "origin": _target(update.origin),
            "began": rfc3339(update.began),
            "entered": rfc3339(update.entered),
        },
    }


def _target(target: Target) -> Json:
    return {"config": target.config, "image": target.image}
