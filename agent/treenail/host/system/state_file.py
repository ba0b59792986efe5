"""The ledger and the crash record: JSON documents that survive crashes and power failures."""

import fcntl
import json
import logging
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from treenail import errors, sanitize
from treenail.encoding import json_text
from treenail.host.filesystem import atomic_files, root_directory

log = logging.getLogger(__name__)

Json = dict[str, object]

STATE_DIRECTORY = "/var/lib/treenail"
LEDGER_PATH = f"{STATE_DIRECTORY}/ledger.json"
CRASH_RECORD_PATH = f"{STATE_DIRECTORY}/crash-record.json"
LOCK_PATH = f"{STATE_DIRECTORY}/lock"
LEDGER_VERSION = 1
_LIMIT = 64 * 1024 * 1024
_MOVED_CONSEQUENCE = (
    "the agent then adopts the booted system as current and forgets an unfinished update"
)
_CHECKSUM = "checksum"


class Ledger:
    """The ledger document below a root, read and replaced atomically.

    An unreadable document is never removed or overwritten: reading raises, and the user decides.
    """

    def __init__(
        self, root: root_directory.Root, files: atomic_files.HostFiles | None = None
    ) -> None:
        self._root = root
        self._files = files or atomic_files.HostFiles(root)

    def read_document(self) -> Json | None:
        """Return the last document written, with its ``version``; None if there is none yet.

        A document without a checksum is accepted: an older version wrote it. Raises `LedgerError`
        when the document is damaged or has another version.
        """
        try:
            # Without root the directory cannot be searched.
            path = self._root.resolve_path(LEDGER_PATH)
            content = self._files.read_file(LEDGER_PATH, limit=_LIMIT)
        except errors.FileError as error:
            raise errors.LedgerError(str(error), remedy=error.remedy) from error
        if content is None:
            return None
        try:
            document: object = json_text.parse_json(content)
        except ValueError as error:
            raise errors.LedgerError(
                f"cannot read the ledger {path}: it is damaged: {error}",
                remedy=f"move {path} away and start the agent again; {_MOVED_CONSEQUENCE}",
            ) from error
        if not isinstance(document, dict):
            raise errors.LedgerError(
                f"cannot read the ledger {path}: it is damaged: it is not a JSON object",
                remedy=f"move {path} away and start the agent again; {_MOVED_CONSEQUENCE}",
            )
        version = document.get("version")
        if version != LEDGER_VERSION:
            raise errors.LedgerError(
                f"cannot read the ledger {path}: its version is {sanitize.quote_value(version)}, "
                f"this agent supports {LEDGER_VERSION}",
                remedy=f"install the treenail that wrote it, or move {path} away; "
                f"{_MOVED_CONSEQUENCE}",
            )
        if not _take_checksum(document):
            raise errors.LedgerError(
                f"cannot read the ledger {path}: it is damaged: its content differs from its "
                "checksum",
                remedy=f"move {path} away and start the agent again; {_MOVED_CONSEQUENCE}",
            )
        return document

    def write_document(self, document: Json) -> None:
        """Replace the document atomically, with our ``version`` and a checksum, and fsync it.

        Raises `LedgerError`; the earlier document is then intact.
        """
        versioned = {**document, "version": LEDGER_VERSION}
        try:
            self._files.write_file(LEDGER_PATH, _encode_with_checksum(versioned), mode=0o600)
        except errors.FileError as error:
            raise errors.LedgerError(str(error), remedy=error.remedy) from error

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Hold the lock of this root's agent; raise `LedgerError` with the PID of another holder.

        The kernel releases the lock when the process ends, also after SIGKILL.
        """
        try:
            path = self._root.resolve_path(LOCK_PATH)
            # A power failure ends the lock, so its directory needs no fsync.
            self._files.make_directory(STATE_DIRECTORY, mode=0o700, needs_fsync=False)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (errors.FileError, OSError) as error:
            raise errors.LedgerError(f"cannot lock the ledger: {error}") from error
        try:
            self._take_lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def find_lock_holder(self) -> int | None:
        """Return the PID of the lock's holder, 0 if unknown, None if it is free.

        Raises `LedgerError`.
        """
        try:
            path = self._root.resolve_path(LOCK_PATH)
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except errors.FileError as error:
            raise errors.LedgerError(
                f"cannot open the lock: {error}", remedy="run as root"
            ) from error
        except OSError as error:
            raise errors.LedgerError(
                f"cannot open the lock {error.filename}: {error.strerror}", remedy="run as root"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(descriptor, 20, 0).strip()
            return int(pid) if pid.isdigit() else 0
        finally:
            os.close(descriptor)
        return None

    def _take_lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            raise errors.LedgerError(
                f"cannot lock the ledger: another agent{f', PID {pid},' if pid.isdigit() else ''} "
                f"runs on {self._root.prefix}",
                remedy="wait for it to finish, or stop the service: systemctl stop treenail",
            ) from error
        except OSError as error:
            raise errors.LedgerError(f"cannot lock the ledger: {error}") from error
        # The PID is for error messages only: the agent must start on a full disk too.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


class CrashRecordFile:
    """The crash record below a root. It is readable when the ledger is not."""

    def __init__(
        self, root: root_directory.Root, files: atomic_files.HostFiles | None = None
    ) -> None:
        self._files = files or atomic_files.HostFiles(root)

    def read_document(self) -> Json | None:
        """Return the last document written; None without one, and for a damaged one."""
        try:
            content = self._files.read_file(CRASH_RECORD_PATH)
            document: object = None if content is None else json_text.parse_json(content)
        except (errors.FileError, ValueError) as error:
            log.warning("cannot read the crash record: %s", error)
            return None
        if not isinstance(document, dict):
            return None
        if not _take_checksum(document):
            log.warning("cannot read the crash record: its content differs from its checksum")
            return None
        return document

    def write_document(self, document: Json) -> None:
        """Replace the document atomically and fsync it. Raises `FileError`."""
        self._files.write_file(CRASH_RECORD_PATH, _encode_with_checksum(document), mode=0o600)

    def remove_document(self) -> None:
        """Remove the document, if there is one. Raises `FileError`."""
        self._files.remove_file(CRASH_RECORD_PATH)


def _encode_with_checksum(document: Json) -> bytes:
    """Return the file of a document; the last key is the checksum of the others."""
    complete = {**document, _CHECKSUM: _compute_checksum(document)}
    return json.dumps(complete, indent=1, allow_nan=False).encode() + b"\n"


def _take_checksum(document: Json) -> bool:
    """Remove the checksum; return whether it is right, or was never there."""
    checksum = document.pop(_CHECKSUM, None)
    return checksum is None or checksum == _compute_checksum(document)


def _compute_checksum(document: Json) -> str:
    # Against damage, not against an attacker: hashlib would load libcrypto for each command.
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return f"crc32:{zlib.crc32(canonical.encode()):08x}"
