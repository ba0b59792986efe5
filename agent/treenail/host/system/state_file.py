"""The agent's memory: one JSON document that outlives crashes and power cuts."""

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
    "the agent then takes the booted system for the current one and forgets an update half-way"
)


class Ledger:
    """The document below a root, read and replaced as a whole.

    A document that can't be read is never dropped or overwritten on the quiet: reading raises,
    and a person decides.
    """

    def __init__(self, root: Root, files: HostFiles | None = None) -> None:
        self._root = root
        self._files = files or HostFiles(root)

    def read_document(self) -> Json | None:
        """The document last written, with its ``version``; None when there was none yet.

        Raises `LedgerError` when it is damaged or of a newer version.
        """
        path = self._root.resolve_path(LEDGER_PATH)
        try:
            content = self._files.read_file(LEDGER_PATH, limit=_LIMIT)
        except FileError as error:
            raise LedgerError(f"the ledger: {error}", remedy=error.remedy) from error
        if content is None:
            return None
        try:
            document: object = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise LedgerError(
                f"the ledger {path} is damaged: {error}",
                remedy=f"move {path} away and start the agent again; {_MOVED_CONSEQUENCE}",
            ) from error
        if not isinstance(document, dict):
            raise LedgerError(
                f"the ledger {path} is damaged: it holds no JSON object",
                remedy=f"move {path} away and start the agent again; {_MOVED_CONSEQUENCE}",
            )
        version = document.get("version")
        if version != LEDGER_VERSION:
            raise LedgerError(
                f"the ledger {path} is of version {version!r}, and this agent reads {LEDGER_VERSION}",
                remedy=f"install the treenail that wrote it, or move {path} away; {_MOVED_CONSEQUENCE}",
            )
        return document

    def write_document(self, document: Json) -> None:
        """Return once the document, with our ``version``, would outlive a power cut.

        Until then the earlier one is there, whole. Raises `LedgerError`.
        """
        versioned = {**document, "version": LEDGER_VERSION}
        content = json.dumps(versioned, indent=1, allow_nan=False).encode() + b"\n"
        try:
            self._files.write_file(LEDGER_PATH, content, mode=0o600)
        except FileError as error:
            raise LedgerError(f"the ledger: {error}", remedy=error.remedy) from error

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Be the only agent on this root; raises `LedgerError` that names the one there is.

        The kernel ends the lock with the process, however that ends.
        """
        path = self._root.resolve_path(LOCK_PATH)
        try:
            # No lock outlives a power cut, nor has its directory to.
            self._files.make_directory(STATE_DIRECTORY, mode=0o700, needs_fsync=False)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileError, OSError) as error:
            raise LedgerError(f"can't lock the ledger: {error}") from error
        try:
            self._take_lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def find_lock_holder(self) -> int | None:
        """The process that has the lock; None when none has. Raises `LedgerError`."""
        path = self._root.resolve_path(LOCK_PATH)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LedgerError(
                f"can't tell whether an agent runs: {path}: {error.strerror}", remedy="run as root"
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
                f"another agent{f', process {pid},' if pid.isdigit() else ''} "
                f"works on {self._root.prefix}",
                remedy="let it finish; if it is the service, stop that: systemctl stop treenail",
            ) from error
        except OSError as error:
            raise LedgerError(f"can't lock the ledger: {error}") from error
        # Who it is is for people; an agent must start on a disk that is full, too.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
