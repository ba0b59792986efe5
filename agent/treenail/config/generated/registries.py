"""registries.conf of all pools, from mirror sets and the image config of the cluster.

The rules and their order are those of github.com/openshift/runtime-utils. As
containers-registries.conf(5) uses the most precise entry alone, the flags and mirrors of a scope
are copied to every entry inside it.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from treenail.api import decode, pullspec
from treenail.config import image_mirrors, node_paths
from treenail.config.generated import sources, toml_writer
from treenail.encoding import codec, json_values
from treenail.errors import ConfigError

SEARCH_DROP_IN = f"{node_paths.REGISTRIES_CONF}.d/01-image-searchRegistries.conf"
_IMAGE_NAME = "cluster"
_SCOPES_LIMIT = 1024
_NEVER, _ALLOW = "NeverContactSource", "AllowContactingSource"
_STRANDED = "the nodes could never update again"
# The patterns of openshift/api, written so that Python's re cannot backtrack.
_LABEL = r"[a-zA-Z0-9]+(?:-+[a-zA-Z0-9]+)*"
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_PLACE = rf"{_LABEL}(?:\.{_LABEL})*(?::[0-9]+)?(?:/{_PART})*"
_SCOPE = re.compile(rf"\*(?:\.{_LABEL})+|{_PLACE}")
# containers/image reads another first part as a path of docker.io, and then no pull succeeds.
_MIRROR = re.compile(rf"(?=localhost(?:/|$)|[^/]*[.:A-Z]){_PLACE}")
# CRI-O does not start with a search registry of another form.
_SEARCH = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[a-fA-F0-9:]+\])(?::[0-9]+)?")
_require = partial(codec.require, shows=True)
_ScopeField = Annotated[
    str, _require("HOST[:PORT][/PATH] or *.DOMAIN, without tag or digest", _SCOPE.fullmatch)
]
_MirrorField = Annotated[
    str,
    _require("HOST[:PORT][/PATH] with a dot or port, without tag or digest", _MIRROR.fullmatch),
]
_SearchField = Annotated[str, _require("HOST[:PORT]", _SEARCH.fullmatch)]
_ScopesField = Annotated[
    tuple[_ScopeField, ...],
    _require(f"at most {_SCOPES_LIMIT} entries", lambda scopes: len(scopes) <= _SCOPES_LIMIT),
]


Registry = image_mirrors.MirrorRule


@dataclass(frozen=True, slots=True)
class _SourceEntry(codec.JsonObject, is_strict=True):
    """Mirrors of one source, as an ImageContentSourcePolicy has them."""

    source: _ScopeField
    mirrors: tuple[_MirrorField, ...] = ()
    policy: Annotated[str, codec.EXCLUDED] = _ALLOW

    def __post_init__(self) -> None:
        is_repeated = self.source in self.mirrors
        if is_repeated and (self.policy == _NEVER or not self.others):
            problem = f"expected mirrors beside the source, found {self.source!r:.60}"
            raise json_values.Mismatch(problem=problem, at=["mirrors"])

    @property
    def others(self) -> set[str]:
        """Mirrors without the source."""
        return set(self.mirrors) - {self.source}


@dataclass(frozen=True, slots=True)
class _MirrorEntry(_SourceEntry, is_strict=True):
    policy: Annotated[
        str,
        codec.Key("mirrorSourcePolicy"),
        _require(f"{_NEVER} or {_ALLOW}", (_NEVER, _ALLOW).__contains__),
    ] = _ALLOW


_LISTS = image_mirrors.MIRROR_LISTS


@dataclass(frozen=True, slots=True)
class RegistryLists(codec.JsonObject, is_strict=True):
    """The lists of the image config as the MCO applies them; None where it writes nothing."""

    insecure: Annotated[_ScopesField | None, codec.Key("insecureRegistries")] = None
    blocked: Annotated[_ScopesField | None, codec.Key("blockedRegistries")] = None
    """For registries.conf."""
    allowed: Annotated[_ScopesField | None, codec.Key("allowedRegistries")] = None
    search: Annotated[
        tuple[_SearchField, ...] | None, codec.Key("containerRuntimeSearchRegistries")
    ] = None
    policy_blocked: Annotated[tuple[str, ...] | None, codec.EXCLUDED] = None
    """For policy.json: without the release's repository, which its mirrors serve."""


