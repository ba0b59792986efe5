"""The inventory: the state of a machine that a plan depends on, and what of it a config owns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from treenail import errors, observations
from treenail.config import drift_comparison, node_paths, wanted_state
from treenail.encoding import codec
from treenail.units import unit_files

Json = dict[str, object]
OWNERSHIP_FILE = "/var/lib/treenail/managed.json"
OWNERSHIP_LIMIT = 64 * 1024 * 1024
"""Bytes that the record of a config with many files may have."""
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Ownership:
    """The paths, units and users that a config owns on a machine; no contents."""

    config: Annotated[str, codec.Key(is_required=True)] = ""
    """The name of the config, empty if it has none."""
    paths: Annotated[frozenset[str], codec.Key(is_required=True)] = frozenset()
    units: Annotated[Mapping[str, bool | None], codec.Key(is_required=True)] = field(
        default_factory=dict
    )
    """Each unit, and whether the config enables it; None leaves that to the presets."""
    users: Annotated[frozenset[str], codec.Key(is_required=True)] = frozenset()


def compute_ownership(config: str, wanted: wanted_state.WantedState) -> Ownership:
    """Return what a config owns on a machine once it is applied."""
    hard_links = {path for path, link in wanted.links.items() if link.is_hard}
    credentials = node_paths.CREDENTIALS & wanted.files.keys()
    return Ownership(
        config=config,
        paths=frozenset({*drift_comparison.list_expected_paths(wanted), *hard_links, *credentials}),
        units={name: None if unit.mask else unit.enabled for name, unit in wanted.units.items()},
        users=frozenset(wanted.users.keys() & {node_paths.CORE_USER}),
    )


def to_json(ownership: Ownership) -> Json:
    """Return the JSON document of the ownership."""
    return codec.encode(ownership, version=_VERSION)


def from_json(document: object) -> Ownership:
    """Return the ownership that `to_json` made ``document`` from; raises `LedgerError`."""
    try:
        return codec.decode(Ownership, document, version=_VERSION)
    except codec.CodecError as error:
        raise errors.LedgerError(
            f"cannot read the paths and units that belong to the config: {error}",
            remedy="install the treenail that wrote them",
        ) from error


_SSH = node_paths.AUTHORIZED_KEYS.rpartition("/")[0]
KEY_DIRECTORIES = (_SSH.rpartition("/")[0], _SSH)
"""Directories of SSH keys. sshd refuses those that other users can write to (StrictModes)."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The state of the machine that a plan depends on."""

    entries: Mapping[str, observations.PathEntry] = field(default_factory=dict)
    """The entry at each of `list_inspected_paths`."""
    restorable: frozenset[str] = frozenset()
    """The paths with a backup or a vendor's default, which is restored once no config has them."""
    resolved_paths: Mapping[str, str] = field(default_factory=dict)
    """The resolved path of each path that leads through symbolic links."""
    units: unit_files.UnitFileReader = field(
        default_factory=lambda: unit_files.UnitFileReader(unit_files.ChangedFiles())
    )
    """The unit files and links of the machine."""
    restored_units: Mapping[str, unit_files.FileChange] = field(default_factory=dict)
    """The unit files and drop-ins among ``restorable``, as they will be restored."""
    has_core_user: bool = False
    """The machine has the user ``core``."""
    password_hash: str | None = field(default=None, repr=False)
    """The password field of ``core``; None without a line in the shadow file."""
    intact_hard_links: frozenset[str] = frozenset()
    """The hard links that lead to the wanted file."""
    pristine: frozenset[str] = frozenset()
    """The paths below /etc and /usr, and the units, that are as the booted image has them.

    ostree replaces them by those of the next image at the reboot, and keeps all others.
    """

    def get_entry(self, path: str) -> observations.PathEntry:
        """Return the entry at an inspected path."""
        return self.entries.get(path, observations.ABSENT_ENTRY)

    def resolve_path(self, path: str) -> str:
        """Return the path that all paths to the same directory entry share."""
        return self.resolved_paths.get(path, path)


def list_inspected_paths(old: Ownership, new: wanted_state.WantedState) -> tuple[str, ...]:
    """Return the paths that a plan needs in the inventory."""
    unmasked = (
        node_paths.unit_path(unit.name) for unit in new.units.values() if unit.mask is False
    )
    credentials = node_paths.CREDENTIALS & new.files.keys()
    keys = (node_paths.AUTHORIZED_KEYS, *KEY_DIRECTORIES)
    hard_links = (path for path, link in new.links.items() if link.is_hard)
    return tuple(
        dict.fromkeys(
            (
                *drift_comparison.list_expected_paths(new),
                *hard_links,
                *unmasked,
                *credentials,
                *keys,
                *sorted(old.paths),
            )
        )
    )
