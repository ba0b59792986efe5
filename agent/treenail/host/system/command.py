"""Interface with which adapters run programs."""

from typing import Protocol


class CommandRunner(Protocol):
    """Runs a program; see `treenail.host.system.process.ProgramRunner`."""

    def run_command(self, argv: list[str], *, timeout_s: float, stdin: bytes = b"") -> bytes: ...
