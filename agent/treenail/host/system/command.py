"""The one interface by which adapters run programs."""

from typing import Protocol


class Programs(Protocol):
    """Runs a program; see `treenail.host.system.process.Programs`."""

    def run(self, argv: list[str], *, limit_s: float, stdin: bytes = b"") -> bytes: ...
