"""Reads what the image of a deployment has at the paths of a config."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from treenail.config import node_paths
from treenail.config.drift_comparison import ActualEntry
from treenail.config.image_content import ImageContent, list_image_paths
from treenail.config.wanted_state import WantedState
from treenail.daemon.configuration.inspect import describe_path, open_booted_tree
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.path_stat import NOTHING, resolve_entries, stat_paths
from treenail.host.filesystem.root_directory import Root, strip_prefix
from treenail.host.machine import Machine
from treenail.host.system.accounts import GROUP_FILES, PASSWD_FILES, Accounts
from treenail.host.systemd.unit_files import SEARCH_PATH, UnitFileReader
from treenail.unit_install import find_template_name

if TYPE_CHECKING:
    # This import would load all decisions.
    from treenail.daemon.interfaces import OSBackend

_VENDOR_DIRECTORIES = SEARCH_PATH[2:]


class DeploymentImages:
    """The images of the booted and the staged deployment. Raises `HostError`."""

    def __init__(self, machine: Machine, os: "OSBackend") -> None:
        self._machine = machine
        self._os = os

    def read_booted(self, wanted: WantedState) -> ImageContent:
        """Read the image that is booted, without the local changes of /etc."""
        return read_image_content(open_booted_tree(self._machine.root), wanted)

    def read_staged(self, staged_id: str, wanted: WantedState) -> ImageContent:
        """Read the image of the staged deployment with this ID."""
        with self._os.open_staged_tree(staged_id, list_tree_paths(wanted)) as tree:
            return read_image_content(tree, wanted)


def list_tree_paths(wanted: WantedState) -> tuple[str, ...]:
    """Return the paths that `read_image_content` reads.

    A path that ends with a slash is a directory of which it reads everything.
    """
    return tuple(
        dict.fromkeys(
            (
                *PASSWD_FILES,
                *GROUP_FILES,
                f"{node_paths.UNIT_DIRECTORY}/",
                *_list_vendor_paths(wanted.units),
                *list_image_paths(wanted),
            )
        )
    )


def read_image_content(tree: Root, wanted: WantedState) -> ImageContent:
    """Read what the config needs of the tree of a deployment; raises `HostError`."""
    disk = Disk()
    files = HostFiles(tree, disk)
    accounts, units = Accounts(files), UnitFileReader(files)
    paths = list_image_paths(wanted)
    stats = stat_paths(tree, disk, paths)
    prefix = str(tree.prefix)
    return ImageContent(
        entries={path: describe_path(each, accounts) for path, each in stats.items()},
        resolved_paths={
            path: strip_prefix(entry, prefix)
            for path, entry in resolve_entries(tree, paths).items()
        },
        vendor_entries=dict(_find_vendor_entries(tree, disk, accounts, paths)),
        unit_states=units.read_states(*wanted.units),
    )


def _find_vendor_entries(
    tree: Root, disk: Disk, accounts: Accounts, paths: Sequence[str]
) -> Iterator[tuple[str, ActualEntry]]:
    """Yield the first entry below /usr for each path of a unit file or drop-in below /etc."""
    candidates = {
        path: [
            directory + path.removeprefix(node_paths.UNIT_DIRECTORY)
            for directory in _VENDOR_DIRECTORIES
        ]
        for path in paths
        if path.startswith(node_paths.UNIT_DIRECTORY + "/")
    }
    stats = stat_paths(tree, disk, [each for listed in candidates.values() for each in listed])
    for path, listed in candidates.items():
        present = (stats[each] for each in listed if stats[each].kind != NOTHING)
        found = next(present, None)
        if found is not None:
            yield path, describe_path(found, accounts)


def _list_vendor_paths(units: Iterable[str]) -> Iterator[str]:
    for unit in units:
        for name in filter(None, (unit, find_template_name(unit))):
            for directory in _VENDOR_DIRECTORIES:
                yield from (f"{directory}/{name}", f"{directory}/{name}.d/")
