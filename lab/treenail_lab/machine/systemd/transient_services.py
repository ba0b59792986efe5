"""Transient services: the only kind of unit for which the lab runs a process.

A program is searched below the machine's root first and on this host second, so that a test can
install a fake where the agent expects the program.
"""

import os
import re
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gi.repository import GLib

from treenail_lab.machine.bus.objects import READ_ONLY, MethodError
from treenail_lab.machine.systemd.unit_log import find_unit_log

EXEC_FAILED = 203
_CODES = {"exited": 1, "killed": 2}  # CLD_EXITED, CLD_KILLED
_GRACE_MS = 5000

_PLAIN = {
    "Description": "description",
    "Type": "kind",
    "RemainAfterExit": "remain",
    "AddRef": "add_reference",
    "TimeoutStartUSec": "limit_us",
    "Restart": "restart",
}
_IGNORED = frozenset(
    {
        "KillMode",
        "SyslogIdentifier",
        "StandardInput",
        "StandardOutput",
        "StandardError",
        "Slice",
        "PrivateTmp",
        "TimeoutStopUSec",
        "RestartUSec",
    }
)


@dataclass(frozen=True, slots=True)
class ServiceOutcome:
    """The end of a service's main process, in the terms of systemd's properties."""

    result: str = "success"
    code: int = 0
    status: int = 0
    pid: int = 0
    is_stopped: bool = False


@dataclass(slots=True)
class TransientService:
    """The properties of StartTransientUnit, and the process while it runs."""

    commands: list[tuple[str, list[str], bool]] = field(default_factory=list)
    description: str = ""
    kind: str = "simple"
    remain: bool = False
    should_collect: bool = False
    add_reference: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    directory: str = ""
    output: int | None = None
    errors: int | None = None
    limit_us: int = 0
    restart: str = "no"
    process: subprocess.Popen[bytes] | None = None
    is_stop_requested: bool = False
    is_timed_out: bool = False

    def start(self, root: Path, invocation: bytes, on_end: Callable[[ServiceOutcome], None]) -> int:
        """Run the commands in order; ``on_end`` gets the outcome. Return the pid of the first."""
        environment = {
            **os.environ,
            **self.environment,
            "INVOCATION_ID": uuid.UUID(bytes=invocation).hex,
        }
        pid = self._run_command(0, root, environment, on_end)
        if self.limit_us:
            GLib.timeout_add(self.limit_us // 1000, self._on_timeout)
        return pid

    def stop(self) -> bool:
        """Send SIGTERM to the process; return False when none runs."""
        if self.process is None:
            return False
        self.is_stop_requested = True
        self.kill(signal.SIGTERM)
        GLib.timeout_add(_GRACE_MS, self._kill_after_grace)
        return True

    def kill(self, signal_number: int) -> None:
        """Send a signal to every process of the unit."""
        if self.process is not None:
            os.killpg(self.process.pid, signal_number)

    def _run_command(
        self,
        position: int,
        root: Path,
        environment: Mapping[str, str],
        on_end: Callable[[ServiceOutcome], None],
    ) -> int:
        path, argv, ignore = self.commands[position]
        if self.output is None and self.errors is None:
            self.output = _open_for_append(find_unit_log(root, environment["INVOCATION_ID"]))
        program = root / path.lstrip("/")
        try:
            process = subprocess.Popen(
                [*_expand_variables(argv, environment)] or [path],
                executable=program if program.exists() else shutil.which(path) or path,
                env=environment,
                cwd=self.directory or None,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if self.output is None else self.output,
                stderr=self.errors if self.errors is not None else self.output,
                start_new_session=True,
            )
        except OSError:
            self._close_outputs()
            GLib.idle_add(on_end, ServiceOutcome("exit-code", _CODES["exited"], EXEC_FAILED))
            return 0
        self.process = process

        def finish(pidfd: int, _condition: object) -> bool:
            os.close(pidfd)
            status = process.wait()
            self.process = None
            is_success = status == 0 or ignore
            if is_success and not self.is_stop_requested and position + 1 < len(self.commands):
                self._run_command(position + 1, root, environment, on_end)
                return False
            self._close_outputs()
            on_end(self._build_outcome(process.pid, 0 if ignore else status))
            return False

        pidfd = os.pidfd_open(process.pid)
        GLib.unix_fd_add_full(GLib.PRIORITY_DEFAULT, pidfd, GLib.IOCondition.IN, finish)
        return process.pid

    def _build_outcome(self, pid: int, status: int) -> ServiceOutcome:
        code = _CODES["exited" if status >= 0 else "killed"]
        result = "success"
        if self.is_timed_out:
            result = "timeout"
        elif status > 0:
            result = "exit-code"
        elif status < 0 and not (self.is_stop_requested and status == -signal.SIGTERM):
            result = "signal"
        return ServiceOutcome(result, code, abs(status), pid, is_stopped=self.is_stop_requested)

    def _on_timeout(self) -> bool:
        if self.process is not None:
            self.is_timed_out = True
            self.stop()
        return False

    def _kill_after_grace(self) -> bool:
        self.kill(signal.SIGKILL)
        return False

    def _close_outputs(self) -> None:
        for descriptor in (self.output, self.errors):
            if descriptor is not None:
                os.close(descriptor)
        self.output = self.errors = None


def parse_properties(properties: Any, fds: list[int], root: Path) -> TransientService:
    """Parse an ``a(sv)``; the handles in it are indexes of ``fds``."""
    service = TransientService()
    for index in range(properties.n_children()):
        pair = properties.get_child_value(index)
        name = pair.get_child_value(0).get_string()
        _set_property(service, name, pair.get_child_value(1).get_variant(), fds, root)
    return service


def _set_property(
    service: TransientService, name: str, variant: Any, fds: list[int], root: Path
) -> None:
    value = variant.unpack()
    if name in _PLAIN:
        setattr(service, _PLAIN[name], value)
        return
    match name:
        case "ExecStart":
            service.commands = [(path, argv, ignore) for path, argv, ignore in value]
        case "CollectMode":
            service.should_collect = value == "inactive-or-failed"
        case "Environment":
            service.environment = dict(entry.split("=", 1) for entry in value)
        case "EnvironmentFiles":
            files = [root / path.lstrip("/") for path, _is_optional in value]
            lines = [line for file in files if file.exists() for line in file.read_text().split()]
            service.environment |= dict(line.split("=", 1) for line in lines)
        case "WorkingDirectory":
            service.directory = str(root / value.lstrip("/"))
        case "StandardOutputFileDescriptor":
            service.output = fds[value]
        case "StandardErrorFileDescriptor":
            service.errors = fds[value]
        case "StandardOutputFileToAppend":
            service.output = _open_for_append(root / value.lstrip("/"))
        case "StandardErrorFileToAppend":
            service.errors = _open_for_append(root / value.lstrip("/"))
        case _:
            if name in _IGNORED:
                return
            raise MethodError(READ_ONLY, f"Cannot set property {name}, or unknown property.")


def _expand_variables(argv: Iterable[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Replace variables as systemd does: systemd.service(5), COMMAND LINES."""
    for word in argv:
        if re.fullmatch(r"\$[A-Za-z_][A-Za-z0-9_]*", word):
            yield from environment.get(word[1:], "").split()
        else:
            yield re.sub(
                r"\$(?:\$|\{([^}]*)\})",
                lambda match: "$" if match[1] is None else environment.get(match[1], ""),
                word,
            )


def _open_for_append(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
