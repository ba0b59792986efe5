"""ID maps of the build's user namespace, from this process's own IDs."""

import getpass
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from treenail.builder.buildah import sandbox
from treenail.errors import HostError

_WANTED_IDS = 65536  # UIDs of 16 bits are what images use


@dataclass(frozen=True, slots=True)
class IdMaps:
    """Maps for /proc/PID/uid_map and gid_map, lines separated by commas, and who writes them."""

    uid_map: str
    gid_map: str
    way: str


def choose_own_id_maps() -> IdMaps:
    """Choose the maps of this process's user as `choose_id_maps` does."""
    user = os.geteuid()
    # A system without /etc/passwd has root, too.
    name = "root" if user == 0 else getpass.getuser()
    return choose_id_maps(user, name, os.getegid(), proc=Path("/proc"), etc=Path("/etc"))


def choose_id_maps(user_id: int, user_name: str, group_id: int, *, proc: Path, etc: Path) -> IdMaps:
    """Choose the ID maps for a build by this user.

    Root keeps its IDs: in a container, a process with the default capabilities may map them.
    Another user needs subordinate IDs and the programs newuidmap and newgidmap. Raises
    `HostError` with the remedy.
    """
    if user_id == 0:
        uids = count_own_ids((proc / "self/uid_map").read_text())
        gids = count_own_ids((proc / "self/gid_map").read_text())
        return IdMaps(f"0 0 {uids}", f"0 0 {gids}", sandbox.DIRECT)
    if shutil.which("newuidmap") is None or shutil.which("newgidmap") is None:
        raise HostError(
            "cannot build as a user other than root: newuidmap is not installed",
            remedy="install the package uidmap (Debian) or shadow-utils (Fedora), or build as root",
        )
    maps = []
    for file, own in (("subuid", user_id), ("subgid", group_id)):
        first, count = find_subordinate_ids(_read_text(etc / file), user_id, user_name)
        if count < _WANTED_IDS:
            raise HostError(
                f"cannot build as user {user_name}: expected {_WANTED_IDS} subordinate IDs in "
                f"{etc / file}, found {count}",
                remedy=f"run as root: usermod --add-subuids 100000-165535 --add-subgids "
                f"100000-165535 {user_name}",
            )
        maps.append(f"0 {own} 1,1 {first} {count}")
    return IdMaps(maps[0], maps[1], sandbox.NEWUIDMAP)


def count_own_ids(text: str) -> int:
    """Count the IDs from 0 on, without a gap, in a file like /proc/self/uid_map."""
    count = 0
    for inside, _, length in sorted(
        tuple(map(int, line.split())) for line in text.splitlines() if line.strip()
    ):
        if inside != count:
            break
        count = inside + length
    return count


def find_subordinate_ids(text: str, user_id: int, user_name: str) -> tuple[int, int]:
    """Return the first ID and the count of the user's longest range in /etc/subuid (5)."""
    ranges = [(0, 0)]
    for line in text.splitlines():
        owner, _, rest = line.partition(":")
        first, _, count = rest.partition(":")
        if owner in {user_name, str(user_id)} and first.isdigit() and count.isdigit():
            ranges.append((int(first), int(count)))
    return max(ranges, key=lambda each: each[1])


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
