"""The agent's service as systemd runs it: readiness, watchdog, restarts and start limit.

Type=notify, Restart=on-failure. One thread supervises the process from `AgentUnit.start` until the
unit is inactive, or failed because of the start limit.
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

from treenail_lab.lifetime.fork_server import LabProcess
from treenail_lab.machine.settings import MachineSettings
from treenail_lab.machine.systemd.journal import EmulatedJournal

AGENT_UNIT = "treenail.service"
NOTIFY_SOCKET = "run/systemd/notify"
RESTART_S = 0.1
START_LIMIT_BURST, START_LIMIT_INTERVAL_S = 10, 10.0

_ABORT_TIMEOUT_S = 1.0
_NEVER = float("inf")
_EXIT_TIMEOUT_S = 10.0


class AgentUnit:
    """The service; every method may be called from any thread."""

    def __init__(
        self,
        command: Sequence[str],
        root: Path,
        *,
        environment: Mapping[str, str],
        output: Path,
        journal: EmulatedJournal,
        read_settings: Callable[[], MachineSettings],
    ) -> None:
        self._command = list(command)
        self._root = root
        self._environment = dict(environment)
        self._output = output
        self._journal = journal
        self._read_settings = read_settings
        self._watchdog_s = 0.0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._wake = -1
        self._is_stopping = False
        self._kill_deadline = self._watchdog_deadline = _NEVER
        self._stop_limit_s = 0.0
        self.state = "inactive"
        self.status = ""
        self.is_ready = False
        self.start_count = 0

    @property
    def pid(self) -> int:
        """Return the process id of the agent; 0 while none runs."""
        process = self._process
        return process.pid if process is not None else 0

    def start(self) -> None:
        """Start the agent unless it runs."""
        with self._changed:
            if self._thread is not None and self._thread.is_alive():
                return
            self._is_stopping = False
            waiting, self._wake = os.pipe()
            self._set_state("activating")
            self._thread = threading.Thread(
                target=self._supervise, args=(waiting,), name="agent", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop the agent with SIGTERM, and with SIGKILL after ``agent_stop_s``."""
        self._stop_within(self._read_settings().agent_stop_s)

    def power_off(self) -> None:
        """Kill the agent and its process group with SIGKILL."""
        self._stop_within(0.0)

    def _stop_within(self, limit_s: float) -> None:
        with self._changed:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            self._is_stopping, self._stop_limit_s = True, limit_s
            os.close(self._wake)
        thread.join(limit_s + _EXIT_TIMEOUT_S)

    def kill(self, signal_number: int) -> None:
        """Send a signal to the agent, not to its children."""
        process = self._process
        if process is not None:
            process.send_signal(signal_number)

    def wait_until(self, condition: Callable[["AgentUnit"], bool], limit_s: float) -> bool:
        """Wait until the condition holds; return whether it does."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self), limit_s)

    def _supervise(self, waiting: int) -> None:
        path = self._root / NOTIFY_SOCKET
        path.unlink(missing_ok=True)
        failures: deque[float] = deque()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.bind(str(path))
            notify.settimeout(0)
            while True:
                status = self._run_process(notify, waiting)
                if self._is_stopping or status == 0:
                    self._set_state("inactive")
                    break
                failures.append(time.monotonic())
                while failures[0] < failures[-1] - START_LIMIT_INTERVAL_S:
                    failures.popleft()
                if len(failures) > START_LIMIT_BURST:
                    self._set_state("failed")
                    self._log_message("Start request repeated too quickly.", priority=3)
                    break
                self._set_state("auto-restart")
                if select.select([waiting], [], [], RESTART_S)[0]:
                    self._set_state("inactive")
                    break
        path.unlink(missing_ok=True)
        os.close(waiting)

    def _run_process(self, notify: socket.socket, waiting: int) -> int:
        self._kill_deadline = self._watchdog_deadline = _NEVER
        self._watchdog_s = self._read_settings().agent_watchdog_s
        with self._output.open("ab") as output:
            process: LabProcess[bytes] = LabProcess(
                self._command,
                env=self._build_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        with self._changed:
            self._process = process
            self.start_count += 1
            self.is_ready, self.status = False, ""
            self._set_state("activating")
        self._log_message(f"Starting {AGENT_UNIT}...")
        self._watch_process(process, notify, waiting)
        status = process.wait()
        _signal_group(process.pid, signal.SIGKILL)
        with self._changed:
            self._process = None
            self.is_ready = False
            self._changed.notify_all()
        self._log_exit(status)
        return status

    def _watch_process(
        self, process: subprocess.Popen[bytes], notify: socket.socket, stop: int
    ) -> None:
        pidfd = os.pidfd_open(process.pid)
        watched = [pidfd, notify.fileno(), stop]
        try:
            while True:
                due = min(self._kill_deadline, self._watchdog_deadline)
                timeout = None if due == _NEVER else max(0.0, due - time.monotonic())
                readable, _, _ = select.select(watched, [], [], timeout)
                while self._receive_notification(notify):
                    pass
                if pidfd in readable:
                    return
                if stop in readable:
                    watched.remove(stop)
                    self._set_state("deactivating")
                    self._watchdog_deadline = _NEVER
                    self._kill_deadline = time.monotonic() + self._stop_limit_s
                    if self._stop_limit_s:
                        _signal_group(process.pid, signal.SIGTERM)
                self._enforce_deadlines(process)
        finally:
            os.close(pidfd)

    def _enforce_deadlines(self, process: subprocess.Popen[bytes]) -> None:
        now = time.monotonic()
        if now >= self._kill_deadline:
            self._kill_deadline = _NEVER
            _signal_group(process.pid, signal.SIGKILL)
        if now >= self._watchdog_deadline:
            self._log_message(
                f"{AGENT_UNIT}: Watchdog timeout (limit {self._watchdog_s:g}s)!", priority=3
            )
            self._watchdog_deadline = _NEVER
            self._kill_deadline = now + _ABORT_TIMEOUT_S
            process.send_signal(signal.SIGABRT)

    def _receive_notification(self, notify: socket.socket) -> bool:
        try:
            message = notify.recv(65536).decode("utf-8", "replace")
        except BlockingIOError:
            return False
        fields = dict(line.split("=", 1) for line in message.splitlines() if "=" in line)
        now = time.monotonic()
        with self._changed:
            self.status = fields.get("STATUS", self.status)
            if fields.get("READY") == "1":
                self.is_ready = True
                self.state = "active"
            is_alive = fields.get("WATCHDOG") == "1" or fields.get("READY") == "1"
            if is_alive and self._watchdog_s and not self._is_stopping:
                self._watchdog_deadline = now + self._watchdog_s
            if fields.get("WATCHDOG") == "trigger":
                self._watchdog_deadline = now
            if "EXTEND_TIMEOUT_USEC" in fields and self._kill_deadline != _NEVER:
                self._kill_deadline = now + int(fields["EXTEND_TIMEOUT_USEC"]) / 1e6
            self._changed.notify_all()
        return True

    def _build_environment(self) -> dict[str, str]:
        environment = {
            **self._environment,
            "NOTIFY_SOCKET": str(self._root / NOTIFY_SOCKET),
            "INVOCATION_ID": uuid.uuid4().hex,
        }
        if self._watchdog_s:
            environment["WATCHDOG_USEC"] = str(round(self._watchdog_s * 1e6))
        return environment

    def _set_state(self, state: str) -> None:
        with self._changed:
            self.state = state
            self._changed.notify_all()

    def _log_exit(self, status: int) -> None:
        outcome = f"exited, status={status}" if status >= 0 else f"killed, status={-status}"
        clean = status in (0, -signal.SIGTERM)
        self._log_message(
            f"{AGENT_UNIT}: Main process exited, code={outcome}", priority=6 if clean else 4
        )

    def _log_message(self, message: str, *, priority: int = 6) -> None:
        self._journal.write_entry(
            {
                "PRIORITY": str(priority),
                "SYSLOG_IDENTIFIER": "systemd",
                "UNIT": AGENT_UNIT,
                "MESSAGE": message,
            }
        )


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
