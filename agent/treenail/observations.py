"""Observations of this machine and its registries: adapters return them, decisions read them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class EntryKind(StrEnum):
    """Kind of entry at a path."""

    FILE = "file"
    DIRECTORY = "directory"
    LINK = "link"
    NOTHING = "nothing"
    OTHER = "something else"


@dataclass(frozen=True, slots=True)
class PathEntry:
    """The entry at a path; a link is not followed.

    ``label`` is its SELinux label. ``expected_label`` is the one that the policy assigns to the
    path, or ``label`` where the policy accepts that. Both are empty without a policy.
    """

    kind: EntryKind
    sha256: str = ""
    mode: int = 0
    uid: int = 0
    gid: int = 0
    user: str = ""
    """The name of ``uid``; empty without a name, and until `Accounts.name_owner` adds it."""
    group: str = ""
    target: str = ""
    label: str = ""
    expected_label: str = ""
    inode: tuple[int, int] = field(default=(0, 0), compare=False)
    """The numbers of device and inode."""


ABSENT_ENTRY = PathEntry(EntryKind.NOTHING)


@dataclass(frozen=True, slots=True)
class FilesystemSpace:
    """The filesystem of a path; ``files`` is 0 if the number of inodes is not fixed."""

    path: str
    device: int
    free_bytes: int
    size_bytes: int
    free_files: int
    files: int
    is_read_only: bool = False
    """The filesystem itself is read-only, not just this mount of it."""


@dataclass(frozen=True, slots=True)
class ImageLayer:
    """A compressed layer, as the registry stores it."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ImageInspection:
    """An image that can be pulled. Fields that the registry does not report are empty."""

    architecture: str = ""
    """The architecture by its OCI name, such as ``amd64``."""
    created: float | None = None
    """Seconds since the epoch."""
    layers: tuple[ImageLayer, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class InspectionProblem:
    """The registry did not return the image: ``kind`` for programs, ``text`` from skopeo.

    ``platforms`` are those of a manifest list that lacks the platform of this machine.
    """

    kind: str
    text: str
    platforms: tuple[str, ...] = ()
