"""The output of units in the journal, read with journalctl: journald has no D-Bus interface."""

import logging

from treenail import clocks, process, sanitize
from treenail.errors import CommandError
from treenail.host.filesystem.root_directory import Root

log = logging.getLogger(__name__)

_JOURNALCTL = "/usr/bin/journalctl"
_TIMEOUT_S = 20.0
_LINES = 40
_TEXT_LIMIT = 1000
_WAIT_S = 2.0
_RETRY_S = 0.2
_ERROR_PREFIX = "error:"


class SystemdJournal:
    """Reads the journal of this host."""

    def __init__(self, programs: process.ProgramRunner, root: Root, clock: clocks.Clock) -> None:
        self._programs = programs
        self._root = root
        self._clock = clock

    def read_error(self, invocation: str) -> str:
        """Return the last error, or else the last line, of a run of a unit; empty without any."""
        try:
            # journald may not have written the last lines yet.
            self._programs.run_command([self._find_journalctl(), "--sync"], timeout_s=_TIMEOUT_S)
        except CommandError as error:
            log.warning("cannot read the journal: %s", error)
            return ""
        end = self._clock.monotonic() + _WAIT_S
        # A busy journald may sync before it has read the pipe of the unit.
        while (
            not (lines := self._read_nonempty_lines(invocation)) and self._clock.monotonic() < end
        ):
            self._clock.sleep(_RETRY_S)
        errors = [line for line in lines if line.lower().startswith(_ERROR_PREFIX)]
        text = errors[-1][len(_ERROR_PREFIX) :] if errors else next(reversed(lines), "")
        return sanitize.sanitize_text(text.strip(), limit=_TEXT_LIMIT)

    def read_previous_boot_error(self, unit: str) -> str:
        """Return the first error that the unit logged in the previous boot; empty without any."""
        # Only journald writes fields with an underscore (systemd.journal-fields(7)), so no other
        # user can forge _UID. Without a persistent journal there is no previous boot
        # (journald.conf(5)).
        options = ("--quiet", "--no-pager", "-b", "-1", "-o", "cat", "_UID=0", "-u", unit)
        try:
            output = self._programs.run_command(
                [self._find_journalctl(), *options], timeout_s=_TIMEOUT_S
            )
        except CommandError as error:
            log.info("cannot read the journal of the previous boot: %s", error)
            return ""
        lines = output.decode("utf-8", "replace").splitlines()
        errors = (line for line in lines if line.lower().startswith(_ERROR_PREFIX))
        text = next(errors, "")[len(_ERROR_PREFIX) :].strip()
        return sanitize.sanitize_text(text, limit=_TEXT_LIMIT)

    def _read_nonempty_lines(self, invocation: str) -> list[str]:
        return list(filter(str.strip, self.read_output(invocation, limit=_LINES).splitlines()))

    def read_output(self, invocation: str, *, limit: int) -> str:
        """Return at most the last ``limit`` lines of a run of a unit; empty without any."""
        options = ("--quiet", "--no-pager", "-o", "cat", "-n", str(limit))
        command = [self._find_journalctl(), *options, f"_SYSTEMD_INVOCATION_ID={invocation}"]
        try:
            return self._programs.run_command(command, timeout_s=_TIMEOUT_S).decode(
                "utf-8", "replace"
            )
        except CommandError as error:
            log.warning("cannot read the journal: %s", error)
            return ""

    def _find_journalctl(self) -> str:
        path = self._root.resolve_path(_JOURNALCTL)
        return str(path) if path.exists() else "journalctl"
