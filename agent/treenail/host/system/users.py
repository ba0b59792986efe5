"""Users and groups below a root: their numbers, and the password field of one."""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from treenail.clock import Clock
from treenail.errors import FileError
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.entries import Entries
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.root import Root

PASSWD = ("/etc/passwd", "/usr/lib/passwd")
GROUP = ("/etc/group", "/usr/lib/group")
"""The second ones are where an OSTree-based OS has those that it came with."""
SHADOW = "/etc/shadow"
_LOCK = "/etc/.pwd.lock"
_LOCK_S = 15.0
_PAUSE_S = 0.1
_DAY_S = 86_400

LOCKED = "*"
"""A password field that no password fits; logging in with a key still works."""


class Accounts:
    """The names a machine has for numbers, read once. Raises `FileError`."""

    def __init__(self, files: Files) -> None:
        self._users = _numbers(files, PASSWD)
        self._groups = _numbers(files, GROUP)
        self._user_names = _names(self._users)
        self._group_names = _names(self._groups)

    def has(self, user: str) -> bool:
        return user in self._users

    def uid(self, user: int | str) -> int:
        """The number of a user; a number is one already."""
        return _number(user, self._users, "user")

    def gid(self, group: int | str) -> int:
        """The number of a group; a number is one already."""
        return _number(group, self._groups, "group")

    def user(self, uid: int) -> str:
        """The name of a user, empty without one."""
        return self._user_names.get(uid, "")

    def group(self, gid: int) -> str:
        """The name of a group, empty without one."""
        return self._group_names.get(gid, "")


class Shadow:
    """The password fields below a root. Raises `FileError`.

    Changes are made under the lock that passwd and usermod take, and replace the file as a whole.
    """

    def __init__(self, root: Root, clock: Clock, disk: Disk | None = None) -> None:
        self._root = root
        self._clock = clock
        self._disk = disk or Disk()
        self._files = Files(root, self._disk)

    def line(self, user: str) -> str | None:
        """The user's line, a secret; None when there is none."""
        return next((line for line in self._lines() if line.split(":")[0] == user), None)

    def password_hash(self, user: str) -> str | None:
        """The user's password field, a secret; None when there is no line."""
        line = self.line(user)
        return None if line is None else [*line.split(":"), ""][1]

    def change(self, user: str, password_hash: str) -> None:
        """Have this password field, and today as the day it was changed."""
        if set(password_hash) & {":", "\n"}:
            raise FileError(f"the password hash of {user} has a character that it can't have")
        with self._locked():
            _, _, *rest = (self.line(user) or f"{user}:::0:99999:7:::").split(":")
            today = str(int(self._clock.now() // _DAY_S))
            self._put(user, ":".join([user, password_hash, today, *rest[1:]]))

    def put_back(self, user: str, line: str | None) -> None:
        """Have the line that `line` told, for the user alone; None for no line."""
        with self._locked():
            if self.line(user) != line:
                self._put(user, line)
            # A copy of all passwords that was never put to its place.
            self._files.sweep(SHADOW.rpartition("/")[0])

    def _put(self, user: str, line: str | None) -> None:
        lines = [each for each in self._lines() if each.split(":")[0] != user]
        lines = lines if line is None else self._replaced(user, line)
        found = Entries(self._disk).described(self._root.path(SHADOW))
        content = "".join(f"{each}\n" for each in lines).encode("utf-8", "surrogateescape")
        self._files.write(SHADOW, content, mode=found.mode or 0, uid=found.uid, gid=found.gid)

    def _replaced(self, user: str, line: str) -> list[str]:
        lines = list(self._lines())
        names = [each.split(":")[0] for each in lines]
        if user not in names:
            return [*lines, line]
        lines[names.index(user)] = line
        return lines

    def _lines(self) -> Iterator[str]:
        content = self._files.read(SHADOW) or b""
        yield from content.decode("utf-8", "surrogateescape").split("\n")[:-1]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        path = self._root.path(_LOCK)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FileError(f"can't lock {path}: {error.strerror}") from error
        try:
            self._lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        deadline = self._clock.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if self._clock.monotonic() >= deadline:
                    raise FileError(
                        f"another program has locked {self._root.path(SHADOW)} for {_LOCK_S:g} s",
                        remedy=f"see: fuser {self._root.path(_LOCK)}",
                    ) from error
                self._clock.sleep(_PAUSE_S)
            else:
                return


def locked(password_hash: str) -> bool:
    """Whether no password fits the field; an empty one fits everybody."""
    return password_hash.startswith(("*", "!"))


def _names(numbers: dict[str, int]) -> dict[int, str]:
    """The first name of each number."""
    return {number: name for name, number in reversed(numbers.items())}


def _numbers(files: Files, paths: tuple[str, ...]) -> dict[str, int]:
    """The names in these files, of which the first has precedence."""
    found: dict[str, int] = {}
    for path in paths:
        for line in (files.read(path) or b"").decode("utf-8", "surrogateescape").splitlines():
            name, _, rest = line.partition(":")
            number = rest.split(":")[1:2]
            if number and number[0].isdigit():
                found.setdefault(name, int(number[0]))
    return found


def _number(who: int | str, numbers: Mapping[str, int], kind: str) -> int:
    if isinstance(who, int):
        return who
    if who == "root":
        return 0
    if who not in numbers:
        raise FileError(
            f"there is no {kind} {who} on this machine",
            remedy=f"use the number of the {kind}, or have a sysusers.d file make it",
        )
    return numbers[who]
