"""What the agent is doing right now: for systemd's STATUS=, and for ``treenail status``.

The document lies in /run, so that a person at a node whose API server is away reads what the
agent knows. It holds no secret and is lost with the boot; what must not be lost is the ledger's.
"""

import json
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from treenail.clock import Clock, format_rfc3339
from treenail.config.drift import Drift
from treenail.errors import TreenailError
from treenail.host.ostree.deployments import TransactionProgress
from treenail.update.decision.facts import Facts
from treenail.update.state.record import LedgerRecord, Target
from treenail.update.status import StatusReport

Json = dict[str, object]
PROGRESS_INTERVAL_S = 1.0
MAX_SHOWN_DRIFTS = 20


class StatusNotifier(Protocol):
    """What systemd is told."""

    @property
    def watchdog_interval_s(self) -> float | None:
        """Seconds between beats of the watchdog; None without one."""

    def notify_status(self, text: str) -> None:
        """Set the line that ``systemctl status`` shows."""

    def notify_watchdog(self) -> None:
        """Say that the process is alive."""


class StatusFile:
    """The live document and its line for systemd, kept up to date and never in the way."""

    def __init__(
        self, *, write: Callable[[bytes], None], notifier: StatusNotifier, clock: Clock, node: str
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
    def heartbeat_s(self) -> float:
        """How often `send_heartbeat` is to be called, in seconds."""
        return self._notifier.watchdog_interval_s or 60.0

    def send_heartbeat(self) -> None:
        """Tell systemd's watchdog that the main thread turns."""
        self._notifier.notify_watchdog()

    def show_report(
        self, facts: Facts, report: StatusReport, failure: TreenailError | None
    ) -> None:
        """Show a report, and the failure that it may be too early to put on the Node."""
        shown: Json = {
            "activity": report.summary,
            "desired": _render_target(report.desired),
            "failure": None
            if failure is None
            else {"message": str(failure), "remedy": failure.remedy, "state": failure.node_state},
            "progress": None,
            **_render_record(facts.record),
        }
        with self._lock:
            self._sentence = report.summary
            self._document |= shown
            self._progress_at = float("-inf")
            self._write_document(report.summary)

    def show_record(self, record: LedgerRecord) -> None:
        """Show what the ledger has just been told."""
        with self._lock:
            self._document |= _render_record(record)
            self._write_document(self._sentence)

    def show_progress(self, progress: TransactionProgress) -> None:
        """Show how far an OS transaction is; at most once a second."""
        now = self._clock.monotonic()
        if now - self._progress_at < PROGRESS_INTERVAL_S:
            return
        percent = "" if progress.percent is None else f" {progress.percent} %"
        with self._lock:
            self._progress_at = now
            self._document["progress"] = {"text": progress.text, "percent": progress.percent}
            self._write_document(f"{self._sentence}:{percent} {progress.text}".rstrip())

    def show_backend(self, name: str, reason: str) -> None:
        """Show what manages the operating system, and why that."""
        with self._lock:
            self._document["backend"] = {"name": name, "reason": reason}

    def show_credential_problems(self, problems: Sequence[str]) -> None:
        """Show what is wrong with pull secrets, and with what a ControllerConfig hands out."""
        with self._lock:
            self._document["credentials"] = list(problems)

    def show_drift(self, drifts: Sequence[Drift]) -> None:
        """Show what is not as the current config says, the first `MAX_SHOWN_DRIFTS` of it."""
        with self._lock:
            self._document["drift"] = [str(each) for each in drifts[:MAX_SHOWN_DRIFTS]]

    def show_api_server(self, *, is_reachable: bool, problem: str = "") -> None:
        """Show whether the API server answers, since when, and why it does not show our Node."""
        with self._lock:
            before = self._document.get("apiServer")
            known = before if isinstance(before, dict) else {}
            since = known.get("since")
            if known.get("reachable") is not is_reachable:
                since = format_rfc3339(self._clock.now())
            self._document["apiServer"] = {
                "reachable": is_reachable,
                "since": since,
                "problem": problem,
            }
            self._write_document(self._sentence)

    def _write_document(self, line: str) -> None:
        if self._document == self._written:
            return
        self._written = dict(self._document)
        self._notifier.notify_status(line)
        stamped = self._document | {"written": format_rfc3339(self._clock.now())}
        self._write(json.dumps(stamped, indent=1).encode())


def _render_record(record: LedgerRecord) -> Json:
    update = record.update
    return {
        "current": _render_target(record.current),
        "update": None
        if update is None
        else {
            "id": update.id,
            "phase": str(update.phase),
            "target": _render_target(update.target),
            "origin": _render_target(update.origin),
            "began": format_rfc3339(update.began),
            "entered": format_rfc3339(update.entered),
        },
    }


def _render_target(target: Target) -> Json:
    return {"config": target.config, "image": target.image}
