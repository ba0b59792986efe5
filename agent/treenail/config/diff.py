"""Two configs to what differs on a node between them.

The order of entries, the encoding of contents and metadata make no difference.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from treenail.config import names
from treenail.config.wanted import (
    Wanted,
    WantedDirectory,
    WantedFile,
    WantedLink,
    WantedOS,
    WantedUnit,
    WantedUser,
)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Change(Generic[T_co]):
    """One entry that differs; ``old`` is None when it is added, ``new`` when it is removed."""

    key: str
    """The path or the name."""
    old: T_co | None
    new: T_co | None

    def __str__(self) -> str:
        """The key and what happened to it."""
        if self.old is None:
            return f"{self.key} added"
        return f"{self.key} removed" if self.new is None else f"{self.key} changed"


class Aspect(StrEnum):
    """What may differ about the OS, in the words of the MachineConfig."""

    IMAGE = "osImageURL"
    KERNEL_ARGUMENTS = "kernelArguments"
    KERNEL_TYPE = "kernelType"
    EXTENSIONS = "extensions"
    EXTENSIONS_IMAGE = "baseOSExtensionsContainerImage"
    FIPS = "fips"


@dataclass(frozen=True, slots=True)
class Diff:
    """What differs, each part in the order of the old config and then of the new one."""

    files: tuple[Change[WantedFile], ...] = ()
    directories: tuple[Change[WantedDirectory], ...] = ()
    links: tuple[Change[WantedLink], ...] = ()
    units: tuple[Change[WantedUnit], ...] = ()
    users: tuple[Change[WantedUser], ...] = ()
    os: tuple[Aspect, ...] = ()
    unwritten: tuple[str, ...] = ()
    """The paths that the old config wrote and at which the new one puts nothing, neither a file
    nor a part of a unit, and that do not outlive the config."""

    @property
    def empty(self) -> bool:
        """Nothing differs."""
        return self == Diff()


def diff(old: Wanted, new: Wanted) -> Diff:
    """What differs; raises `IgnitionError` only for contents that `wanted` has not seen."""
    return Diff(
        files=tuple(_changes(old.files, new.files, _same_file)),
        directories=tuple(_changes(old.directories, new.directories, _equal)),
        links=tuple(_changes(old.links, new.links, _equal)),
        units=tuple(_changes(old.units, new.units, _equal)),
        users=tuple(_changes(old.users, new.users, _same_user)),
        os=tuple(_aspects(old.os, new.os)),
        unwritten=tuple(_unwritten(old, new)),
    )


def _changes(
    old: Mapping[str, T], new: Mapping[str, T], same: Callable[[T, T], bool]
) -> Iterator[Change[T]]:
    for key, before in old.items():
        after = new.get(key)
        if after is None or not same(before, after):
            yield Change(key, before, after)
    for key, after in new.items():
        if key not in old:
            yield Change(key, None, after)


def _equal(old: T, new: T) -> bool:
    return old == new


def _same_file(old: WantedFile, new: WantedFile) -> bool:
    if (old.mode, old.user, old.group) != (new.mode, new.user, new.group):
        return False
    return old.contents == new.contents or old.contents.decode() == new.contents.decode()


def _same_user(old: WantedUser, new: WantedUser) -> bool:
    same_keys = frozenset(old.ssh_keys) == frozenset(new.ssh_keys)
    return same_keys and old.password_hash == new.password_hash


def _aspects(old: WantedOS, new: WantedOS) -> Iterator[Aspect]:
    if old.image != new.image:
        yield Aspect.IMAGE
    if old.kernel_arguments != new.kernel_arguments:
        yield Aspect.KERNEL_ARGUMENTS
    if old.kernel_type != new.kernel_type:
        yield Aspect.KERNEL_TYPE
    if old.extensions != new.extensions:
        yield Aspect.EXTENSIONS
    if old.extensions_image != new.extensions_image:
        yield Aspect.EXTENSIONS_IMAGE
    if old.fips != new.fips:
        yield Aspect.FIPS


def _unwritten(old: Wanted, new: Wanted) -> Iterator[str]:
    written = {*new.files, *new.directories, *new.links, *new.unit_files(), *new.masks()}
    for path in (*old.files, *old.unit_files(), *sorted(old.masks())):
        if path not in written and not names.outlives_config(path):
            yield path
