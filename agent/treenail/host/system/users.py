"""The password hashes of users below a root."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from treenail import clocks, errors
from treenail.host.filesystem import atomic_files, entries, root_directory
from treenail.host.filesystem.disk import Disk

SHADOW_FILE = "/etc/shadow"
_LOCK_FILE = "/etc/.pwd.lock"
_LOCK_S = 15.0
_RETRY_S = 0.1
_DAY_S = 86_400


class ShadowFile:
    """The shadow file below a root. Raises `FileError`.

    Changes replace the file atomically, under the lock of lckpwdf(3) that passwd and usermod hold.
    """

    def __init__(
        self, root: root_directory.Root, clock: clocks.Clock, disk: Disk | None = None
    ) -> None:
        self._root = root
        self._clock = clock
        self._disk = disk or Disk()
        self._files = atomic_files.HostFiles(root, self._disk)

    def read_line(self, user: str) -> str | None:
        """Return the user's line, a secret; None when there is none."""
        return next((line for line in self._read_lines() if line.split(":")[0] == user), None)

    def read_password_hash(self, user: str) -> str | None:
        """Return the user's password hash, a secret; None when there is no line."""
        line = self.read_line(user)
        return None if line is None else [*line.split(":"), ""][1]

    def set_password_hash(self, user: str, password_hash: str) -> None:
        """Set the password hash, and today as the date of the last change."""
        if set(password_hash) & {":", "\n"}:
            raise errors.FileError(
                f"cannot set the password hash of {user}: it contains a colon or a newline"
            )
        with self._hold_lock():
            # A new line has the usual values of login.defs(5): PASS_MIN_DAYS, PASS_MAX_DAYS and
            # PASS_WARN_AGE.
            _, _, *rest = (self.read_line(user) or f"{user}:::0:99999:7:::").split(":")
            today = str(int(self._clock.now() // _DAY_S))
            self._write_line(user, ":".join([user, password_hash, today, *rest[1:]]))

    def restore_line(self, user: str, line: str | None) -> None:
        """Restore the line from `read_line` for this user only; None removes it."""
        with self._hold_lock():
            if self.read_line(user) != line:
                self._write_line(user, line)
            # A crash during the write leaves a copy of all password hashes.
            self._files.remove_leftovers(SHADOW_FILE.rpartition("/")[0])

    def _write_line(self, user: str, line: str | None) -> None:
        lines = [row for row in self._read_lines() if row.split(":")[0] != user]
        lines = lines if line is None else self._replace_line(user, line)
        attributes = entries.EntryWriter(self._disk).describe_directory(
            self._root.resolve_path(SHADOW_FILE)
        )
        content = "".join(f"{row}\n" for row in lines).encode("utf-8", "surrogateescape")
        self._files.write_file(
            SHADOW_FILE, content, mode=attributes.mode or 0, uid=attributes.uid, gid=attributes.gid
        )

    def _replace_line(self, user: str, line: str) -> list[str]:
        lines = list(self._read_lines())
        names = [row.split(":")[0] for row in lines]
        if user not in names:
            return [*lines, line]
        lines[names.index(user)] = line
        return lines

    def _read_lines(self) -> Iterator[str]:
        content = self._files.read_file(SHADOW_FILE) or b""
        # The C library reads a last line without a newline, too.
        text = content.decode("utf-8", "surrogateescape").removesuffix("\n")
        yield from text.split("\n") if text else ()

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        path = self._root.resolve_path(_LOCK_FILE)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise errors.FileError(f"cannot lock {path}: {error.strerror}") from error
        try:
            self._wait_for_lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _wait_for_lock(self, descriptor: int) -> None:
        deadline = self._clock.monotonic() + _LOCK_S
        while True:
            try:
                # A record lock, as lckpwdf(3) takes one: it would not notice a lock of flock(2).
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if self._clock.monotonic() >= deadline:
                    path = self._root.resolve_path(_LOCK_FILE)
                    raise errors.FileError(
                        f"cannot lock {path}: another program has held it for {_LOCK_S:g} s",
                        remedy=f"see: fuser {path}",
                    ) from error
                self._clock.sleep(_RETRY_S)
            else:
                return


def is_locked(password_hash: str) -> bool:
    """Whether the account accepts no password; an empty hash accepts any, see shadow(5)."""
    return password_hash.startswith(("*", "!"))
