"""Programs that systemd runs for the agent, outside the sandbox of its unit."""

import itertools
import os
from collections.abc import Callable, Sequence

from treenail.errors import CommandError, CommandTimeoutError
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root
from treenail.host.systemd.journal import SystemdJournal
from treenail.host.systemd.transient import TransientJob, TransientUnits

_OUTPUT_PREFIX = "/run/treenail/output"
_OUTPUT_LIMIT = 1024 * 1024
_REDIRECT_SCRIPT = 'exec "$@" >"$0"'


class UnsandboxedRunner:
    """Runs programs to their end, as `ProgramRunner` does, and returns their output.

    For one thread.
    """

    def __init__(
        self,
        units: TransientUnits,
        journal: SystemdJournal,
        root: Root,
        *,
        heartbeat: Callable[[], None],
    ) -> None:
        """``heartbeat`` is called once a second while a program runs."""
        self._units = units
        self._journal = journal
        self._root = root
        self._files = HostFiles(root)
        self._heartbeat = heartbeat
        self._numbers = itertools.count(1)

    def run_command(self, argv: Sequence[str], *, timeout_s: float) -> bytes:
        """Return the standard output of the program, at most 1 MiB.

        Raises `CommandError` when it fails or exceeds ``timeout_s``, `BusError`, `FileError`.
        """
        # A unique name: unlike a job of the agent, no later process joins it.
        name = f"{os.getpid()}-{next(self._numbers)}"
        output = f"{_OUTPUT_PREFIX}-{name}"
        self._files.write_file(output, b"", mode=0o600)
        try:
            # The shell writes the output to a file that this process can read.
            redirected = ("/bin/sh", "-c", _REDIRECT_SCRIPT, str(self._root.resolve_path(output)))
            description = f"treenail: run {argv[0].rpartition('/')[2]}"
            unit = f"treenail-ask-{name}.service"
            job = TransientJob(unit, description, (*redirected, *argv), timeout_s)
            run = self._units.run_once(job, self._heartbeat)
            if run.result == "timeout":
                raise CommandTimeoutError(f"{argv[0]} did not exit within {timeout_s:g} s")
            if not run.is_done:
                stderr = self._journal.read_error(run.invocation)
                raise CommandError(
                    f"{argv[0]} failed with exit code {run.status}{': ' if stderr else ''}{stderr}",
                    stderr=stderr,
                )
            return self._files.read_file(output, limit=_OUTPUT_LIMIT) or b""
        finally:
            self._files.remove_file(output)
