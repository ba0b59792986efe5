"""Whether a container runtime may read another registries.conf while its pods run.

It may when no image that is pulled today would be pulled from elsewhere: then what runs now can be
pulled again after the change, from where it came. Mirrors that are asked for digests only give the
same image as the source or none.
"""

import tomllib
from dataclasses import dataclass

from treenail.api.decode import Fields
from treenail.errors import ConfigError

_DIGEST_ONLY = "digest-only"


def safe_change(old: bytes, new: bytes) -> bool:
    """Whether no drain is needed between these two contents of the file.

    What can't be read is never safe.
    """
    try:
        before, after = _read(old), _read(new)
    except (ConfigError, ValueError, RecursionError):
        return False
    if after.search[: len(before.search)] != before.search:
        return False
    if not before.registries.keys() <= after.registries.keys():
        return False
    return all(
        _same_source(before.registries[name], registry)
        if name in before.registries
        else _harmless(registry)
        for name, registry in after.registries.items()
    )


@dataclass(frozen=True, slots=True)
class _Mirror:
    insecure: bool
    pull: str
    digest_only: bool


@dataclass(frozen=True, slots=True)
class _Registry:
    prefix: str
    location: str
    blocked: bool
    insecure: bool
    mirrors: dict[str, _Mirror]


@dataclass(frozen=True, slots=True)
class _Registries:
    search: tuple[str, ...]
    registries: dict[str, _Registry]


def _same_source(old: _Registry, new: _Registry) -> bool:
    if (old.prefix, old.location, old.blocked, old.insecure) != (
        new.prefix, new.location, new.blocked, new.insecure,
    ):  # fmt: skip
        return False
    for location, mirror in old.mirrors.items():
        after = new.mirrors.get(location)
        if after is None or after.insecure != mirror.insecure:
            return False
        if after.pull not in {mirror.pull, _DIGEST_ONLY}:
            return False
        if mirror.digest_only and not after.digest_only:
            return False
    added = (mirror for location, mirror in new.mirrors.items() if location not in old.mirrors)
    return all(mirror.digest_only for mirror in added)


def _harmless(registry: _Registry) -> bool:
    """A new entry that only adds mirrors for digests."""
    elsewhere = registry.prefix and registry.prefix != registry.location
    return not (registry.blocked or elsewhere) and all(
        mirror.digest_only for mirror in registry.mirrors.values()
    )


def _read(contents: bytes) -> _Registries:
    fields = Fields.of(tomllib.loads(contents.decode()), "registries.conf")
    found = fields.each("registry", _registry)
    return _Registries(
        search=fields.texts("unqualified-search-registries"),
        registries={registry.prefix or registry.location: registry for registry in found},
    )


def _registry(fields: Fields) -> _Registry:
    digests = fields.flag("mirror-by-digest-only")
    mirrors = {
        mirror.required_text("location"): _Mirror(
            insecure=mirror.flag("insecure"),
            pull=mirror.text("pull-from-mirror"),
            digest_only=digests or mirror.text("pull-from-mirror") == _DIGEST_ONLY,
        )
        for mirror in fields.objects("mirror")
    }
    return _Registry(
        prefix=fields.text("prefix"),
        location=fields.text("location"),
        blocked=fields.flag("blocked"),
        insecure=fields.flag("insecure"),
        mirrors=mirrors,
    )
