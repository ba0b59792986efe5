"""What stood at a path before it was changed, as the undo log keeps it."""

import base64
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from treenail.host.filesystem.entries import TEMPORARY_PREFIX, DirectoryEntry

Row: TypeAlias = "list[object]"


class PreviousEntry(StrEnum):
    """What stood at a path."""

    NOTHING = "nothing"
    FILE_OR_LINK = "kept"
    """A file or a link, which is put aside: it then has the name of the new one."""
    DIRECTORY = "directory"
    EMPTIED_DIRECTORY = "emptied directory"
    """One that is to go if it is empty once all is done; until then it stays."""


@dataclass(frozen=True, slots=True)
class Inverse:
    """What to have at ``path`` again; ``directory`` is what one was like."""

    path: str
    number: int
    previous: PreviousEntry
    directory: DirectoryEntry = field(default_factory=DirectoryEntry)

    @property
    def parent(self) -> str:
        """The directory it is in."""
        return self.path.rpartition("/")[0] or "/"

    @property
    def aside_path(self) -> str:
        """A name beside it: of the new entry at first, and then of the old one."""
        return f"{self.path.rpartition('/')[0]}/{TEMPORARY_PREFIX}+{self.number}"

    def to_json(self, prefix: str) -> Row:
        """The inverse with its path below ``prefix``."""
        row: Row = [strip_prefix(self.path, prefix), self.previous.value, self.number]
        if self.previous in {PreviousEntry.DIRECTORY, PreviousEntry.EMPTIED_DIRECTORY}:
            attributes = (self.directory.xattrs or {}).items()
            row += [self.directory.mode, self.directory.uid, self.directory.gid]
            row.append({name: base64.b64encode(value).decode() for name, value in attributes})
        return row

    @classmethod
    def from_json(cls, row: Row, prefix: str) -> "Inverse":
        """What `to_json` wrote; raises `ValueError` for anything else."""
        match row:
            case [str(path), str(before), int(number)]:
                return cls(add_prefix(path, prefix), number, PreviousEntry(before))
            case [str(path), str(before), int(number), int(mode), int(uid), int(gid), dict(found)]:
                attributes = {str(name): base64.b64decode(value) for name, value in found.items()}
                directory = DirectoryEntry(mode, uid, gid, attributes)
                return cls(add_prefix(path, prefix), number, PreviousEntry(before), directory)
            case _:
                raise ValueError("no inverse")


def strip_prefix(path: str, prefix: str) -> str:
    """The path as somebody sees it whose root is ``prefix``."""
    return path if prefix == "/" else path.removeprefix(prefix)


def add_prefix(path: str, prefix: str) -> str:
    """Where the path is that somebody sees whose root is ``prefix``."""
    return path if prefix == "/" else prefix + path