def check_registries(
    source: sources.SourceObject,
    others: Iterable[sources.SourceObject],
    facts: sources.ClusterFacts = sources.EMPTY_FACTS,
) -> None:
    """Raise `ConfigError` when the mirror set or image config is wrong or contradicts another.

    What the MCO accepts and what works is accepted, such as mirrors in a circle: a runtime does
    not ask the mirrors of a mirror. ``others`` that are wrong on their own do not count.
    """
    others = [other for other in others if other.key != source.key and not _find_problem(other)]
    if problem := _find_problem(source):
        raise problem
    _check_effect(source, others, facts)


def list_registries(
    objects: Iterable[sources.SourceObject],
    base: str,
    facts: sources.ClusterFacts = sources.EMPTY_FACTS,
) -> tuple[Registry, ...]:
    """Return the registries, sorted as in the file; ``base`` is registries.conf of the base."""
    known = tuple(objects)
    return _merge(_parse_base(base).registries, known, read_registry_lists(known, facts))


def generate_registry_files(
    objects: Iterable[sources.SourceObject], base: sources.BaseFiles, facts: sources.ClusterFacts
) -> tuple[sources.GeneratedFile, ...]:
    """Return registries.conf, and the drop-in with search registries; empty without a change."""
    known = tuple(objects)
    lists = read_registry_lists(known, facts)
    files = {}
    has_sets = any(source.kind in _LISTS for source in known)
    if has_sets or lists.insecure is not None or lists.blocked is not None:
        # A cluster that no MCO installed has no base: its nodes get what the objects say.
        config = _parse_base(base.find_text(node_paths.REGISTRIES_CONF) or "")
        registries = _merge(config.registries, known, lists)
        files[node_paths.REGISTRIES_CONF] = replace(config, registries=registries)
    if lists.search is not None:
        files[SEARCH_DROP_IN] = image_mirrors.RegistriesTable(search=lists.search)
    return tuple(
        sources.GeneratedFile(path, toml_writer.format_toml(config.to_json()))
        for path, config in files.items()
    )


def read_registry_lists(
    objects: Iterable[sources.SourceObject], facts: sources.ClusterFacts
) -> RegistryLists:
    """Return the lists of the image config, without what would block the release image.

    The MCO blocks the repository of the release only if a mirror for digests serves it.
    """
    known = tuple(objects)
    configs = (each for each in known if each.key == ("Image", "", _IMAGE_NAME))
    lists = next(map(_read_lists, configs), RegistryLists())
    scopes, release = lists.blocked or (), pullspec.strip_tag(facts.release_image)
    own = [scope for scope in scopes if is_inside(release, scope)]
    has_mirror = False
    if own:
        # Mirrors for tags do not count, even for a release that is named by a tag.
        digests = [each for each in known if each.kind != image_mirrors.TAG_SET]
        places = _list_places(_build_mirrors(_merge((), digests, lists)), facts.release_image)
        has_mirror = any(not any(is_inside(place, each) for each in scopes) for place in places)
    blocked = [scope for scope in scopes if has_mirror or scope not in own]
    return replace(
        lists,
        blocked=tuple(blocked) or None,
        policy_blocked=tuple(scope for scope in blocked if scope != release) or None,
        allowed=(*(release for _ in own if has_mirror), *(lists.allowed or ())) or None,
    )


def is_inside(scope: str, outer: str) -> bool:
    """Return whether a scope is ``outer`` or inside it, by the rules of runtime-utils."""
    if scope == outer or scope.startswith(f"{outer}/"):
        return True
    host = scope.partition(":" if ":" in scope else "/")[0]
    return outer.startswith("*.") and host.endswith(outer[1:]) and "/" not in host


