"""Programs that a transaction runs while the daemon goes on answering."""

import subprocess
import tempfile
from collections.abc import Generator

from treenail_lab.machine.ostree.steps import EmitSignal, OperationError, PauseWork

Steps = Generator[EmitSignal | PauseWork, None, str]

_LOOK_S = 0.3
"""Each look takes tens of milliseconds of processor time under emulation."""


def run(*argv: str, failing: str = "") -> Steps:
    """The output of a program; `OperationError` with its complaint after the words ``failing``.

    A transaction that is cancelled ends the program.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=complaints, text=True
        )
        try:
            while process.poll() is None:
                yield PauseWork(_LOOK_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode:
            complaints.seek(0)
            lines = complaints.read().strip().splitlines() or ["it gave no reason"]
            raise OperationError(f"{failing}{lines[-1]}")
        output.seek(0)
        return output.read().strip()
