"""An emulated journald: it reads the native protocol and writes one JSON object on each line.

Entries are below /var/log, so they survive reboots; each has its boot id. As in journald, a field
that was sent several times is a list. Fields with a leading underscore come from the journal, not
from the sender.
"""

import array
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from treenail_lab.machine import rootfs

JOURNAL_SOCKET = "run/systemd/journal/socket"
JOURNAL_FILE = "var/log/journal.jsonl"

JournalEntry = dict[str, str | list[str]]

_DATAGRAM_MAX = 1 << 20
_CREDENTIALS = struct.Struct("3i")
_FDS_MAX = 4
_JOIN_TIMEOUT_S = 5.0


class EmulatedJournal:
    """The journal of one machine; it listens between `start` and `stop`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._file = root / JOURNAL_FILE
        self._boot_id = ""
        self._write_lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._wake = -1
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen for entries of the current boot."""
        self._boot_id = rootfs.read_boot_id(self._root).replace("-", "")
        path = self._root / JOURNAL_SOCKET
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        listening.bind(str(path))
        listening.settimeout(0)
        waiting, self._wake = os.pipe()
        self._socket = listening
        self._thread = threading.Thread(
            target=self._serve_socket, args=(listening, waiting), name="journal", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Read the entries that were sent, then stop listening."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        os.close(self._wake)
        thread.join(_JOIN_TIMEOUT_S)
        (self._root / JOURNAL_SOCKET).unlink(missing_ok=True)

    def write_entry(self, fields: Mapping[str, str], *, pid: int = 1) -> None:
        """Add an entry of the machine itself (default: with systemd's pid)."""
        self._append_entry({**fields, "_PID": str(pid), "_UID": "0"})

    def read_entries(self, match: Mapping[str, str] | None = None) -> list[JournalEntry]:
        """Return the entries, oldest first, whose fields have all values in ``match``."""
        if not self._file.exists():
            return []
        wanted = (match or {}).items()
        with self._file.open(encoding="utf-8") as lines:
            entries: list[JournalEntry] = [
                json.loads(line) for line in lines if line.endswith("\n")
            ]
        return [entry for entry in entries if all(_has_value(entry, *item) for item in wanted)]

    def _serve_socket(self, listening: socket.socket, waiting: int) -> None:
        with listening:
            stopping = False
            while not stopping:
                readable, _, _ = select.select([listening.fileno(), waiting], [], [])
                stopping = waiting in readable
                while self._receive_entry(listening):
                    pass
        os.close(waiting)

    def _receive_entry(self, listening: socket.socket) -> bool:
        space = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(_FDS_MAX * 4)
        try:
            datagram, ancillary, _, _ = listening.recvmsg(_DATAGRAM_MAX, space)
        except BlockingIOError:
            return False
        trusted: JournalEntry = {}
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid, uid, _ = _CREDENTIALS.unpack(content[: _CREDENTIALS.size])
                trusted = {"_PID": str(pid), "_UID": str(uid)}
            elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                datagram = _read_files(content) or datagram
        fields = parse_datagram(datagram)
        if fields:
            self._append_entry({**fields, **trusted})
        return True

    def _append_entry(self, fields: Mapping[str, str | list[str]]) -> None:
        entry = {
            "__REALTIME_TIMESTAMP": str(time.time_ns() // 1000),
            "_BOOT_ID": self._boot_id,
            **fields,
        }
        with self._write_lock, self._file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(entry, ensure_ascii=False) + "\n")


def parse_datagram(datagram: bytes) -> JournalEntry:
    """Parse a message of journald's native protocol; malformed fields are skipped."""
    fields: JournalEntry = {}
    rest = datagram
    while rest:
        line, _, rest = rest.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            size = int.from_bytes(rest[:8], "little")
            if len(rest) < 8 + size:
                break
            value, rest = rest[8 : 8 + size], rest[8 + size + 1 :]
        key = name.decode("ascii", "replace")
        if _is_valid_name(key):
            _add_field(fields, key, value.decode("utf-8", "replace"))
    return fields


def _is_valid_name(name: str) -> bool:
    letters = name.replace("_", "")
    return (
        0 < len(name) <= 64
        and name[0].isalpha()
        and letters.isalnum()
        and letters.isascii()
        and name == name.upper()
    )


def _add_field(fields: JournalEntry, key: str, value: str) -> None:
    old = fields.get(key)
    if old is None:
        fields[key] = value
    elif isinstance(old, list):
        old.append(value)
    else:
        fields[key] = [old, value]


def _has_value(entry: JournalEntry, key: str, value: str) -> bool:
    recorded = entry.get(key, [])
    return value == recorded if isinstance(recorded, str) else value in recorded


def _read_files(content: bytes) -> bytes:
    """Read a message that was too large for a datagram and came as a sealed file."""
    numbers = array.array("i", content[: len(content) - len(content) % 4])
    parts = []
    for number in numbers:
        with os.fdopen(number, "rb") as file:
            file.seek(0)
            parts.append(file.read())
    return b"".join(parts)
