"""The paths, units and users of a machine that belong to its config."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail import codec
from treenail.codec import CodecError, key
from treenail.config import drift, node_paths
from treenail.config.wanted import WantedState
from treenail.errors import LedgerError

Json = dict[str, object]
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Ownership:
    """The paths, units and users that a config owns on a machine; no contents."""

    config: str = field(default="", metadata=key(is_required=True))
    """The name of the config, empty if it has none."""
    paths: frozenset[str] = field(default=frozenset(), metadata=key(is_required=True))
    units: Mapping[str, bool | None] = field(default_factory=dict, metadata=key(is_required=True))
    """Each unit, and whether the config enables it; None leaves that to the presets."""
    users: frozenset[str] = field(default=frozenset(), metadata=key(is_required=True))


def compute_ownership(config: str, wanted: WantedState) -> Ownership:
    """Return what a config owns on a machine once it is applied."""
    hard_links = {path for path, link in wanted.links.items() if link.is_hard}
    credentials = node_paths.CREDENTIALS & wanted.files.keys()
    return Ownership(
        config=config,
        paths=frozenset({*drift.list_expected_paths(wanted), *hard_links, *credentials}),
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
    except CodecError as error:
        raise LedgerError(
            f"cannot read the paths and units that belong to the config: {error}",
            remedy="install the treenail that wrote them",
        ) from error
