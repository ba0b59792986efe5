"""Read what the image of a deployment has at the paths of a config."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from treenail import observations
from treenail.config import image_content, node_paths, wanted_state
from treenail.host.filesystem import atomic_files, path_stat, root_directory
from treenail.host.filesystem.disk import Disk
from treenail.host.machine import Machine
from treenail.units import unit_files, unit_install

if TYPE_CHECKING:
    # This import would load all decisions.
    from treenail.host.ostree.deployments import OSBackend


class DeploymentImages:
    """The images of the booted and the staged deployment. Raises `HostError`."""

    def __init__(self, machine: Machine, os: "OSBackend") -> None:
        self._machine = machine
        self._os = os

    def read_booted(self, wanted: wanted_state.WantedState) -> image_content.ImageContent:
        """Read the image that is booted, without the local changes of /etc."""
        return read_image_content(root_directory.open_booted_tree(self._machine.root), wanted)

    def read_staged(
        self, staged_id: str, wanted: wanted_state.WantedState
    ) -> image_content.ImageContent:
        """Read the image of the staged deployment with this ID."""
        with self._os.open_staged_tree(staged_id, list_tree_paths(wanted)) as tree:
            return read_image_content(tree, wanted)


def list_tree_paths(wanted: wanted_state.WantedState) -> tuple[str, ...]:
    """Return the paths that `read_image_content` reads.

    A path that ends with a slash is a directory of which it reads everything.
    """
    return tuple(
        dict.fromkeys(
            (
                *path_stat.PASSWD_FILES,
                *path_stat.GROUP_FILES,
                f"{node_paths.UNIT_DIRECTORY}/",
                *_list_vendor_paths(wanted.units),
                *image_content.list_image_paths(wanted),
            )
        )
    )


def read_image_content(
    tree: root_directory.Root, wanted: wanted_state.WantedState
) -> image_content.ImageContent:
    """Read what the config needs of the tree of a deployment; raises `HostError`."""
    disk = Disk()
    files = atomic_files.HostFiles(tree, disk)
    accounts, units = path_stat.Accounts(files), unit_files.UnitFileReader(files)
    paths = image_content.list_image_paths(wanted)
    stats = path_stat.stat_paths(tree, disk, paths)
    prefix = str(tree.prefix)
    return image_content.ImageContent(
        entries={path: accounts.name_owner(stat) for path, stat in stats.items()},
        resolved_paths={
            path: root_directory.strip_prefix(entry, prefix)
            for path, entry in path_stat.resolve_entries(tree, paths).items()
        },
        vendor_entries=dict(_find_vendor_entries(tree, disk, accounts, paths)),
        unit_states=units.read_states(*wanted.units),
    )


def _find_vendor_entries(
    tree: root_directory.Root, disk: Disk, accounts: path_stat.Accounts, paths: Sequence[str]
) -> Iterator[tuple[str, observations.PathEntry]]:
    """Yield the first entry below /usr for each path of a unit file or drop-in below /etc."""
    candidates = {
        path: [
            directory + path.removeprefix(node_paths.UNIT_DIRECTORY)
            for directory in unit_files.VENDOR_SEARCH_PATH
        ]
        for path in paths
        if path.startswith(node_paths.UNIT_DIRECTORY + "/")
    }
    stats = path_stat.stat_paths(
        tree, disk, [candidate for listed in candidates.values() for candidate in listed]
    )
    for path, listed in candidates.items():
        present = (
            stats[entry] for entry in listed if stats[entry].kind != observations.EntryKind.NOTHING
        )
        vendor_entry = next(present, None)
        if vendor_entry is not None:
            yield path, accounts.name_owner(vendor_entry)


def _list_vendor_paths(units: Iterable[str]) -> Iterator[str]:
    for unit in units:
        for name in filter(None, (unit, unit_install.find_template_name(unit))):
            for directory in unit_files.VENDOR_SEARCH_PATH:
                yield from (f"{directory}/{name}", f"{directory}/{name}.d/")
