"""Runs ``treenail-controller status --watch`` on this terminal while the demo goes on."""

import os
import subprocess
import time
from pathlib import Path
from typing import TextIO

from treenail.process import stop_process
from treenail_lab.controllers import CONTROLLER_COMMAND
from treenail_lab.lifetime.owner import owner

_INTERVAL_S = 0.2
_LAST_LOOK_S = 4 * _INTERVAL_S
_STOP_TIMEOUT_S = 10.0


class StatusWatch:
    """The command as a user runs it, with a shorter interval."""

    def __init__(self, kubeconfig: Path, stream: TextIO) -> None:
        self._kubeconfig = kubeconfig
        self._stream = stream
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the command; it draws its table until `stop`."""
        self._stream.flush()
        self._process = subprocess.Popen(
            [
                *CONTROLLER_COMMAND,
                "status",
                "--watch",
                f"--interval={_INTERVAL_S}",
                f"--kubeconfig={self._kubeconfig}",
            ],
            env={**os.environ, **owner.mark_environment()},
            stdin=subprocess.DEVNULL,
            stdout=self._stream.fileno(),
            # Ctrl-C reaches the demo, which stops the command.
            start_new_session=True,
        )

    def finish(self) -> None:
        """Let the command draw the last state, and stop it."""
        if self._process is not None and self._process.poll() is None:
            time.sleep(_LAST_LOOK_S)
        self.stop()

    def stop(self) -> None:
        """Stop the command; nothing happens when it does not run."""
        process, self._process = self._process, None
        if process is None:
            return
        stop_process(process, _STOP_TIMEOUT_S)
