"""The agent's current status, for systemd's STATUS= and for ``treenail status``.

The document is in /run, so that a user on the node can read it while the API server is
unreachable. It contains no secret and is lost at reboot; durable state is in the ledger.
"""

import json
import os
import threading
from collections.abc import Callable, Sequence

from treenail import clocks, errors, sd_notify
from treenail.api import annotations as key
from treenail.config.drift_comparison import Drift
from treenail.host.ostree.deployments import TransactionProgress
from treenail.update.decision import node_state
from treenail.update.state import ledger_record
from treenail.update.status import StatusReport

Json = dict[str, object]
PROGRESS_INTERVAL_S = 1.0
MAX_SHOWN_DRIFTS = 20


class StatusFile:
    """The status document and its line for systemd. A failure to write it stops nothing."""

    def __init__(
        self,
        *,
        write: Callable[[bytes], None],
        notifier: sd_notify.SystemdNotifier,
        clock: clocks.Clock,
        node: str,
        node_note: str = "",
    ) -> None:
        self._write = write
        self._notifier = notifier
        self._clock = clock
        self._document: Json = {
            "version": 1,
            "node": node or None,
            "nodeNote": node_note,
            "pid": os.getpid(),
        }
        self._written: Json = {}
        self._sentence = "starting"
        self._progress_at = float("-inf")
        # The watch's thread writes the state of the API server, the main thread all else.
        self._lock = threading.Lock()

    @property
    def heartbeat_s(self) -> float:
        """The interval of `send_heartbeat` that systemd's watchdog demands, in seconds."""
        return self._notifier.watchdog_interval_s or 60.0

    def send_heartbeat(self) -> None:
        """Notify systemd's watchdog that the main thread is running."""
        self._notifier.notify_watchdog()

    def extend_start_timeout(self, seconds: float) -> None:
        """Ask systemd for so many more seconds to start in."""
        self._notifier.extend_start_timeout(seconds)

    def show_report(
        self, facts: node_state.Facts, report: StatusReport, failure: errors.TreenailError | None
    ) -> None:
        """Show a report, and a failure even when it is too early to put it on the Node."""
        shown: Json = {
            "activity": report.summary,
            "desired": _render_desired(facts),
            "failure": _render_failure(failure or report.failure, report),
            "progress": None,
            **_render_record(facts.record),
        }
        with self._lock:
            self._sentence = report.summary
            self._document |= shown
            self._progress_at = float("-inf")
            self._write_document(report.summary)

    def show_first_boot(
        self,
        activity: str,
        failure: errors.TreenailError | None = None,
        *,
        is_complete: bool = False,
    ) -> None:
        """Show what the first boot does before the machine joins, and why its last try failed."""
        shown: Json = {
            "firstBoot": not is_complete,
            "activity": activity,
            "progress": None,
            "failure": None
            if failure is None
            else {"message": str(failure), "remedy": failure.remedy, "state": None},
        }
        with self._lock:
            self._sentence = activity
            self._document |= shown
            self._progress_at = float("-inf")
            self._write_document(activity)

    def show_record(self, record: ledger_record.LedgerRecord) -> None:
        """Show the ledger record that was just saved."""
        with self._lock:
            self._document |= _render_record(record)
            self._write_document(self._sentence)

    def show_progress(self, progress: TransactionProgress) -> None:
        """Show the progress of an OS transaction, at most once a second."""
        now = self._clock.monotonic()
        if now - self._progress_at < PROGRESS_INTERVAL_S:
            return
        percent = "" if progress.percent is None else f" {progress.percent} %"
        with self._lock:
            self._progress_at = now
            self._document["progress"] = {"text": progress.text, "percent": progress.percent}
            self._write_document(f"{self._sentence}:{percent} {progress.text}".rstrip())

    def show_backend(self, name: str, reason: str) -> None:
        """Show which back end manages the operating system, and why it was chosen."""
        with self._lock:
            self._document["backend"] = {"name": name, "reason": reason}

    def show_credential_problems(self, problems: Sequence[str]) -> None:
        """Show the problems of pull secrets and of the ControllerConfig's files."""
        with self._lock:
            self._document["credentials"] = list(problems)

    def show_bootstrap_registry(self, registry: str) -> None:
        """Show the registry on the bootstrap host that this node uses; empty without one."""
        with self._lock:
            self._document["bootstrapRegistry"] = registry or None

    def show_drift(self, drifts: Sequence[Drift] | None) -> None:
        """Show the first `MAX_SHOWN_DRIFTS` drifts from the current config; None if not checked."""
        shown = None if drifts is None else [str(drift) for drift in drifts[:MAX_SHOWN_DRIFTS]]
        with self._lock:
            self._document["drift"] = shown

    def show_api_server(self, *, is_reachable: bool, problem: str = "") -> None:
        """Show whether the API server is reachable, since when, and its problem with our Node."""
        with self._lock:
            before = self._document.get("apiServer")
            known = before if isinstance(before, dict) else {}
            since = known.get("since")
            if known.get("reachable") is not is_reachable:
                since = clocks.format_rfc3339(self._clock.now())
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
        stamped = self._document | {"written": clocks.format_rfc3339(self._clock.now())}
        self._write(json.dumps(stamped, indent=1).encode())


def _render_record(record: ledger_record.LedgerRecord) -> Json:
    update = record.update
    return {
        "current": record.current.to_json(),
        "update": None
        if update is None
        else {
            "id": update.id,
            "phase": str(update.phase),
            "target": update.target.to_json(),
            "origin": update.origin.to_json(),
            "began": clocks.format_rfc3339(update.began),
            "entered": clocks.format_rfc3339(update.entered),
        },
    }


def _render_desired(facts: node_state.Facts) -> Json | None:
    """Render what the Node requests; None before the Node is read, except during an update.

    The report of an instant action has no target.
    """
    wanted = facts.node.desired if facts.node else None
    if isinstance(wanted, node_state.DesiredTarget | node_state.InvalidTarget):
        return wanted.target.to_json()
    if facts.record.update is not None:
        return facts.record.update.target.to_json()
    return None if wanted is None else ledger_record.Target().to_json()


def _render_failure(failure: errors.TreenailError | None, report: StatusReport) -> Json | None:
    """Render a failure; a wait for longer than its limit has the state that the Node shows."""
    if failure is None:
        return None
    state = failure.node_state
    if state is None and report.failure is not None:
        state = report.annotations.get(key.STATE)
    return {"message": str(failure), "remedy": failure.remedy, "state": state}
