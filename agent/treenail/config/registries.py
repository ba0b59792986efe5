"""Check whether registries.conf can change without a drain.

The change is safe when every image is still pulled from the same source. Running pods can then
pull their images again. A mirror for digests only returns the same image as the source, or none.
"""

import tomllib
from dataclasses import dataclass

from treenail.api.decode import Fields
from treenail.errors import ConfigError

_DIGEST_ONLY = "digest-only"


def is_safe_change(old: bytes, new: bytes) -> bool:
    """Return whether the file can change from ``old`` to ``new`` without a drain.

    Invalid contents are never safe.
    """
    try:
        before, after = _parse_registries(old), _parse_registries(new)
    except (ConfigError, ValueError, RecursionError):
        return False
    if after.search[: len(before.search)] != before.search:
        return False
    if not before.registries.keys() <= after.registries.keys():
        return False
    return all(
        _has_same_source(before.registries[name], registry)
        if name in before.registries
        else _is_harmless(registry)
        for name, registry in after.registries.items()
    )


@dataclass(frozen=True, slots=True)
class _Mirror:
    is_insecure: bool
    pull: str
    is_digest_only: bool


@dataclass(frozen=True, slots=True)
class _Registry:
    prefix: str
    location: str
    is_blocked: bool
    is_insecure: bool
    mirrors: dict[str, _Mirror]


@dataclass(frozen=True, slots=True)
class _Registries:
    search: tuple[str, ...]
    registries: dict[str, _Registry]


def _has_same_source(old: _Registry, new: _Registry) -> bool:
    if (old.prefix, old.location, old.is_blocked, old.is_insecure) != (
        new.prefix, new.location, new.is_blocked, new.is_insecure,
    ):  # fmt: skip
        return False
    for location, mirror in old.mirrors.items():
        after = new.mirrors.get(location)
        if after is None or after.is_insecure != mirror.is_insecure:
            return False
        if after.pull not in {mirror.pull, _DIGEST_ONLY}:
            return False
        if mirror.is_digest_only and not after.is_digest_only:
            return False
    added = (mirror for location, mirror in new.mirrors.items() if location not in old.mirrors)
    return all(mirror.is_digest_only for mirror in added)


def _is_harmless(registry: _Registry) -> bool:
    """Return whether a new entry only adds mirrors for digests."""
    elsewhere = registry.prefix and registry.prefix != registry.location
    return not (registry.is_blocked or elsewhere) and all(
        mirror.is_digest_only for mirror in registry.mirrors.values()
    )


def _parse_registries(contents: bytes) -> _Registries:
    fields = Fields.from_json(tomllib.loads(contents.decode()), "registries.conf")
    found = fields.map_objects("registry", _parse_registry)
    return _Registries(
        search=fields.get_text_list("unqualified-search-registries"),
        registries={registry.prefix or registry.location: registry for registry in found},
    )


def _parse_registry(fields: Fields) -> _Registry:
    digests = fields.get_bool("mirror-by-digest-only")
    mirrors = {
        mirror.get_required_text("location"): _Mirror(
            is_insecure=mirror.get_bool("insecure"),
            pull=mirror.get_text("pull-from-mirror"),
            is_digest_only=digests or mirror.get_text("pull-from-mirror") == _DIGEST_ONLY,
        )
        for mirror in fields.iter_objects("mirror")
    }
    return _Registry(
        prefix=fields.get_text("prefix"),
        location=fields.get_text("location"),
        is_blocked=fields.get_bool("blocked"),
        is_insecure=fields.get_bool("insecure"),
        mirrors=mirrors,
    )
