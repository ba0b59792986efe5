"""Mirrors of image registries: where an image may be pulled from, and in which order. Pure.

The rules are those of containers-registries.conf(5). They come from the files that a config writes
to nodes, and from the objects of OpenShift that such files are made of. `is_safe_change` decides
whether registries.conf can change without a drain.
"""

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from treenail.api import decode, machineconfig
from treenail.config import node_paths, wanted_state
from treenail.encoding import codec, json_values
from treenail.errors import ConfigError

DIGEST_ONLY, TAG_ONLY = "digest-only", "tag-only"
DIGEST_SET, TAG_SET = "ImageDigestMirrorSet", "ImageTagMirrorSet"
SOURCE_POLICY = "ImageContentSourcePolicy"
MIRROR_LISTS = {
    DIGEST_SET: ("imageDigestMirrors", DIGEST_ONLY),
    TAG_SET: ("imageTagMirrors", TAG_ONLY),
    SOURCE_POLICY: ("repositoryDigestMirrors", DIGEST_ONLY),
}
"""The field with mirrors of each kind, and the images that they have."""
_DROP_INS = f"{node_paths.REGISTRIES_CONF}.d/"
_NEVER = "NeverContactSource"
_WILDCARD = "*."
_PULLS = ("", "all", DIGEST_ONLY, TAG_ONLY)


@dataclass(frozen=True, slots=True)
class MirrorLocation(codec.JsonObject, omits_defaults=True):
    """One ``[[registry.mirror]]``."""

    location: codec.NonEmptyText
    """``REGISTRY`` or ``REGISTRY/PATH``."""
    is_insecure: Annotated[bool, codec.Key("insecure")] = False
    pull: Annotated[
        str,
        codec.Key("pull-from-mirror"),
        codec.require(f"one of {', '.join(_PULLS[1:])}", _PULLS.__contains__),
    ] = ""
    """`DIGEST_ONLY`, `TAG_ONLY`, or another value for every image."""


@dataclass(frozen=True, slots=True)
class MirrorRule(codec.JsonObject, omits_defaults=True):
    """One ``[[registry]]``: mirrors of the images whose name begins with a scope."""

    prefix: str
    """``REGISTRY``, ``REGISTRY/PATH``, ``*.DOMAIN``, or empty for the location."""
    location: str = ""
    """What replaces the prefix in the name of the source; empty for the prefix itself."""
    is_insecure: Annotated[bool, codec.Key("insecure")] = False
    is_blocked: Annotated[bool, codec.Key("blocked")] = False
    """Use the mirrors only."""
    is_digest_only: Annotated[bool, codec.Key("mirror-by-digest-only")] = False
    mirrors: Annotated[tuple[MirrorLocation, ...], codec.Key("mirror")] = ()

    def __post_init__(self) -> None:
        if not self.scope:
            raise json_values.Mismatch("REGISTRY or REGISTRY/PATH")

    @property
    def scope(self) -> str:
        """Prefix of the names of images; ``*.DOMAIN`` for all hosts of a domain."""
        return self.prefix or self.location

    def list_mirrors(self) -> list[MirrorLocation]:
        """Return the mirrors, each with the images that it has."""
        if not self.is_digest_only:
            return [*self.mirrors]
        return [replace(mirror, pull=DIGEST_ONLY) for mirror in self.mirrors]

    def measure_match(self, name: str) -> int:
        """Return how many characters of ``REGISTRY/REPOSITORY`` the scope covers; 0 for none."""
        if self.scope.startswith(_WILDCARD):
            host = name.partition("/")[0]
            return len(host) if host.partition(":")[0].endswith(self.scope[1:]) else 0
        return len(self.scope) if f"{name}/".startswith(f"{self.scope}/") else 0


@dataclass(frozen=True, slots=True)
class ImageMirrors:
    """The rules of one config; empty without any."""

    rules: tuple[MirrorRule, ...] = ()

    def list_places(self, name: str, *, is_digest: bool) -> tuple[str, ...]:
        """Return the names to pull ``REGISTRY/REPOSITORY`` by: mirrors first, then the source.

        ``is_digest`` says whether the image is named by its digest.
        """
        matches = [candidate for candidate in self.rules if candidate.measure_match(name)]
        # Of prefixes of one length the first in their order counts, as in containers/image.
        order = sorted(matches, key=lambda match: (-len(match.scope), match.scope))
        rule = next(iter(order), None)
        if rule is None:
            return (name,)
        rest = name[rule.measure_match(name) :]
        other = TAG_ONLY if is_digest else DIGEST_ONLY
        places = [
            f"{mirror.location}{rest}" for mirror in rule.list_mirrors() if mirror.pull != other
        ]
        if not rule.is_blocked:
            places.append(f"{rule.location}{rest}" if rule.location else name)
        return tuple(dict.fromkeys(places))

    def list_registries(self) -> tuple[str, ...]:
        """Return ``HOST:PORT`` of all mirrors."""
        locations = (mirror.location for rule in self.rules for mirror in rule.mirrors)
        return tuple(sorted({location.partition("/")[0] for location in locations}))

    def add_rules(self, rules: Iterable[MirrorRule]) -> "ImageMirrors":
        """Return the rules of both; of one prefix, own mirrors come first."""
        merged = {rule.scope: rule for rule in self.rules}
        for rule in rules:
            known = merged.get(rule.scope, MirrorRule(rule.prefix, rule.location))
            merged[rule.scope] = replace(
                known,
                mirrors=tuple(dict.fromkeys((*known.list_mirrors(), *rule.list_mirrors()))),
                is_digest_only=False,
                is_blocked=known.is_blocked or rule.is_blocked,
            )
        return ImageMirrors(tuple(merged.values()))


