"""What programs told the journal."""

import logging

from treenail.clock import Clock
from treenail.errors import CommandError
from treenail.host.filesystem.root import Root
from treenail.host.system.process import Programs
from treenail.host.system.sanitize import scrub

log = logging.getLogger(__name__)

_JOURNALCTL = "/usr/bin/journalctl"
_LIMIT_S = 20.0
_LINES = 40
_TEXT_LIMIT = 1000
_LATE_S = 2.0
_AGAIN_S = 0.2
_ERROR = "error:"


class Journal:
    """Asked by ``journalctl``, for journald itself answers nobody."""

    def __init__(self, programs: Programs, root: Root, clock: Clock) -> None:
        self._programs = programs
        self._root = root
        self._clock = clock

    def error_of(self, invocation: str) -> str:
        """The last error, or else the last line, of this run of a unit; empty if not to be had."""
        try:
            # What was written right before the end may still be on its way.
            self._programs.run([self._journalctl(), "--sync"], limit_s=_LIMIT_S)
        except CommandError as error:
            log.warning("can't read the journal: %s", error)
            return ""
        end = self._clock.monotonic() + _LATE_S
        # A busy journald may have synced before it has read all that is in a unit's pipe.
        while not (lines := self._lines(invocation)) and self._clock.monotonic() < end:
            self._clock.sleep(_AGAIN_S)
        errors = [line for line in lines if line.lower().startswith(_ERROR)]
        told = errors[-1][len(_ERROR) :] if errors else next(reversed(lines), "")
        return scrub(told.strip(), limit=_TEXT_LIMIT)

    def _lines(self, invocation: str) -> list[str]:
        return list(filter(str.strip, self.told_by(invocation, most=_LINES).splitlines()))

    def told_by(self, invocation: str, *, most: int) -> str:
        """The last lines, so many at most, of this run of a unit; empty if not to be had."""
        options = ("--quiet", "--no-pager", "-o", "cat", "-n", str(most))
        command = [self._journalctl(), *options, f"_SYSTEMD_INVOCATION_ID={invocation}"]
        try:
            return self._programs.run(command, limit_s=_LIMIT_S).decode("utf-8", "replace")
        except CommandError as error:
            log.warning("can't read the journal: %s", error)
            return ""

    def _journalctl(self) -> str:
        own = self._root.path(_JOURNALCTL)
        return str(own) if own.exists() else "journalctl"
