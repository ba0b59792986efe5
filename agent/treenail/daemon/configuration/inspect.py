"""Inspect the machine for a plan, and read the record of what the config owns."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Protocol

from treenail import codec, errors
from treenail.api import decode, machineconfig
from treenail.config import node_paths, wanted_state
from treenail.daemon.configuration.mcd_state import CURRENT_CONFIG
from treenail.host.filesystem import atomic_files, disk, path_stat, root_directory
from treenail.host.machine import Machine
from treenail.host.system.accounts import Accounts
from treenail.host.systemd import unit_files
from treenail.observations import EntryKind, PathEntry
from treenail.update.steps import inventory
from treenail.update.steps import inventory as records

OWNERSHIP_FILE = "/var/lib/treenail/managed.json"
_VENDOR_DIRECTORIES = unit_files.SEARCH_PATH[2:]
_UNLABELLED = attrgetter("kind", "mode", "uid", "gid", "sha256", "target")
OWNERSHIP_LIMIT = 64 * 1024 * 1024
"""Bytes that the record of a config with many files may have."""


class UnitStateSource(Protocol):
    """A source of unit states: `Systemd`, or `UnitFileReader` for a system that does not run."""

    def read_states(self, *units: str) -> Mapping[str, str]:
        """Return the states as ``systemctl is-enabled`` prints them; empty without a unit file."""


class MachineInspector:
    """Inspects a machine. Raises `FileError` and `UnitError`."""

    def __init__(self, machine: Machine, unit_states: UnitStateSource | None = None) -> None:
        """Without ``unit_states``, read the states of units from their files."""
        self._root = machine.root
        self._disk = machine.disk
        self._files = machine.labelled_files
        self._shadow = machine.shadow
        self._backups = machine.backups
        self._units = unit_files.UnitFileReader(self._files)
        self._unit_states: UnitStateSource = unit_states or self._units
        self._mcd_ownership = (b"", inventory.Ownership())
        """The digest of the MCD's config as last read, and what it owns."""

    def read_ownership(self) -> inventory.Ownership:
        """Read what the machine's config owns; without a record, what the MCD's config owns.

        Raises `LedgerError` and `ConfigError` when the record cannot be read.
        """
        content = self._files.read_file(OWNERSHIP_FILE, limit=OWNERSHIP_LIMIT)
        if content is None:
            return self._read_mcd_ownership()
        try:
            return records.from_json(codec.parse_json(content))
        except ValueError as error:
            path = self._root.resolve_path(OWNERSHIP_FILE)
            raise errors.LedgerError(
                f"cannot read {path}: it is damaged: {error}",
                remedy=f"move {path} away; files that a config no longer lists then stay",
            ) from error

    def inspect_machine(
        self,
        old: inventory.Ownership,
        new: wanted_state.WantedState,
        provided: frozenset[str] = frozenset(),
    ) -> inventory.Inventory:
        """Collect everything that a plan from the old to the new state depends on.

        ``provided`` are the paths and units of the new state that an image provides.
        """
        accounts = Accounts(self._files)
        stats = path_stat.stat_paths(
            self._root, self._disk, inventory.list_inspected_paths(old, new)
        )
        units = sorted({*old.units, *new.units})
        users = old.users | new.users.keys()
        owned = records.compute_ownership("", new).paths
        dropped = old.paths - owned
        restorable = self._backups.list_paths() | self._backups.find_vendor_paths(dropped)
        # A path below a symlink that this plan removes will not be in the target of that link.
        removed_links = tuple(f"{path}/" for path in dropped if stats[path].kind == EntryKind.LINK)
        resolved = {
            path
            for path in {*stats, *restorable}
            if not (path in owned and path.startswith(removed_links))
        }
        unit_states = self._unit_states.read_states(*units)
        return inventory.Inventory(
            entries={path: accounts.name_owner(stat) for path, stat in stats.items()},
            restorable=restorable,
            resolved_paths=self._find_relocated(resolved),
            unit_states=unit_states,
            named_units=self._units.find_named_units(units, new.list_unit_files()),
            pristine=self._find_pristine(stats, unit_states, provided),
            vendor_units=frozenset(
                n for n in units if self._units.find_unit_file(n, search_path=_VENDOR_DIRECTORIES)
            ),
            has_core_user=accounts.has_user(node_paths.CORE_USER),
            password_hash=self._shadow.read_password_hash(node_paths.CORE_USER) if users else None,
            intact_hard_links=self._find_hard_links(new, stats),
        )

    def _read_mcd_ownership(self) -> inventory.Ownership:
        content = self._files.read_file(CURRENT_CONFIG, limit=OWNERSHIP_LIMIT)
        if content is None:
            return inventory.Ownership()
        digest = hashlib.sha256(content).digest()
        if digest != self._mcd_ownership[0]:
            where = str(self._root.resolve_path(CURRENT_CONFIG))
            config = machineconfig.MachineConfig.from_json(decode.load_json(content, where=where))
            wanted = wanted_state.read_wanted_state(config)
            self._mcd_ownership = digest, records.compute_ownership(config.name, wanted)
        return self._mcd_ownership[1]

    def _find_pristine(
        self,
        stats: Mapping[str, PathEntry],
        states: Mapping[str, str],
        provided: frozenset[str],
    ) -> frozenset[str]:
        """Find the provided paths and units that are as the booted image has them."""
        if not provided:
            return frozenset()
        image = open_booted_tree(self._root)
        # Nothing but the next image changes /usr: what differs there needs no step either.
        carried = ("/etc/", "/usr/")
        paths = [path for path in stats if path in provided and path.startswith(carried)]
        originals = path_stat.stat_paths(image, disk.Disk(), paths)
        units = [unit for unit in states if unit in provided]
        original_states = unit_files.UnitFileReader(atomic_files.HostFiles(image)).read_states(
            *units
        )
        return frozenset(
            (
                *(
                    path
                    for path in paths
                    if _UNLABELLED(stats[path]) == _UNLABELLED(originals[path])
                ),
                *(unit for unit in units if states[unit] == original_states.get(unit, "")),
            )
        )

    def _find_relocated(self, paths: Iterable[str]) -> dict[str, str]:
        prefix = os.fspath(self._root.prefix)
        entries = {
            path: root_directory.strip_prefix(entry, prefix)
            for path, entry in path_stat.resolve_entries(self._root, paths).items()
        }
        return {path: entry for path, entry in entries.items() if entry != path}

    def _find_hard_links(
        self, new: wanted_state.WantedState, stats: Mapping[str, PathEntry]
    ) -> frozenset[str]:
        links = [link for link in new.links.values() if link.is_hard]
        targets = path_stat.stat_paths(self._root, self._disk, [link.target for link in links])
        return frozenset(
            link.path
            for link in links
            if stats[link.path].inode == targets[link.target].inode != (0, 0)
        )


def open_booted_tree(root: root_directory.Root) -> root_directory.Root:
    """Return the booted deployment as its image was: with /usr/etc in place of /etc."""
    return root_directory.Root(root.prefix, has_usr_etc=root.resolve_path("/usr/etc").is_dir())
