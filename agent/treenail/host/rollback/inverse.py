"""What stood at a path before it was changed, as the undo log keeps it."""

import base64
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from treenail.host.filesystem.entries import NAMES, Directory

Row: TypeAlias = "list[object]"


class Before(StrEnum):
    """What stood at a path."""

    NOTHING = "nothing"
    KEPT = "kept"
    """A file or a link, which is put aside: it then has the name of the new one."""
    DIRECTORY = "directory"
    EMPTIED = "emptied directory"
    """One that is to go if it is empty once all is done; until then it stays."""


@dataclass(frozen=True, slots=True)
class Inverse:
    """What to have at ``place`` again; ``directory`` is what one was like."""

    place: str
    number: int
    before: Before
    directory: Directory = field(default_factory=Directory)

    @property
    def parent(self) -> str:
        """The directory it is in."""
        return self.place.rpartition("/")[0] or "/"

    @property
    def aside(self) -> str:
        """A name beside it: of the new entry at first, and then of the old one."""
        return f"{self.place.rpartition('/')[0]}/{NAMES}+{self.number}"

    def to_json(self, prefix: str) -> Row:
        """The inverse with its path below ``prefix``."""
        row: Row = [below(self.place, prefix), self.before.value, self.number]
        if self.before in {Before.DIRECTORY, Before.EMPTIED}:
            attributes = (self.directory.attributes or {}).items()
            row += [self.directory.mode, self.directory.uid, self.directory.gid]
            row.append({name: base64.b64encode(value).decode() for name, value in attributes})
        return row

    @classmethod
    def from_json(cls, row: Row, prefix: str) -> "Inverse":
        """What `to_json` wrote; raises `ValueError` for anything else."""
        match row:
            case [str(path), str(before), int(number)]:
                return cls(above(path, prefix), number, Before(before))
            case [str(path), str(before), int(number), int(mode), int(uid), int(gid), dict(found)]:
                attributes = {str(name): base64.b64decode(value) for name, value in found.items()}
                directory = Directory(mode, uid, gid, attributes)
                return cls(above(path, prefix), number, Before(before), directory)
            case _:
                raise ValueError("no inverse")


def below(path: str, prefix: str) -> str:
    """The path as somebody sees it whose root is ``prefix``."""
    return path if prefix == "/" else path.removeprefix(prefix)


def above(path: str, prefix: str) -> str:
    """Where the path is that somebody sees whose root is ``prefix``."""
    return path if prefix == "/" else prefix + path
