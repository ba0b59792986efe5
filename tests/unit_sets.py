"""Random sets of unit files, links, drop-ins and presets, and what systemctl makes of them."""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from treenail.units.unit_files import ChangedFiles, FileChange, SymbolicLink

ETC, RUN, LOCAL, VENDOR = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
)
NAMES = (
    "a.service", "b.service", "c.service", "a.socket", "d.timer", "e.target", "f.mount",
    "t@.service", "t@one.service", "t@two.service", "u@.service", "u@one.service",
    "al.service", "al@.service",
)  # fmt: skip
TARGETS = (
    "multi-user.target", "x.target", "at-%i.target", "%p.target", "w@.target", "w@one.target",
    "a.service", "%N.target", "nonsense",
)  # fmt: skip
ALIASES = (
    "al.service", "al2.service", "al@.service", "al@one.service", "al@%i.service", "al.socket",
    "a.service", "%p-alias.service",
)  # fmt: skip
OLD_SYSTEMD = "/usr/lib/systemd/libsystemd-shared-252.so"


@dataclass(frozen=True, slots=True)
class UnitSet:
    """The files of a root, and the commands to run on it."""

    files: dict[str, FileChange]
    commands: tuple[tuple[str, ...], ...]


def make_install_section(pick: random.Random, name: str) -> str:
    """Return the text of a unit."""
    lines = ["[Unit]", "Description=x", "[Install]"]
    for _ in range(pick.choice((0, 1, 1, 1, 2, 2, 3))):
        key = pick.choice(("WantedBy",) * 4 + ("RequiredBy", "UpheldBy", "Alias", "Also"))
        values = {"Alias": ALIASES, "Also": NAMES}.get(key, TARGETS)
        # Most values are those that people write.
        values = values if pick.random() < 0.4 else values[:3]
        value = " ".join(pick.choices(values, k=pick.choice((1, 1, 1, 2))))
        lines.append(f"{key}={value if pick.random() < 0.93 else ''}")
    if "@" in name and pick.random() < 0.5:
        lines.append(f"DefaultInstance={pick.choice(('one', 'two', ''))}")
    return "\n".join((*lines, ""))


def make_unit_set(seed: int) -> UnitSet:
    """Return the set of this seed."""
    pick = random.Random(seed)

    def directory() -> str:
        return pick.choices((VENDOR, ETC, LOCAL, RUN), (60, 25, 8, 7))[0]

    files: dict[str, FileChange] = {OLD_SYSTEMD: b"x"}
    for name in NAMES:
        for _ in range(pick.choice((0, 1, 1, 1, 1, 2)) if "@o" not in name else 0):
            path, kind = f"{directory()}/{name}", pick.random()
            other = f"{pick.choice((VENDOR, ETC))}/{pick.choice(NAMES)}"
            if kind < 0.06:
                files[path] = pick.choice((b"", SymbolicLink("/dev/null")))
            elif kind < 0.12:
                files[f"/opt/{name}"] = make_install_section(pick, name).encode()
                files[path] = SymbolicLink(f"/opt/{name}")
            elif kind < 0.16:
                files[path] = SymbolicLink(other)
            elif kind < 0.19:
                files[path] = SymbolicLink(f"{VENDOR}/{name}")
            else:
                files[path] = make_install_section(pick, name).encode()
        if pick.random() < 0.2:
            files[f"{directory()}/{name}.d/{pick.choice('12')}.conf"] = make_install_section(
                pick, name
            ).encode()
        if pick.random() < 0.25:
            where = pick.choice((ETC, ETC, VENDOR, RUN))
            target = pick.choice(TARGETS[:2])
            suffix = pick.choice(("wants", "requires"))
            instance = name.replace("@.", f"@{pick.choice(('one', 'x'))}.")
            files[f"{where}/{target}.{suffix}/{instance}"] = SymbolicLink(f"{VENDOR}/{name}")
    for path in [path for path, change in files.items() if isinstance(change, SymbolicLink)]:
        change = files[path]
        if isinstance(change, SymbolicLink) and change.target == path:
            del files[path]
    for number in range(pick.choice((0, 1, 2))):
        rules = []
        for _ in range(pick.randrange(4)):
            pattern = pick.choice(
                (*NAMES, "*", "t@*", "a.*", "t@.service one two", "u@.service one")
            )
            rules.append(f"{pick.choice(('enable', 'disable'))} {pattern}")
        top = pick.choice((VENDOR, ETC))
        files[f"{top}-preset/{number}.preset"] = "\n".join((*rules, "")).encode()
    commands = []
    for _ in range(5):
        verb = pick.choice(("enable", "enable", "disable", "preset"))
        names = pick.sample(NAMES, k=pick.choice((1, 1, 2)) if verb != "preset" else 1)
        commands.append((verb, *names))
    return UnitSet(files, tuple(commands))


def write_files(root: Path, files: dict[str, FileChange]) -> None:
    """Write the files below the root."""
    for path, change in files.items():
        place = root / path[1:]
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(change, SymbolicLink):
            place.symlink_to(change.target)
        elif change is not None:
            place.write_bytes(change)


def read_files(root: Path) -> ChangedFiles:
    """Return the files below the root."""
    return ChangedFiles(None, dict(_read_entries(root)))


def read_links(root: Path) -> dict[str, str]:
    """Return the links of the administrator below the root."""
    return {
        path: change.target
        for path, change in _read_entries(root)
        if isinstance(change, SymbolicLink) and path.startswith(f"{ETC}/")
    }


def _read_entries(root: Path) -> Iterator[tuple[str, FileChange]]:
    for top, directories, names in os.walk(root):
        for name in (*directories, *names):
            place = Path(top, name)
            path = f"/{place.relative_to(root)}"
            if place.is_symlink():
                yield path, SymbolicLink(str(place.readlink()))
            elif place.is_file():
                yield path, place.read_bytes()