NO_MIRRORS = ImageMirrors()


@dataclass(frozen=True, slots=True)
class RegistriesTable(codec.JsonObject, omits_defaults=True):
    """A whole registries.conf of version 2, in the order of containers/image."""

    registries: Annotated[tuple[MirrorRule, ...], codec.Key("registry")] = ()
    search: Annotated[tuple[str, ...] | None, codec.Key("unqualified-search-registries")] = None
    helpers: Annotated[tuple[str, ...] | None, codec.Key("credential-helpers")] = None
    # Go writes these two also without a value.
    mode: Annotated[str, codec.Key("short-name-mode", omit=False)] = ""
    auth: Annotated[str, codec.Key("additional-layer-store-auth-helper", omit=False)] = ""
    aliases: dict[str, str] | None = None


def encode_mirrors(mirrors: ImageMirrors) -> list[decode.Json]:
    """Encode the rules in the form of registries.conf."""
    return [rule.to_json() for rule in mirrors.rules]


MirrorsField = Annotated[
    ImageMirrors, codec.Via(ImageMirrors, encode_mirrors, wire=tuple[MirrorRule, ...])
]
"""The type of a field with rules in the form of registries.conf."""


def read_config_mirrors(config: machineconfig.MachineConfig) -> ImageMirrors:
    """Return the mirrors of the files that a rendered config writes; raise `ConfigError`.

    A file of ``registries.conf.d`` replaces what earlier ones say about the same prefix.
    """
    files = wanted_state.read_wanted_state(config).files
    names = [node_paths.REGISTRIES_CONF, *sorted(filter(_is_drop_in, files))]
    rules: dict[str, MirrorRule] = {}
    for path in names:
        if path in files:
            content = files[path].contents.decode_bytes()
            rules |= {rule.scope: rule for rule in parse_registries_conf(content, where=path)}
    return ImageMirrors(tuple(rules.values()))


def parse_registries_conf(content: bytes, *, where: str) -> tuple[MirrorRule, ...]:
    """Parse a registries.conf of version 2; raise `ConfigError`."""
    return _parse_registries(content, where).registries


def read_mirror_object(document: decode.Json, *, where: str) -> Iterator[MirrorRule]:
    """Yield the rules of an object of `MIRROR_LISTS`; raise `ConfigError`."""
    fields = decode.Fields.from_json(document, where)
    name, pull = MIRROR_LISTS[fields.get_text("kind")]
    for entry in fields.get_object("spec").iter_objects(name):
        yield MirrorRule(
            entry.get_required_text("source"),
            mirrors=tuple(
                MirrorLocation(mirror, pull=pull) for mirror in entry.get_text_list("mirrors")
            ),
            is_blocked=entry.get_text("mirrorSourcePolicy") == _NEVER,
        )


def _is_drop_in(path: str) -> bool:
    name = path.removeprefix(_DROP_INS)
    return name != path and "/" not in name and name.endswith(".conf")


def is_safe_change(old: bytes, new: bytes) -> bool:
    """Return whether the file can change from ``old`` to ``new`` without a drain.

    Invalid contents are never safe.
    """
    try:
        before, after = _parse_registries(old), _parse_registries(new)
    except ConfigError:
        return False
    searched = before.search or ()
    if (after.search or ())[: len(searched)] != searched:
        return False
    known = {registry.scope: registry for registry in before.registries}
    registries = {registry.scope: registry for registry in after.registries}
    return known.keys() <= registries.keys() and all(
        _has_same_source(known[name], registry) if name in known else _is_harmless(registry)
        for name, registry in registries.items()
    )


def _has_same_source(old: MirrorRule, new: MirrorRule) -> bool:
    if (old.prefix, old.location, old.is_blocked, old.is_insecure) != (
        new.prefix, new.location, new.is_blocked, new.is_insecure,
    ):  # fmt: skip
        return False
    known = {mirror.location: mirror for mirror in old.mirrors}
    mirrors = {mirror.location: mirror for mirror in new.mirrors}
    for location, mirror in known.items():
        after = mirrors.get(location)
        if after is None or after.is_insecure != mirror.is_insecure:
            return False
        if after.pull not in {mirror.pull, DIGEST_ONLY}:
            return False
        if _is_for_digests(old, mirror) and not _is_for_digests(new, after):
            return False
    added = (mirror for location, mirror in mirrors.items() if location not in known)
    return all(_is_for_digests(new, mirror) for mirror in added)


def _is_for_digests(registry: MirrorRule, mirror: MirrorLocation) -> bool:
    return registry.is_digest_only or mirror.pull == DIGEST_ONLY


def _is_harmless(registry: MirrorRule) -> bool:
    """Return whether a new entry only adds mirrors for digests."""
    elsewhere = registry.prefix and registry.prefix != registry.location
    return not (registry.is_blocked or elsewhere) and all(
        _is_for_digests(registry, mirror) for mirror in registry.mirrors
    )


def _parse_registries(contents: bytes, where: str = "registries.conf") -> RegistriesTable:
    try:
        document = tomllib.loads(contents.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: it is not TOML", remedy="correct the file") from error
    return RegistriesTable.from_json(document, where)
