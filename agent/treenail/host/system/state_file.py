"""The ledger file: one JSON document that survives crashes and power failures."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from treenail.errors import FileError, LedgerError
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root

Json = dict[str, object]

STATE_DIRECTORY = "/var/lib/treenail"
LEDGER_PATH = f"{STATE_DIRECTORY}/ledger.json"
LOCK_PATH = f"{STATE_DIRECTORY}/lock"
LEDGER_VERSION = 1
_LIMIT = 64 * 1024 * 1024
_MOVED_CONSEQUENCE = (
    "the agent then adopts the booted system as current and forgets an unfinished update"
)


class Ledger:
    """The ledger document below a root, read and replaced atomically.

    An unreadable document is never removed or overwritten: reading raises, and the user decides.
    """

    def __init__(self, root: Root, files: HostFiles | None = None) -> None:
        self._root = root
        self._files = files or HostFiles(root)

    def read_document(self) -> Json | None:
        """Return the last document written, with its ``version``; None if there is none yet.

        Raises `LedgerError` when it is damaged or has another version.
        """
        path = self._root.resolve_path(LEDGER_PATH)
        try:
            content = self._files.read_file(LEDGER_PATH, limit=_LIMIT)
        except FileError as error:
            raise LedgerError(str(error), remedy=error.remedy) from error
        if content is None:
            return None
        try:
            document: object = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise LedgerError(
                f"cannot read the ledger {path}: it is damaged: {error}",
                remedy=f"move {path} away and start the agent again; {_MOVED_CONSEQUENCE}",
            ) from error
        if not isinstance(document, dict):
            raise LedgerError(
                f"cannot read the ledger {path}: it is damaged: it is not a JSON object",
                remedy=f"move {path} away and start the agent again; {_MOVED_CONSEQUENCE}",
            )
        version = document.get("version")
        if version != LEDGER_VERSION:
            raise LedgerError(
                f"cannot read the ledger {path}: its version is {version!r}, "
                f"this agent supports {LEDGER_VERSION}",
                remedy=f"install the treenail that wrote it, or move {path} away; "
                f"{_MOVED_CONSEQUENCE}",
            )
        return document

    def write_document(self, document: Json) -> None:
        """Replace the document atomically, with our ``version``, and fsync it.

        Raises `LedgerError`; the earlier document is then intact.
        """
        versioned = {**document, "version": LEDGER_VERSION}
        content = json.dumps(versioned, indent=1, allow_nan=False).encode() + b"\n"
        try:
            self._files.write_file(LEDGER_PATH, content, mode=0o600)
        except FileError as error:
            raise LedgerError(str(error), remedy=error.remedy) from error

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Hold the lock of this root's agent; raise `LedgerError` with the PID of another holder.

        The kernel releases the lock when the process ends, also after SIGKILL.
        """
        path = self._root.resolve_path(LOCK_PATH)
        try:
            # A power failure ends the lock, so its directory needs no fsync.
            self._files.make_directory(STATE_DIRECTORY, mode=0o700, needs_fsync=False)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileError, OSError) as error:
            raise LedgerError(f"cannot lock the ledger: {error}") from error
        try:
            self._take_lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def find_lock_holder(self) -> int | None:
        """Return the PID of the lock's holder, 0 if unknown, None if it is free.

        Raises `LedgerError`.
        """
        path = self._root.resolve_path(LOCK_PATH)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LedgerError(
                f"cannot open the lock {path}: {error.strerror}", remedy="run as root"
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
            raise LedgerError(
                f"cannot lock the ledger: another agent{f', PID {pid},' if pid.isdigit() else ''} "
                f"runs on {self._root.prefix}",
                remedy="wait for it to finish, or stop the service: systemctl stop treenail",
            ) from error
        except OSError as error:
            raise LedgerError(f"cannot lock the ledger: {error}") from error
        # The PID is for error messages only: the agent must start on a full disk too.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
