"""Programs that need more of the machine than the agent's sandbox leaves, run by systemd."""

import itertools
import os
from collections.abc import Callable, Sequence

from treenail.errors import CommandError
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.root import Root
from treenail.host.systemd.journal import Journal
from treenail.host.systemd.transient import Job, TransientUnits

_OUTPUT = "/run/treenail/told"
_OUTPUT_LIMIT = 1024 * 1024
_INTO_FILE = 'exec "$@" >"$0"'


class Outside:
    """Runs them to their end, as `Programs` does, and reads what they print; for one thread."""

    def __init__(
        self,
        units: TransientUnits,
        journal: Journal,
        root: Root,
        *,
        alive: Callable[[], None],
    ) -> None:
        """``alive`` is called once a second while something runs."""
        self._units = units
        self._journal = journal
        self._root = root
        self._files = Files(root)
        self._alive = alive
        self._numbers = itertools.count(1)

    def run(self, argv: Sequence[str], *, limit_s: float) -> bytes:
        """What the program wrote to its standard output, at most 1 MiB.

        Raises `CommandError` when it fails or is not done in time, `BusError`, `FileError`.
        """
        # Unlike the agent's work nobody joins it, so it has a name that nobody else has.
        name = f"{os.getpid()}-{next(self._numbers)}"
        output = f"{_OUTPUT}-{name}"
        self._files.write(output, b"", mode=0o600)
        try:
            into_file = ("/bin/sh", "-c", _INTO_FILE, str(self._root.path(output)), *argv)
            what = f"treenail: ask {argv[0].rpartition('/')[2]}"
            job = Job(f"treenail-ask-{name}.service", what, into_file, limit_s)
            ended = self._units.once(job, self._alive)
            if ended.result == "timeout":
                raise CommandError(f"{argv[0]} was not done within {limit_s:g} s")
            if not ended.done:
                told = self._journal.error_of(ended.invocation)
                raise CommandError(
                    f"{argv[0]} failed with exit code {ended.status}{': ' if told else ''}{told}",
                    told=told,
                )
            return self._files.read(output, limit=_OUTPUT_LIMIT) or b""
        finally:
            self._files.remove(output)
