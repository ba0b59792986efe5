"""The agent's service as systemd would run it: readiness, watchdog, restarts, and their limits.

Type=notify, Restart=on-failure. One thread attends to the process from `AgentUnit.start` until the
unit is inactive or has failed for good.
"""

import os
import select
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from treenail_lab.machine.settings import Settings
from treenail_lab.machine.systemd.journal import Journal

UNIT = "treenail.service"
NOTIFY_SOCKET = "run/systemd/notify"
RESTART_S = 0.1
BURST, INTERVAL_S = 10, 10.0

_ABORT_LIMIT_S = 1.0
_NEVER = float("inf")
_GONE_LIMIT_S = 10.0


class AgentUnit:
    """The service; every method may be called from any thread."""

    def __init__(
        self,
        command: Sequence[str],
        root: Path,
        *,
        environment: Mapping[str, str],
        output: Path,
        journal: Journal,
        behaviour: Callable[[], Settings],
    ) -> None:
        self._command = list(command)
        self._root = root
        self._environment = dict(environment)
        self._output = output
        self._journal = journal
        self._behaviour = behaviour
        self._watchdog_s = 0.0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._wake = -1
        self._stopping = False
        self._kill_due = self._watchdog_due = _NEVER
        self._stop_limit_s = 0.0
        self.state = "inactive"
        self.status = ""
        self.ready = False
        self.starts = 0

    @property
    def pid(self) -> int:
        """The process id of the agent; 0 while none runs."""
        process = self._process
        return process.pid if process is not None else 0

    def start(self) -> None:
        """Start the agent, unless it runs."""
        with self._changed:
            if self._thread is not None and self._thread.is_alive():
                return
            self._stopping = False
            waiting, self._wake = os.pipe()
            self._set("activating")
            self._thread = threading.Thread(
                target=self._serve, args=(waiting,), name="agent", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when that takes too long; the agent is gone when this returns."""
        self._end(self._behaviour().agent_stop_s)

    def power_off(self) -> None:
        """SIGKILL for everything the agent started, at once."""
        self._end(0.0)

    def _end(self, limit_s: float) -> None:
        with self._changed:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            self._stopping, self._stop_limit_s = True, limit_s
            os.close(self._wake)
        thread.join(limit_s + _GONE_LIMIT_S)

    def kill(self, number: int) -> None:
        """Send a signal to the agent itself."""
        process = self._process
        if process is not None:
            process.send_signal(number)

    def wait(self, condition: Callable[["AgentUnit"], bool], limit_s: float) -> bool:
        """Wait until the condition holds; says whether it does."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self), limit_s)

    def _serve(self, waiting: int) -> None:
        path = self._root / NOTIFY_SOCKET
        path.unlink(missing_ok=True)
        failures: deque[float] = deque()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.bind(str(path))
            notify.settimeout(0)
            while True:
                status = self._run_once(notify, waiting)
                if self._stopping or status == 0:
                    self._set("inactive")
                    break
                failures.append(time.monotonic())
                while failures[0] < failures[-1] - INTERVAL_S:
                    failures.popleft()
                if len(failures) > BURST:
                    self._set("failed")
                    self._log("Start request repeated too quickly.", priority=3)
                    break
                self._set("auto-restart")
                if select.select([waiting], [], [], RESTART_S)[0]:
                    self._set("inactive")
                    break
        path.unlink(missing_ok=True)
        os.close(waiting)

    def _run_once(self, notify: socket.socket, waiting: int) -> int:
        self._kill_due = self._watchdog_due = _NEVER
        self._watchdog_s = self._behaviour().agent_watchdog_s
        with self._output.open("ab") as output:
            process = subprocess.Popen(
                self._command,
                env=self._told(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        with self._changed:
            self._process = process
            self.starts += 1
            self.ready, self.status = False, ""
            self._set("activating")
        self._log(f"Starting {UNIT}...")
        self._attend(process, notify, waiting)
        status = process.wait()
        _kill_group(process.pid, signal.SIGKILL)
        with self._changed:
            self._process = None
            self.ready = False
            self._changed.notify_all()
        self._log_exit(status)
        return status

    def _attend(self, process: subprocess.Popen[bytes], notify: socket.socket, stop: int) -> None:
        pidfd = os.pidfd_open(process.pid)
        watched = [pidfd, notify.fileno(), stop]
        try:
            while True:
                due = min(self._kill_due, self._watchdog_due)
                timeout = None if due == _NEVER else max(0.0, due - time.monotonic())
                readable, _, _ = select.select(watched, [], [], timeout)
                while self._heard(notify):
                    pass
                if pidfd in readable:
                    return
                if stop in readable:
                    watched.remove(stop)
                    self._set("deactivating")
                    self._watchdog_due = _NEVER
                    self._kill_due = time.monotonic() + self._stop_limit_s
                    if self._stop_limit_s:
                        _kill_group(process.pid, signal.SIGTERM)
                self._act_when_due(process)
        finally:
            os.close(pidfd)

    def _act_when_due(self, process: subprocess.Popen[bytes]) -> None:
        now = time.monotonic()
        if now >= self._kill_due:
            self._kill_due = _NEVER
            _kill_group(process.pid, signal.SIGKILL)
        if now >= self._watchdog_due:
            self._log(f"{UNIT}: Watchdog timeout (limit {self._watchdog_s:g}s)!", priority=3)
            self._watchdog_due = _NEVER
            self._kill_due = now + _ABORT_LIMIT_S
            process.send_signal(signal.SIGABRT)

    def _heard(self, notify: socket.socket) -> bool:
        try:
            message = notify.recv(65536).decode("utf-8", "replace")
        except BlockingIOError:
            return False
        told = dict(line.split("=", 1) for line in message.splitlines() if "=" in line)
        now = time.monotonic()
        with self._changed:
            self.status = told.get("STATUS", self.status)
            if told.get("READY") == "1":
                self.ready = True
                self.state = "active"
            alive = told.get("WATCHDOG") == "1" or told.get("READY") == "1"
            if alive and self._watchdog_s and not self._stopping:
                self._watchdog_due = now + self._watchdog_s
            if told.get("WATCHDOG") == "trigger":
                self._watchdog_due = now
            if "EXTEND_TIMEOUT_USEC" in told and self._kill_due != _NEVER:
                self._kill_due = now + int(told["EXTEND_TIMEOUT_USEC"]) / 1e6
            self._changed.notify_all()
        return True

    def _told(self) -> dict[str, str]:
        told = {
            **self._environment,
            "NOTIFY_SOCKET": str(self._root / NOTIFY_SOCKET),
            "INVOCATION_ID": uuid.uuid4().hex,
        }
        if self._watchdog_s:
            told["WATCHDOG_USEC"] = str(round(self._watchdog_s * 1e6))
        return told

    def _set(self, state: str) -> None:
        with self._changed:
            self.state = state
            self._changed.notify_all()

    def _log_exit(self, status: int) -> None:
        how = f"exited, status={status}" if status >= 0 else f"killed, status={-status}"
        clean = status in (0, -signal.SIGTERM)
        self._log(f"{UNIT}: Main process exited, code={how}", priority=6 if clean else 4)

    def _log(self, message: str, *, priority: int = 6) -> None:
        self._journal.write(
            {
                "PRIORITY": str(priority),
                "SYSLOG_IDENTIFIER": "systemd",
                "UNIT": UNIT,
                "MESSAGE": message,
            }
        )


def _kill_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
