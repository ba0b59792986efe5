"""Processes of the bootstrap registry. They end with this process, even if it is killed."""

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from treenail.clock import Clock
from treenail.errors import FileError, HostError
from treenail.installer.registry.registry_program import is_own_command
from treenail.process import stop_process

_STOP_LIMIT_S = 5.0
_ABANDONED_LIMIT_S = 10.0
_CLEANUP_LIMIT_S = 30.0
_LOG_LIMIT = 20 * 1024 * 1024
_TAIL = 2000
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class RegistryProcess:
    """One process, with its standard output and error in a log file.

    The thread that starts it must live as long as it should: the kernel sends the death signal of
    PR_SET_PDEATHSIG when that thread ends (prctl(2)).
    """

    def __init__(
        self, command: list[str], config_file: Path, log: Path, cleanup: list[str]
    ) -> None:
        """``cleanup`` ends what outlives the command; empty for nothing."""
        self._command = command
        self._cleanup = cleanup
        self._config_file = config_file
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process ID; None while it does not run."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the program; raise `HostError` or `FileError`."""
        self._rotate_log()
        wrapper = ["setpriv", "--pdeathsig=KILL", "--"] if shutil.which("setpriv") else []
        try:
            descriptor = os.open(
                self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise FileError(f"cannot write {self._log}: {error.strerror}") from error
        try:
            self._process = subprocess.Popen(
                [*wrapper, *self._command],
                # REGISTRY_… in the environment would override the configuration.
                env=_make_environment(),
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
            )
        except OSError as error:
            raise HostError(f"cannot run {self._command[0]}: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def stop(self) -> None:
        """End the process and wait for it."""
        process, self._process = self._process, None
        if process is None:
            return
        stop_process(process, _STOP_LIMIT_S)

    def end_abandoned(self, clock: Clock) -> None:
        """End the process of an earlier run that was killed, where the kernel did not."""
        if self._cleanup:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    self._cleanup,
                    env=_make_environment(),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    check=False,
                    timeout=_CLEANUP_LIMIT_S,
                )
        end = clock.monotonic() + _ABANDONED_LIMIT_S
        # Not from a record: a kill may come between the start of the process and the write.
        for pid in _list_pids():
            while is_own_command(_read_command(pid), self._config_file):
                if clock.monotonic() > end:
                    raise HostError(
                        f"cannot start the bootstrap registry: process {pid} of an earlier run "
                        "does not end",
                        remedy=f"run: kill -9 {pid}",
                    )
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                clock.sleep(0.05)

    def read_last_lines(self) -> str:
        """Return the end of the log."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._log.stat().st_size - _TAIL, 0))
                return file.read().decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def _rotate_log(self) -> None:
        with suppress(OSError):
            if self._log.stat().st_size > _LOG_LIMIT:
                self._log.replace(self._log.with_suffix(".log.1"))


def _make_environment() -> dict[str, str]:
    return {"PATH": _PATH, "HOME": os.environ.get("HOME", "/root")}


def _list_pids() -> list[int]:
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]


def _read_command(pid: int) -> list[str]:
    try:
        content = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return content.decode("utf-8", "replace").rstrip("\0").split("\0")
