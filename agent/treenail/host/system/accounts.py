"""Names and IDs of the users and groups below a root."""

from collections.abc import Mapping
from dataclasses import replace

from treenail.errors import FileError
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.observations import PathEntry

PASSWD_FILES = ("/etc/passwd", "/usr/lib/passwd")
GROUP_FILES = ("/etc/group", "/usr/lib/group")
"""An OSTree-based OS has the users and groups of its image in /usr/lib (nss-altfiles)."""


class Accounts:
    """Names and IDs of users and groups, read once. Raises `FileError`."""

    def __init__(self, files: HostFiles) -> None:
        self._users = _read_numbers(files, PASSWD_FILES)
        self._groups = _read_numbers(files, GROUP_FILES)
        self._user_names = _invert_numbers(self._users)
        self._group_names = _invert_numbers(self._groups)

    def has_user(self, user: str) -> bool:
        return user in self._users

    def find_uid(self, user: int | str) -> int:
        """Return the UID of a user name; return a UID unchanged."""
        return _find_number(user, self._users, "user")

    def find_gid(self, group: int | str) -> int:
        """Return the GID of a group name; return a GID unchanged."""
        return _find_number(group, self._groups, "group")

    def name_owner(self, entry: PathEntry) -> PathEntry:
        """Return the entry with the names of its user and group, where they have names."""
        return replace(
            entry,
            user=self._user_names.get(entry.uid, ""),
            group=self._group_names.get(entry.gid, ""),
        )


def _invert_numbers(numbers: dict[str, int]) -> dict[int, str]:
    """Map each ID to its first name."""
    return {number: name for name, number in reversed(numbers.items())}


def _read_numbers(files: HostFiles, paths: tuple[str, ...]) -> dict[str, int]:
    """Map names to IDs; the first file has precedence."""
    numbers: dict[str, int] = {}
    for path in paths:
        for line in (files.read_file(path) or b"").decode("utf-8", "surrogateescape").splitlines():
            name, _, rest = line.partition(":")
            number = rest.split(":")[1:2]
            if number and number[0].isdigit():
                numbers.setdefault(name, int(number[0]))
    return numbers


def _find_number(name: int | str, numbers: Mapping[str, int], kind: str) -> int:
    if isinstance(name, int):
        return name
    if name == "root":
        return 0
    if name not in numbers:
        raise FileError(
            f"there is no {kind} {name} on this machine",
            remedy=f"use the ID of the {kind}, or create it with a sysusers.d file",
        )
    return numbers[name]
