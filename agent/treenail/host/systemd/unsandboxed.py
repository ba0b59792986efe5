"""Programs that need more of the machine than the agent's sandbox leaves, run by systemd."""

import itertools
import os
from collections.abc import Callable, Sequence

from treenail.errors import CommandError
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root
from treenail.host.systemd.journal import SystemdJournal
from treenail.host.systemd.transient import TransientJob, TransientUnits

_OUTPUT_PREFIX = "/run/treenail/told"
_OUTPUT_LIMIT = 1024 * 1024
_REDIRECT_SCRIPT = 'exec "$@" >"$0"'


class UnsandboxedRunner:
    """Runs them to their end, as `Programs` does, and reads what they print; for one thread."""

    def __init__(
        self,
        units: TransientUnits,
        journal: SystemdJournal,
        root: Root,
        *,
        heartbeat: Callable[[], None],
    ) -> None:
        """``heartbeat`` is called once a second while something runs."""
        self._units = units
        self._journal = journal
        self._root = root
        self._files = HostFiles(root)
        self._heartbeat = heartbeat
        self._numbers = itertools.count(1)

    def run_command(self, argv: Sequence[str], *, timeout_s: float) -> bytes:
        """What the program wrote to its standard output, at most 1 MiB.

        Raises `CommandError` when it fails or is not done in time, `BusError`, `FileError`.
        """
        # Unlike the agent's work nobody joins it, so it has a name that nobody else has.
        name = f"{os.getpid()}-{next(self._numbers)}"
        output = f"{_OUTPUT_PREFIX}-{name}"
        self._files.write_file(output, b"", mode=0o600)
        try:
            into_file = (
                "/bin/sh",
                "-c",
                _REDIRECT_SCRIPT,
                str(self._root.resolve_path(output)),
                *argv,
            )
            what = f"treenail: ask {argv[0].rpartition('/')[2]}"
            job = TransientJob(f"treenail-ask-{name}.service", what, into_file, timeout_s)
            ended = self._units.run_once(job, self._heartbeat)
            if ended.result == "timeout":
                raise CommandError(f"{argv[0]} was not done within {timeout_s:g} s")
            if not ended.is_done:
                told = self._journal.read_error(ended.invocation)
                raise CommandError(
                    f"{argv[0]} failed with exit code {ended.status}{': ' if told else ''}{told}",
                    stderr=told,
                )
            return self._files.read_file(output, limit=_OUTPUT_LIMIT) or b""
        finally:
            self._files.remove_file(output)
