"""What on a machine belongs to its config: the paths, units and users that it may let go of."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail.config import drift, names
from treenail.config.wanted import WantedState
from treenail.errors import LedgerError

Json = dict[str, object]
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Ownership:
    """What a config put on a machine; no contents."""

    config: str = ""
    """The name of the config, empty if it has none."""
    paths: frozenset[str] = frozenset()
    units: Mapping[str, bool | None] = field(default_factory=dict)
    """Each unit, and whether it is to be enabled; None leaves it to the presets."""
    users: frozenset[str] = frozenset()


def compute_ownership(config: str, wanted: WantedState) -> Ownership:
    """What belongs to a config once a machine has it."""
    hard = {path for path, link in wanted.links.items() if link.is_hard}
    return Ownership(
        config=config,
        paths=frozenset(
            {*drift.list_expected_paths(wanted), *hard, *(names.CREDENTIALS & wanted.files.keys())}
        ),
        units={name: None if unit.mask else unit.enabled for name, unit in wanted.units.items()},
        users=frozenset(wanted.users.keys() & {names.CORE_USER}),
    )


def to_json(ownership: Ownership) -> Json:
    """The record as it is kept on disk."""
    return {
        "version": _VERSION,
        "config": ownership.config,
        "paths": sorted(ownership.paths),
        "units": dict(sorted(ownership.units.items())),
        "users": sorted(ownership.users),
    }


def from_json(document: object) -> Ownership:
    """What `to_json` wrote; raises `LedgerError` for anything else."""
    match document:
        case {
            "version": 1,
            "config": str(config),
            "paths": list(paths),
            "units": dict(units),
            "users": list(users),
        } if all(enabled in {True, False, None} for enabled in units.values()):
            return Ownership(
                config,
                frozenset(map(str, paths)),
                {str(name): enabled for name, enabled in units.items()},
                frozenset(map(str, users)),
            )
        case _:
            raise LedgerError(
                "the record of what belongs to the config is not of a form this version writes",
                remedy="install the version that wrote it",
            )
