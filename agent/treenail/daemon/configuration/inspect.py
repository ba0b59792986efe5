"""The machine as a plan sees it, and the record of what belongs to its config."""

import json
import os
from collections.abc import Iterable, Mapping
from typing import Protocol

from treenail.api.decode import load_json
from treenail.api.machineconfig import MachineConfig
from treenail.config import names
from treenail.config.drift import Found, Kind
from treenail.config.wanted import Wanted, wanted
from treenail.daemon.configuration.mcd_state import CURRENT_CONFIG
from treenail.errors import LedgerError
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.path_stat import LINK, Standing, places, standing
from treenail.host.filesystem.root import Root
from treenail.host.rollback.backups import Originals
from treenail.host.rollback.inverse import below
from treenail.host.system.users import Accounts, Shadow
from treenail.host.systemd.unit_files import SEARCHED, Units
from treenail.update.steps import ownership as records
from treenail.update.steps.inventory import Seen, looked_at
from treenail.update.steps.ownership import Managed

RECORD = "/var/lib/treenail/managed.json"
_VENDOR = SEARCHED[2:]
_KINDS = {kind.value: kind for kind in Kind}
_LIMIT = 64 * 1024 * 1024


class UnitStates(Protocol):
    """Who knows the states of units: systemd, or their files."""

    def states(self, *units: str) -> Mapping[str, str]:
        """As ``systemctl is-enabled``; empty without a file."""


class UnitFileState(Protocol):
    """systemd, as it runs; raises `UnitError` and `BusError`."""

    def unit_file_state(self, unit: str) -> str: ...


class AskedStates:
    """The states that systemd tells."""

    def __init__(self, systemd: UnitFileState) -> None:
        self._systemd = systemd

    def states(self, *units: str) -> dict[str, str]:
        return {unit: self._systemd.unit_file_state(unit) for unit in units}


class Survey:
    """Looks at a machine. Raises `FileError` and `UnitError`."""

    def __init__(
        self,
        root: Root,
        shadow: Shadow,
        disk: Disk | None = None,
        systemd: UnitStates | None = None,
    ) -> None:
        """Without ``systemd`` the states of units are those that their files say."""
        self._root = root
        self._shadow = shadow
        self._disk = disk or Disk()
        self._files = Files(root, self._disk)
        self._originals = Originals(root, self._disk)
        self._units = Units(self._files)
        self._states: UnitStates = systemd or self._units

    def managed(self) -> Managed:
        """What belongs to the config that the machine has; nothing when nobody wrote that down.

        Where only the Machine Config Daemon was at work, what it says it wrote. Raises
        `LedgerError` and `ConfigError` when what is written can't be read.
        """
        content = self._files.read(RECORD, limit=_LIMIT)
        if content is None:
            return self._taken_over()
        try:
            return records.from_json(json.loads(content))
        except ValueError as error:
            path = self._root.path(RECORD)
            raise LedgerError(
                f"{path} is damaged: {error}",
                remedy=f"move {path} away; what the config lets go of then stays on the machine",
            ) from error

    def see(self, old: Managed, new: Wanted) -> Seen:
        """All that a plan from the one to the other depends on."""
        accounts = Accounts(self._files)
        stands = standing(self._root, self._disk, looked_at(old, new))
        units = sorted({*old.units, *new.units})
        users = old.users | new.users.keys()
        now = records.managed("", new).paths
        gone = old.paths - now
        kept = self._originals.paths() | self._originals.vendored(gone)
        # What is to be below a link that goes will not be where that link leads.
        going = tuple(f"{path}/" for path in gone if stands[path].kind == LINK)
        lead = {path for path in {*stands, *kept} if not (path in now and path.startswith(going))}
        return Seen(
            found={path: found_at(each, accounts) for path, each in stands.items()},
            kept=kept,
            elsewhere=self._elsewhere(lead),
            states=self._states.states(*units),
            vendored=frozenset(n for n in units if self._units.find(n, searched=_VENDOR)),
            login=accounts.has(names.LOGIN),
            password_hash=self._shadow.password_hash(names.LOGIN) if users else None,
            same_files=self._same_files(new, stands),
        )

    def _taken_over(self) -> Managed:
        content = self._files.read(CURRENT_CONFIG, limit=_LIMIT)
        if content is None:
            return Managed()
        document = load_json(content, where=str(self._root.path(CURRENT_CONFIG)))
        config = MachineConfig.from_json(document)
        return records.managed(config.name, wanted(config))

    def _elsewhere(self, paths: Iterable[str]) -> dict[str, str]:
        prefix = os.fspath(self._root.prefix)
        found = {path: below(place, prefix) for path, place in places(self._root, paths).items()}
        return {path: entry for path, entry in found.items() if entry != path}

    def _same_files(self, new: Wanted, stands: Mapping[str, Standing]) -> frozenset[str]:
        links = [link for link in new.links.values() if link.hard]
        targets = standing(self._root, self._disk, [link.target for link in links])
        return frozenset(
            link.path
            for link in links
            if stands[link.path].inode == targets[link.target].inode != (0, 0)
        )


def found_at(each: Standing, accounts: Accounts) -> Found:
    return Found(
        kind=_KINDS[each.kind],
        sha256=each.sha256,
        mode=each.mode,
        uid=each.uid,
        gid=each.gid,
        user=accounts.user(each.uid),
        group=accounts.group(each.gid),
        target=each.target,
        label=each.label,
        default_label=each.fitting,
    )
