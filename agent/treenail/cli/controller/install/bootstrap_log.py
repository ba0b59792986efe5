"""The log of the stage ``bootstrap``: each line has the ID of the installation."""

import logging
import sys
from collections.abc import Mapping
from logging.handlers import RotatingFileHandler

from treenail.cli.controller.stderr_log import LineFormatter
from treenail.escape import escape_line
from treenail.installer.inputs.install_directory import InstallDirectory
from treenail.installer.inputs.install_files import InstallFiles

_SIZE_LIMIT = 16 * 1024 * 1024
_PRIORITIES = ((50, 2), (40, 3), (30, 4), (20, 6))
"""Of syslog, by the lowest level of logging."""
_REQUESTS = "treenail.provisioning"


class BootstrapLog:
    """Logs to the standard error, and to files that a log bundle contains.

    ``config-server.log`` has the requests of machines alone, ``bootstrap.log`` everything.
    """

    def __init__(
        self,
        directory: InstallDirectory,
        files: InstallFiles,
        level: int,
        environ: Mapping[str, str],
    ) -> None:
        """Begin to log; raise `FileError` when the directory of the logs cannot be made."""
        files.make_directory(directory.logs)
        self._install_id = ""
        stream = logging.StreamHandler(sys.stderr)
        # systemd sets it for a standard error that leads to the journal (systemd.exec(5)).
        is_journal = "JOURNAL_STREAM" in environ
        stream.setFormatter(_JournalFormatter(self) if is_journal else _InstallFormatter(self))
        root = logging.getLogger()
        root.addHandler(stream)
        root.setLevel(level)
        for chatty in ("urllib3", "kubernetes"):
            logging.getLogger(chatty).setLevel(max(level, logging.INFO))
        for name, logger in (("bootstrap.log", ""), ("config-server.log", _REQUESTS)):
            handler = _LogFile(
                directory.logs / name, maxBytes=_SIZE_LIMIT, backupCount=1, delay=True
            )
            handler.setFormatter(_InstallFormatter(self))
            logging.getLogger(logger).addHandler(handler)

    @property
    def install_id(self) -> str:
        """The ID; empty before `begin_installation`."""
        return self._install_id

    def begin_installation(self, install_id: str) -> None:
        """Add the ID to each line from now on."""
        self._install_id = install_id


class _LogFile(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # of logging
        """Do nothing: on a full disk the standard error still has the line."""


class _InstallFormatter(LineFormatter):
    """A line with time, level and ID."""

    def __init__(self, journal: BootstrapLog) -> None:
        super().__init__()
        self._journal = journal

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # of logging
        line = super().formatMessage(record)
        return f"{self._journal.install_id} {line}" if self._journal.install_id else line


class _JournalFormatter(logging.Formatter):
    """A line with its priority (sd-daemon(3)) and the ID; the journal adds the time."""

    def __init__(self, journal: BootstrapLog) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        found = (priority for level, priority in _PRIORITIES if record.levelno >= level)
        install_id = self._journal.install_id
        begin = f"<{next(found, 7)}>{install_id + ' ' if install_id else ''}"
        return "\n".join(begin + escape_line(line) for line in super().format(record).splitlines())
