"""What is on a machine, as far as a plan depends on it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail.config import drift, names
from treenail.config.drift import ActualEntry, EntryKind
from treenail.config.wanted import WantedState
from treenail.update.steps.ownership import Ownership

ABSENT_ENTRY = ActualEntry(EntryKind.NOTHING)

_SSH = names.AUTHORIZED_KEYS.rpartition("/")[0]
KEY_DIRECTORIES = (_SSH.rpartition("/")[0], _SSH)
"""Where sshd looks for keys; it refuses directories that others can write to."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What is on the machine, as far as a plan depends on it."""

    entries: Mapping[str, ActualEntry] = field(default_factory=dict)
    """What stands at each of `list_inspected_paths`."""
    restorable: frozenset[str] = frozenset()
    """The paths at which something is put back when the config lets go of them: of what stood
    there before it came there is a copy, or the vendor has something of its own."""
    resolved_paths: Mapping[str, str] = field(default_factory=dict)
    """Where the entry of a path is that leads through links."""
    unit_states: Mapping[str, str] = field(default_factory=dict)
    """The units' states, as ``systemctl is-enabled`` says; empty or absent without a file."""
    vendor_units: frozenset[str] = frozenset()
    """The units that have a file of the vendor, under one of the config's or alone."""
    has_core_user: bool = False
    """The machine has the user whose keys and password a config may set."""
    password_hash: str | None = field(default=None, repr=False)
    """That user's password field; None without a line for one."""
    intact_hard_links: frozenset[str] = frozenset()
    """The hard links that are names of the file they should be."""

    def resolve_path(self, path: str) -> str:
        """The one name that all paths to the same directory entry have in common."""
        return self.resolved_paths.get(path, path)


def list_inspected_paths(old: Ownership, new: WantedState) -> tuple[str, ...]:
    """The paths at which a plan has to look."""
    unmasked = (names.unit_path(unit.name) for unit in new.units.values() if unit.mask is False)
    credentials = names.CREDENTIALS & new.files.keys()
    keys = (names.AUTHORIZED_KEYS, *KEY_DIRECTORIES)
    hard = (path for path, link in new.links.items() if link.is_hard)
    return tuple(
        dict.fromkeys(
            (
                *drift.list_expected_paths(new),
                *hard,
                *unmasked,
                *credentials,
                *keys,
                *sorted(old.paths),
            )
        )
    )
