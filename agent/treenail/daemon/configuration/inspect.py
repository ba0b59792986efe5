"""The machine as a plan sees it, and the record of what belongs to its config."""

import json
import os
from collections.abc import Iterable, Mapping
from typing import Protocol

from treenail.api.decode import load_json
from treenail.api.machineconfig import MachineConfig
from treenail.config import names
from treenail.config.drift import ActualEntry, EntryKind
from treenail.config.wanted import WantedState, read_wanted_state
from treenail.daemon.configuration.mcd_state import CURRENT_CONFIG
from treenail.errors import LedgerError
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.path_stat import LINK, PathStat, resolve_entries, stat_paths
from treenail.host.filesystem.root import Root
from treenail.host.rollback.backups import FileBackups
from treenail.host.rollback.inverse import strip_prefix
from treenail.host.system.users import Accounts, ShadowFile
from treenail.host.systemd.unit_files import SEARCH_PATH, UnitFileReader
from treenail.update.steps import ownership as records
from treenail.update.steps.inventory import Inventory, list_inspected_paths
from treenail.update.steps.ownership import Ownership

OWNERSHIP_FILE = "/var/lib/treenail/managed.json"
_VENDOR_DIRECTORIES = SEARCH_PATH[2:]
_KINDS = {kind.value: kind for kind in EntryKind}
_LIMIT = 64 * 1024 * 1024


class UnitStateSource(Protocol):
    """Who knows the states of units: systemd, or their files."""

    def read_states(self, *units: str) -> Mapping[str, str]:
        """As ``systemctl is-enabled``; empty without a file."""


class UnitFileStateSource(Protocol):
    """systemd, as it runs; raises `UnitError` and `BusError`."""

    def read_unit_file_state(self, unit: str) -> str: ...


class SystemdUnitStates:
    """The states that systemd tells."""

    def __init__(self, systemd: UnitFileStateSource) -> None:
        self._systemd = systemd

    def read_states(self, *units: str) -> dict[str, str]:
        return {unit: self._systemd.read_unit_file_state(unit) for unit in units}


class MachineInspector:
    """Looks at a machine. Raises `FileError` and `UnitError`."""

    def __init__(
        self,
        root: Root,
        shadow: ShadowFile,
        disk: Disk | None = None,
        systemd: UnitStateSource | None = None,
    ) -> None:
        """Without ``systemd`` the states of units are those that their files say."""
        self._root = root
        self._shadow = shadow
        self._disk = disk or Disk()
        self._files = HostFiles(root, self._disk)
        self._originals = FileBackups(root, self._disk)
        self._units = UnitFileReader(self._files)
        self._states: UnitStateSource = systemd or self._units

    def read_ownership(self) -> Ownership:
        """What belongs to the config that the machine has; nothing when nobody wrote that down.

        Where only the Machine Config Daemon was at work, what it says it wrote. Raises
        `LedgerError` and `ConfigError` when what is written can't be read.
        """
        content = self._files.read_file(OWNERSHIP_FILE, limit=_LIMIT)
        if content is None:
            return self._read_mcd_ownership()
        try:
            return records.from_json(json.loads(content))
        except ValueError as error:
            path = self._root.resolve_path(OWNERSHIP_FILE)
            raise LedgerError(
                f"{path} is damaged: {error}",
                remedy=f"move {path} away; what the config lets go of then stays on the machine",
            ) from error

    def inspect_machine(self, old: Ownership, new: WantedState) -> Inventory:
        """All that a plan from the one to the other depends on."""
        accounts = Accounts(self._files)
        stands = stat_paths(self._root, self._disk, list_inspected_paths(old, new))
        units = sorted({*old.units, *new.units})
        users = old.users | new.users.keys()
        now = records.compute_ownership("", new).paths
        gone = old.paths - now
        kept = self._originals.list_paths() | self._originals.find_vendor_paths(gone)
        # What is to be below a link that goes will not be where that link leads.
        going = tuple(f"{path}/" for path in gone if stands[path].kind == LINK)
        lead = {path for path in {*stands, *kept} if not (path in now and path.startswith(going))}
        return Inventory(
            entries={path: describe_path(each, accounts) for path, each in stands.items()},
            restorable=kept,
            resolved_paths=self._find_relocated(lead),
            unit_states=self._states.read_states(*units),
            vendor_units=frozenset(
                n for n in units if self._units.find_unit_file(n, search_path=_VENDOR_DIRECTORIES)
            ),
            has_core_user=accounts.has_user(names.CORE_USER),
            password_hash=self._shadow.read_password_hash(names.CORE_USER) if users else None,
            intact_hard_links=self._find_hard_links(new, stands),
        )

    def _read_mcd_ownership(self) -> Ownership:
        content = self._files.read_file(CURRENT_CONFIG, limit=_LIMIT)
        if content is None:
            return Ownership()
        document = load_json(content, where=str(self._root.resolve_path(CURRENT_CONFIG)))
        config = MachineConfig.from_json(document)
        return records.compute_ownership(config.name, read_wanted_state(config))

    def _find_relocated(self, paths: Iterable[str]) -> dict[str, str]:
        prefix = os.fspath(self._root.prefix)
        found = {
            path: strip_prefix(place, prefix)
            for path, place in resolve_entries(self._root, paths).items()
        }
        return {path: entry for path, entry in found.items() if entry != path}

    def _find_hard_links(self, new: WantedState, stands: Mapping[str, PathStat]) -> frozenset[str]:
        links = [link for link in new.links.values() if link.is_hard]
        targets = stat_paths(self._root, self._disk, [link.target for link in links])
        return frozenset(
            link.path
            for link in links
            if stands[link.path].inode == targets[link.target].inode != (0, 0)
        )


def describe_path(each: PathStat, accounts: Accounts) -> ActualEntry:
    return ActualEntry(
        kind=_KINDS[each.kind],
        sha256=each.sha256,
        mode=each.mode,
        uid=each.uid,
        gid=each.gid,
        user=accounts.find_user_name(each.uid),
        group=accounts.find_group_name(each.gid),
        target=each.target,
        label=each.label,
        default_label=each.expected_label,
    )