def _merge(
    base: Iterable[Registry], objects: Iterable[sources.SourceObject], lists: RegistryLists
) -> tuple[Registry, ...]:
    entries = {entry.scope: entry for entry in base}

    def get_entry(scope: str) -> Registry:
        new = Registry(scope) if scope.startswith("*.") else Registry("", scope)
        return entries.setdefault(scope, new)

    mirrored = []
    sets = [(each.kind == image_mirrors.TAG_SET, one) for each in objects for one in _read(each)]
    for pull in (image_mirrors.DIGEST_ONLY, image_mirrors.TAG_ONLY):
        is_tag = pull == image_mirrors.TAG_ONLY
        # Mirrors that repeat the source are none; their policy has no effect.
        chosen = [one for is_tag_set, one in sets if is_tag_set is is_tag and one.others]
        by_source = dict[str, list[_SourceEntry]]()
        for one in chosen:
            by_source.setdefault(one.source, []).append(one)
        for source, own in sorted(by_source.items()):
            names = _sort_mirrors(source, (one.mirrors for one in own))
            mirrors = (image_mirrors.MirrorLocation(name, pull=pull) for name in names)
            entry, is_closed = get_entry(source), any(one.policy == _NEVER for one in own)
            entries[source] = replace(
                entry, is_blocked=entry.is_blocked or is_closed, mirrors=(*entry.mirrors, *mirrors)
            )
            mirrored.append(source)
    for scope in (*(lists.blocked or ()), *(lists.insecure or ())):
        get_entry(scope)
    for scope, entry in entries.items():
        is_blocked = entry.is_blocked or _is_inside_any(scope, lists.blocked)
        is_insecure = entry.is_insecure or _is_inside_any(scope, lists.insecure)
        tables = tuple(
            replace(
                each, is_insecure=each.is_insecure or _is_inside_any(each.location, lists.insecure)
            )
            for each in entry.mirrors
        )
        entries[scope] = replace(
            entry, is_blocked=is_blocked, is_insecure=is_insecure, mirrors=tables
        )
    bare = [scope for scope, entry in entries.items() if not entry.mirrors]
    for outer, scope in itertools.product(mirrored, bare):
        entry = entries[scope]
        if is_inside(scope, outer) and not entry.mirrors:
            entries[scope] = replace(entry, mirrors=_derive_mirrors(entries[outer], scope))
    return tuple(entries.values())


def _is_inside_any(scope: str, outer: Iterable[str] | None) -> bool:
    return any(is_inside(scope, each) for each in outer or ())


def _derive_mirrors(outer: Registry, scope: str) -> tuple[image_mirrors.MirrorLocation, ...]:
    if outer.prefix:
        expected = f"mirrors for {scope}, which the image config or another set names"
        raise _make_error(f"source {outer.prefix}", expected, "none")
    rest = scope[len(outer.scope) :]
    return tuple(replace(mirror, location=mirror.location + rest) for mirror in outer.mirrors)


def _sort_mirrors(source: str, lists: Iterable[tuple[str, ...]]) -> list[str]:
    """Sort topologically; a circle begins with its first mirror in the order of names."""
    before: dict[str, set[str]] = {}
    after: dict[str, set[str]] = {}
    for mirrors in lists:
        for first, second in itertools.pairwise(
            mirrors if source in mirrors else (*mirrors, source)
        ):
            after.setdefault(first, set()).add(second)
            before.setdefault(second, set()).add(first)
    names = sorted(before.keys() | after)
    ready = [name for name in names if name not in before]
    order: list[str] = []
    while len(order) < len(names):
        name = ready.pop(0) if ready else next(each for each in names if each not in order)
        order.append(name)
        following = sorted(after.get(name, ()))
        for each in following:
            before[each].discard(name)
        ready += [each for each in following if not before[each] and each not in order]
    # The source follows its mirrors anyway.
    return order[:-1] if order[-1] == source else order


def _parse_base(text: str) -> image_mirrors.RegistriesTable:
    return toml_writer.parse_toml(text, node_paths.REGISTRIES_CONF).read(
        image_mirrors.RegistriesTable
    )


def _read(source: sources.SourceObject) -> tuple[_SourceEntry, ...]:
    if source.kind not in _LISTS:
        return ()
    entry = _SourceEntry if source.kind == image_mirrors.SOURCE_POLICY else _MirrorEntry
    return source.get_spec().read_list(_LISTS[source.kind][0], entry)


