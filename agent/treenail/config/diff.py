"""Differences on a node between two configs.

The order of entries, the encoding of contents and the metadata make no difference.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from treenail.config import node_paths, wanted_state

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class EntryChange(Generic[T_co]):
    """A changed entry; ``old`` is None if it was added, ``new`` if it was removed."""

    key: str
    """The path or the name."""
    old: T_co | None
    new: T_co | None

    def __str__(self) -> str:
        """Return the key with added, removed or changed."""
        if self.old is None:
            return f"{self.key} added"
        return f"{self.key} removed" if self.new is None else f"{self.key} changed"


class OSAspect(StrEnum):
    """Property of the OS that can differ, named as in the MachineConfig."""

    IMAGE = "osImageURL"
    KERNEL_ARGUMENTS = "kernelArguments"
    KERNEL_TYPE = "kernelType"
    EXTENSIONS = "extensions"
    EXTENSIONS_IMAGE = "baseOSExtensionsContainerImage"
    FIPS = "fips"


@dataclass(frozen=True, slots=True)
class ConfigDiff:
    """Differences between two configs, in the order of the old config and then of the new one."""

    files: tuple[EntryChange[wanted_state.WantedFile], ...] = ()
    directories: tuple[EntryChange[wanted_state.WantedDirectory], ...] = ()
    links: tuple[EntryChange[wanted_state.WantedLink], ...] = ()
    units: tuple[EntryChange[wanted_state.WantedUnit], ...] = ()
    users: tuple[EntryChange[wanted_state.WantedUser], ...] = ()
    os: tuple[OSAspect, ...] = ()
    removed_paths: tuple[str, ...] = ()
    """Paths of files and units that only the old config writes, without those that outlive it."""

    @property
    def is_empty(self) -> bool:
        """The two configs are the same on a node."""
        return self == ConfigDiff()


def compare_configs(old: wanted_state.WantedState, new: wanted_state.WantedState) -> ConfigDiff:
    """Compare two configs.

    Raises `IgnitionError` only for contents that `read_wanted_state` has not decoded.
    """
    return ConfigDiff(
        files=tuple(_find_changes(old.files, new.files, _is_same_file)),
        directories=tuple(_find_changes(old.directories, new.directories, _is_equal)),
        links=tuple(_find_changes(old.links, new.links, _is_equal)),
        units=tuple(_find_changes(old.units, new.units, _is_equal)),
        users=tuple(_find_changes(old.users, new.users, _is_same_user)),
        os=tuple(_find_os_aspects(old.os, new.os)),
        removed_paths=tuple(_find_removed_paths(old, new)),
    )


def _find_changes(
    old: Mapping[str, T], new: Mapping[str, T], is_same: Callable[[T, T], bool]
) -> Iterator[EntryChange[T]]:
    for key, old_entry in old.items():
        new_entry = new.get(key)
        if new_entry is None or not is_same(old_entry, new_entry):
            yield EntryChange(key, old_entry, new_entry)
    for key, new_entry in new.items():
        if key not in old:
            yield EntryChange(key, None, new_entry)


def _is_equal(old: T, new: T) -> bool:
    return old == new


def _is_same_file(old: wanted_state.WantedFile, new: wanted_state.WantedFile) -> bool:
    if (old.mode, old.user, old.group) != (new.mode, new.user, new.group):
        return False
    return (
        old.contents == new.contents or old.contents.decode_bytes() == new.contents.decode_bytes()
    )


def _is_same_user(old: wanted_state.WantedUser, new: wanted_state.WantedUser) -> bool:
    same_keys = frozenset(old.ssh_keys) == frozenset(new.ssh_keys)
    return same_keys and old.password_hash == new.password_hash


def _find_os_aspects(old: wanted_state.WantedOS, new: wanted_state.WantedOS) -> Iterator[OSAspect]:
    if old.image != new.image:
        yield OSAspect.IMAGE
    if old.kernel_arguments != new.kernel_arguments:
        yield OSAspect.KERNEL_ARGUMENTS
    if old.kernel_type != new.kernel_type:
        yield OSAspect.KERNEL_TYPE
    if old.extensions != new.extensions:
        yield OSAspect.EXTENSIONS
    if old.extensions_image != new.extensions_image:
        yield OSAspect.EXTENSIONS_IMAGE
    if old.fips != new.fips:
        yield OSAspect.FIPS


def _find_removed_paths(
    old: wanted_state.WantedState, new: wanted_state.WantedState
) -> Iterator[str]:
    written = {*new.files, *new.directories, *new.links, *new.list_unit_files(), *new.list_masks()}
    for path in (*old.files, *old.list_unit_files(), *sorted(old.list_masks())):
        if path not in written and not node_paths.should_outlive_config(path):
            yield path
