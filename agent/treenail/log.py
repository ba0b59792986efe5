"""Log to journald with its native protocol, or to a stream on a host without a journal.

One event is one line. Milestones of an update have a `MessageId` in the record's extra::

    log.info("staged %s", image, extra={"message_id": MessageId.STAGED})

``journalctl -x`` explains it from systemd/treenail.catalog. Every record has the fields of
`set_log_context`, so that ``journalctl TREENAIL_UPDATE=…`` shows one update across its reboot.

Processes in pods log to the standard error.
"""

import errno
import fcntl
import logging
import os
import socket
import struct
import sys
from contextlib import suppress
from enum import StrEnum
from typing import TextIO

from treenail import clocks, sanitize

JOURNAL_SOCKET = "/run/systemd/journal/socket"
SYSLOG_IDENTIFIER = "treenail"
_SEND_TIMEOUT_S = 0.1  # journald may be stopped or blocked; logging must not block the agent
_WITHHELD = "…"
_MEMFD_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class MessageId(StrEnum):
    """MESSAGE_ID of a milestone in the journal, for programs. Never change a released value."""

    UPDATE_STARTED = "d002894c814d460787acd11bfbbee982"
    STAGED = "136d74d26ce64c4ca1d1db48b1f10e2d"
    DRAINED = "52ee16a240104fa8888519700a6e041d"
    APPLIED = "5a3e0b61172847d2a2166d095b06e5ca"
    REBOOTING = "f66917d6b15d4a50a977e978d5798579"
    BOOT_VERIFIED = "a9fcff345e124bc280704fc7abd32217"
    UPDATE_DONE = "4d9234e608c648e5ac9f2828b8fa50d2"
    UPDATE_UNDONE = "264a490e0a1c48508b38f80eac65d320"
    DEGRADED = "7cca1c2752614e668c7552151a5317d9"
    CREDENTIALS_CHANGED = "d415c932d7f94ed697be937c7c6397b3"
    CREDENTIALS_INVALID = "8c8b4d4ae4ce4a8487b6f7701e9c24a0"
    UPDATE_CANCELLED = "542ec875ba4847c7830c5fe7f586b8e2"
    DRIFT_DETECTED = "3f0c6b1d8a7e4c0f9b52d6e1a4870c35"
    DRIFT_REPAIRED = "9d1e57a2c6b84f3aa0e47b9265c8f1d4"
    HEALTH_CHECK_FAILED = "1f5db34cdaba718c3878e71b7a369b52"
    ROLLING_BACK = "ffd4f8fd2e9c7b7d5ab83bfc367eb2a7"


def configure_logging(
    socket_path: str | os.PathLike[str], *, level: int, stream: TextIO
) -> "JournalHandler":
    """Send every record from ``level`` on to the journal socket, or else to the stream.

    A further call replaces the handler.
    """
    handler = JournalHandler(socket_path, stream)
    root = logging.getLogger()
    for earlier in _find_journal_handlers():
        root.removeHandler(earlier)
        earlier.close()
    root.addHandler(handler)
    root.setLevel(level)
    return handler


def configure_stream_logging(stream: TextIO, *, level: int) -> None:
    """Send every record from ``level`` on to a stream that systemd connects to the journal.

    Each line begins with its priority (sd-daemon(3)). No record has fields of its own.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_PriorityFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level)


class _PriorityFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = sanitize.withhold_forms(super().format(record), _WITHHELD)
        lines = text.splitlines() or [""]
        return "\n".join(f"<{_compute_priority(record.levelno)}>{line}" for line in lines)


def set_log_context(*, update: str = "", phase: str = "", config: str = "") -> None:
    """Set the fields of all further records, of every thread; an empty value removes a field."""
    fields = (
        ("TREENAIL_UPDATE", update),
        ("TREENAIL_PHASE", phase),
        ("TREENAIL_CONFIG", config),
    )
    for handler in _find_journal_handlers():
        handler.context = tuple((name, value) for name, value in fields if value)


class JournalHandler(logging.Handler):
    """Send native datagrams to journald; write a record that journald rejects to the stream.

    Each record connects again, so that the handler finds a restarted journald automatically.
    The handler never raises into the caller.
    """

    def __init__(self, socket_path: str | os.PathLike[str], stream: TextIO) -> None:
        super().__init__()
        self.context: tuple[tuple[str, str], ...] = ()
        self._address = os.fspath(socket_path)
        self._stream = stream
        self._formatter = logging.Formatter()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(_SEND_TIMEOUT_S)

    def emit(self, record: logging.LogRecord) -> None:
        context = self.context
        try:
            message = sanitize.withhold_forms(self._formatter.format(record), _WITHHELD)
        except Exception:  # noqa: BLE001 - __str__ of an argument may raise anything
            message = f"cannot format {record.msg!r} with its arguments"
        fields = [*_build_fields(record, message), *context]
        try:
            self._send_datagram(b"".join(_encode_field(name, value) for name, value in fields))
        except OSError:
            suffix = "".join(f" {name}={value}" for name, value in context)
            self._print_line(
                f"{clocks.format_rfc3339(record.created)} {record.levelname:7} {message}{suffix}\n"
            )

    def close(self) -> None:
        self._socket.close()
        super().close()

    def _send_datagram(self, datagram: bytes) -> None:
        try:
            self._socket.sendto(datagram, self._address)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            self._send_memfd(datagram)

    def _send_memfd(self, datagram: bytes) -> None:
        """Send a record beyond the datagram limit as a sealed memfd, as sd_journal_send does."""
        descriptor = os.memfd_create("treenail-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.pwrite(descriptor, datagram, 0)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _MEMFD_SEALS)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))
            self._socket.sendmsg([], [rights], 0, self._address)
        finally:
            os.close(descriptor)

    def _print_line(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the stream may be closed; no other output is left
            self._stream.write(text)
            self._stream.flush()


def _find_journal_handlers() -> list[JournalHandler]:
    return [
        handler for handler in logging.getLogger().handlers if isinstance(handler, JournalHandler)
    ]


def _build_fields(record: logging.LogRecord, message: str) -> list[tuple[str, str]]:
    fields = [
        ("MESSAGE", message),
        ("PRIORITY", _compute_priority(record.levelno)),
        ("SYSLOG_IDENTIFIER", SYSLOG_IDENTIFIER),
        ("CODE_FILE", record.pathname),
        ("CODE_LINE", str(record.lineno)),
        ("CODE_FUNC", record.funcName or ""),
    ]
    message_id: MessageId | None = getattr(record, "message_id", None)
    return [*fields, ("MESSAGE_ID", message_id)] if message_id else fields


def _compute_priority(level: int) -> str:
    """Return the syslog priority of a logging level."""
    for least, priority in ((50, "2"), (40, "3"), (30, "4"), (20, "6")):
        if level >= least:
            return priority
    return "7"


def _encode_field(name: str, value: str) -> bytes:
    """Encode one field; a value with newlines needs the binary form with its length."""
    content = value.encode("utf-8", "backslashreplace")
    if b"\n" not in content:
        return b"%s=%s\n" % (name.encode(), content)
    return b"%s\n%s%s\n" % (name.encode(), struct.pack("<Q", len(content)), content)


class LineFormatter(logging.Formatter):
    """Formats a record as one line, which a traceback follows."""

    def format(self, record: logging.LogRecord) -> str:
        return sanitize.withhold_forms(super().format(record), _WITHHELD)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # of logging
        # A newline in a text from the cluster must not begin another line.
        message = sanitize.escape_line(super().formatMessage(record))
        return f"{clocks.format_rfc3339(record.created)} {record.levelname:7} {message}"


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