def _read_lists(source: sources.SourceObject) -> RegistryLists:
    return source.get_spec().get_object("registrySources").read(RegistryLists)


def _build_mirrors(entries: Iterable[Registry]) -> image_mirrors.ImageMirrors:
    return image_mirrors.ImageMirrors(tuple(entries))


def _list_places(mirrors: image_mirrors.ImageMirrors, image: str) -> tuple[str, ...]:
    return mirrors.list_places(pullspec.strip_tag(image), is_digest="@" in image)


def _is_blocked(mirrors: image_mirrors.ImageMirrors, place: str) -> bool:
    return place not in mirrors.list_places(place, is_digest=True)


def _is_stranded(
    objects: Iterable[sources.SourceObject], facts: sources.ClusterFacts, image: str
) -> bool:
    """Return whether no pull of an image can succeed."""
    mirrors = _build_mirrors(list_registries(objects, "", facts))
    # Nodes get an OS image by digest, also when the pool names it by tag.
    is_digest = "@" in image or image in facts.node_images
    places = mirrors.list_places(pullspec.strip_tag(image), is_digest=is_digest)
    # A mirror that is a bare host is no repository: containers/image then tries no place at all.
    is_invalid = any("/" not in place for place in places)
    return is_invalid or all(_is_blocked(mirrors, place) for place in places)


def _find_problem(source: sources.SourceObject) -> ConfigError | None:
    """Return what is wrong with an object without the others."""
    try:
        if source.kind in _LISTS:
            decode.reject_unknown_fields(source.get_spec(), (_LISTS[source.kind][0],))
            _read(source)
        elif source.kind == "Image":
            _read_lists(source)
            if source.metadata.name != _IMAGE_NAME:
                raise _make_error("metadata.name", _IMAGE_NAME, source.metadata.name)
    except ConfigError as error:
        return error
    return None


def _check_effect(
    source: sources.SourceObject, others: list[sources.SourceObject], facts: sources.ClusterFacts
) -> None:
    own = {entry.source: entry.policy for entry in _read(source)}
    for other in (source, *others):
        for entry in _read(other):
            # With two policies for a source the MCO writes no registries.conf at all.
            if own.get(entry.source, entry.policy) != entry.policy:
                path, policy = f"mirrorSourcePolicy of {entry.source}", own[entry.source]
                raise _make_error(path, f"{policy} everywhere", f"{entry.policy} in {other.title}")
    try:
        list_registries(others, "", facts)
    except ConfigError:
        return  # a wildcard of another object, which is reported there
    known = [*others, source]
    lists, path = read_registry_lists(known, facts), "spec.registrySources.allowedRegistries"
    mirrors = _build_mirrors(_merge((), known, lists))
    for entry in _read(source):
        if entry.policy == _NEVER and all(_is_blocked(mirrors, each) for each in entry.others):
            found = f"blocked ones only: {', '.join(sorted(entry.others))}"
            raise _make_error(f"mirrors of {entry.source}", "one that is not blocked", found)
    allowed = lists.allowed or () if source.kind == "Image" else ()
    if lists.policy_blocked and allowed not in ((), (pullspec.strip_tag(facts.release_image),)):
        raise _make_error(path, "none beside blockedRegistries", ", ".join(allowed))
    for image in filter(None, (*facts.node_images, facts.release_image)):
        if _is_stranded(known, facts, image) and (
            _is_stranded([source], facts, image) or not _is_stranded(others, facts, image)
        ):
            found = f"it blocked, or a mirror without its path: {_STRANDED}"
            raise _make_error("spec", f"a way to pull the nodes' image {image}", found)
    for name in map(pullspec.strip_tag, facts.node_images if allowed else ()):
        if not any(is_inside(name, scope) for scope in allowed):
            found = f"{', '.join(allowed):.200}: {_STRANDED}"
            raise _make_error(path, f"{name}, which has the nodes' image", found)


def _make_error(path: str, expected: str, found: str) -> ConfigError:
    return ConfigError(f"{path}: expected {expected}, found {found:.300}")
