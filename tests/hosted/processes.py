"""Programs that run beside a test, and end with it."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

from treenail_lab.lifetime.owner import owner

_END_LIMIT_S = 30.0


class LoggedProcess(AbstractContextManager["LoggedProcess"]):
    """A program with its log; it runs while entered, and `kill` and `start` restart it."""

    def __init__(
        self,
        command: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command, self._environment = command, environment or {}
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def read_log(self) -> str:
        return self.log.read_text("utf-8", errors="replace")

    def start(self) -> None:
        """Start the program, which appends to its log."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    **owner.mark_environment(),
                    "HOME": str(self.log.parent),
                    "PATH": os.defpath,
                    **self._environment,
                },
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill the program as a power cut does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Let the program end; kill it when it does not."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
