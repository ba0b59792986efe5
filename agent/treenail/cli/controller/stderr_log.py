"""The log of processes that run in pods."""

import logging
import sys

from treenail.clock import format_rfc3339
from treenail.escape import escape_line


class LineFormatter(logging.Formatter):
    """Formats a record as one line, which a traceback follows."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # of logging
        # A newline in a text from the cluster must not begin another line.
        message = escape_line(super().formatMessage(record))
        return f"{format_rfc3339(record.created)} {record.levelname:7} {message}"


def log_to_stderr(level: int) -> None:
    """Log to the standard error, one line for each record."""
    # kubectl logs shows the standard error of a pod; there is no journal.
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.addHandler(stream)
    root.setLevel(level)
    for chatty in ("urllib3", "kubernetes"):
        logging.getLogger(chatty).setLevel(max(level, logging.INFO))
