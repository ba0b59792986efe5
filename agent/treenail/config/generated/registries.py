"""registries.conf of all pools, from mirror sets and the image config of the cluster.

The rules are those of github.com/openshift/runtime-utils. Its order is kept: mirrors, then blocked
registries, then insecure ones. containers-registries.conf(5) uses the most precise entry alone, so
flags and mirrors of a scope are copied to every entry inside it.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from treenail.api import decode
from treenail.config import image_mirrors, node_paths
from treenail.config.generated import sources, toml_writer
from treenail.errors import ConfigError

SEARCH_DROP_IN = f"{node_paths.REGISTRIES_CONF}.d/01-image-searchRegistries.conf"
IMAGE_CONFIG = "Image"
IMAGE_CONFIG_NAME = "cluster"
_MIRROR_LISTS = {
    image_mirrors.DIGEST_SET: "imageDigestMirrors",
    image_mirrors.TAG_SET: "imageTagMirrors",
    image_mirrors.SOURCE_POLICY: "repositoryDigestMirrors",
}
_MIRROR_FIELDS = ("source", "mirrors", "mirrorSourcePolicy")
_NEVER, _ALLOW = "NeverContactSource", "AllowContactingSource"
_IMAGE_FIELDS = (
    "allowedRegistriesForImport", "externalRegistryHostnames", "additionalTrustedCA",
    "registrySources", "imageStreamImportMode",
)  # fmt: skip
_SCOPE_FIELDS = ("insecureRegistries", "blockedRegistries", "allowedRegistries")
_SEARCH_FIELD = "containerRuntimeSearchRegistries"
_SCOPES_LIMIT, _SCOPE_LENGTH = 1024, 256
_WILDCARD = "*."
# As the patterns of openshift/api, without their ambiguity: Python's re would backtrack.
_LABEL = r"[a-zA-Z0-9]+(?:-+[a-zA-Z0-9]+)*"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*(?::[0-9]+)?"
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_MIRROR = re.compile(rf"{_HOST}(?:/{_PART})*")
_SOURCE = re.compile(rf"\*(?:\.{_LABEL})+|{_MIRROR.pattern}")
_SEARCH = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[a-fA-F0-9:]+\])(?::[0-9]+)?")
_FORM = "HOST[:PORT][/PATH] without tag and digest"
_UNREACHABLE = "the nodes could never update again"


@dataclass(frozen=True, slots=True)
class Registry:
    """One ``[[registry]]`` of registries.conf (containers-registries.conf(5))."""

    prefix: str
    location: str
    is_insecure: bool = False
    is_blocked: bool = False
    mirrors: tuple[tuple[str, str], ...] = ()
    """Location and pull-from-mirror of each mirror, in order."""
    insecure_mirrors: frozenset[str] = frozenset()
    """Locations of the mirrors that need no TLS."""
    is_digest_only: bool = False

    @property
    def scope(self) -> str:
        """What the name of an image begins with; ``*.DOMAIN`` for all hosts of a domain."""
        return self.prefix or self.location


@dataclass(frozen=True, slots=True)
class RegistryLists:
    """The image config as the MCO applies it; None where it writes nothing for a list."""

    insecure: tuple[str, ...] | None = None
    blocked: tuple[str, ...] | None = None
    """For registries.conf."""
    policy_blocked: tuple[str, ...] | None = None
    """For policy.json: without the release's repository, whose mirrors must stay allowed."""
    allowed: tuple[str, ...] | None = None
    search: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class _MirrorSet:
    source: str
    mirrors: tuple[str, ...]
    policy: str
    path: str


def is_inside(scope: str, outer: str) -> bool:
    """Return whether a scope is ``outer`` or inside it, by the rules of runtime-utils."""
    if scope == outer or scope.startswith(f"{outer}/"):
        return True
    host = scope.partition(":" if ":" in scope else "/")[0]
    return outer.startswith(_WILDCARD) and host.endswith(outer[1:]) and "/" not in host


def check_registries(
    source: sources.SourceObject,
    others: Iterable[sources.SourceObject],
    facts: sources.ClusterFacts = sources.EMPTY_FACTS,
) -> None:
    """Raise `ConfigError` when the mirror set or image config is wrong or contradicts another.

    What the MCO accepts and what works is accepted, such as mirrors in a circle: a runtime does
    not ask the mirrors of a mirror. ``others`` that are wrong by themselves do not count.
    """
    if source.kind not in (IMAGE_CONFIG, *_MIRROR_LISTS):
        return
    _check_fields(source)
    known = [other for other in others if other.key != source.key and _is_usable(other)]
    _check_policies(source, known)
    try:
        registries, lists = _apply((*known, source), facts)
    except ConfigError:
        _apply(known, facts)
        raise
    if source.kind == IMAGE_CONFIG:
        _check_allowed(lists, facts)
    for _, entry in _read_mirror_sets(source):
        mirrors = sorted(set(entry.mirrors) - {entry.source})
        if entry.policy == _NEVER and all(_is_blocked(registries, name) for name in mirrors):
            raise ConfigError(
                f"{entry.path}.mirrors: expected one that nodes may contact, found only blocked "
                f"ones: {', '.join(mirrors):.200}",
                remedy=f"add another mirror, or set mirrorSourcePolicy to {_ALLOW}",
            )
    for image in filter(None, (*facts.node_images, facts.release_image)):
        if _is_unreachable(registries, image) and (
            _is_unreachable(_apply([source], facts)[0], image)
            or not _is_unreachable(_apply(known, facts)[0], image)
        ):
            raise ConfigError(
                f"spec: expected that nodes can pull their image {image}, found it blocked without "
                f"a mirror: {_UNREACHABLE}",
                remedy=f"unblock {_read_repository(image)}, or add a mirror that is not blocked",
            )


def list_registries(
    objects: Iterable[sources.SourceObject],
    base: str,
    facts: sources.ClusterFacts = sources.EMPTY_FACTS,
) -> tuple[Registry, ...]:
    """Return the registries, sorted as in the file; ``base`` is registries.conf of the base."""
    known = tuple(objects)
    parsed = toml_writer.parse_toml(base, node_paths.REGISTRIES_CONF)
    lists = read_registry_lists(known, facts)
    return _merge_registries(parsed.map_objects("registry", _read_registry), known, lists)


def generate_registry_files(
    objects: Iterable[sources.SourceObject], base: sources.BaseFiles, facts: sources.ClusterFacts
) -> tuple[sources.GeneratedFile, ...]:
    """Return registries.conf, and the drop-in with search registries; empty without a change."""
    known = tuple(objects)
    lists = read_registry_lists(known, facts)
    files = []
    if (
        lists.insecure is not None
        or lists.blocked is not None
        or any(source.kind in _MIRROR_LISTS for source in known)
    ):
        # Without a base the nodes are none of the MCO's: they get what the objects say.
        text = base.find_text(node_paths.REGISTRIES_CONF) or ""
        parsed = toml_writer.parse_toml(text, node_paths.REGISTRIES_CONF)
        registries = list_registries(known, text, facts)
        files.append(
            sources.GeneratedFile(
                node_paths.REGISTRIES_CONF, _format_registries(parsed, registries)
            )
        )
    if lists.search is not None:
        parsed = decode.Fields({"unqualified-search-registries": list(lists.search)}, "")
        files.append(sources.GeneratedFile(SEARCH_DROP_IN, _format_registries(parsed, ())))
    return tuple(files)


def read_registry_lists(
    objects: Iterable[sources.SourceObject], facts: sources.ClusterFacts
) -> RegistryLists:
    """Return the lists of the image config ``cluster``, without a block of the release image.

    The MCO drops what would block the repository of the release, unless a mirror for digests
    serves it.
    """
    known = tuple(objects)
    config = next((source for source in known if _is_image_config(source)), None)
    if config is None:
        return RegistryLists()
    fields = config.get_spec().get_object("registrySources")
    insecure, spec_blocked, spec_allowed, search = (
        fields.get_text_list(name) if fields.values.get(name) is not None else None
        for name in (*_SCOPE_FIELDS, _SEARCH_FIELD)
    )
    blocked: list[str] = []
    policy_blocked: list[str] = []
    allowed: list[str] = []
    release = _read_repository(facts.release_image)
    for scope in spec_blocked or ():
        if release and is_inside(release, scope):
            if not _has_open_mirror(known, facts.release_image, insecure or (), spec_blocked or ()):
                continue
            allowed.append(release)
            if release == scope:
                blocked.append(scope)
                continue
        blocked.append(scope)
        policy_blocked.append(scope)
    allowed += spec_allowed or ()
    return RegistryLists(
        insecure,
        tuple(blocked) or None,
        tuple(policy_blocked) or None,
        tuple(allowed) or None,
        search,
    )


def _apply(
    objects: Iterable[sources.SourceObject], facts: sources.ClusterFacts
) -> tuple[tuple[Registry, ...], RegistryLists]:
    known = tuple(objects)
    lists = read_registry_lists(known, facts)
    return _merge_registries((), known, lists), lists


def _is_usable(source: sources.SourceObject) -> bool:
    try:
        _check_fields(source)
    except ConfigError:
        return False
    return True


def _check_fields(source: sources.SourceObject) -> None:
    spec = source.get_spec()
    if source.kind == IMAGE_CONFIG:
        _check_image_config(source.metadata.name, spec)
        return
    if source.kind not in _MIRROR_LISTS:
        return
    decode.reject_unknown_fields(spec, (_MIRROR_LISTS[source.kind],))
    is_policy = source.kind == image_mirrors.SOURCE_POLICY
    for fields, (_, entry) in zip(
        spec.iter_objects(_MIRROR_LISTS[source.kind]), _read_mirror_sets(source), strict=True
    ):
        decode.reject_unknown_fields(fields, _MIRROR_FIELDS[:2] if is_policy else _MIRROR_FIELDS)
        _match(_SOURCE, entry.source, f"{entry.path}.source", f"{_FORM}, or *.DOMAIN")
        for index, mirror in enumerate(entry.mirrors):
            path = f"{entry.path}.mirrors[{index}]"
            _match(_MIRROR, mirror, path, _FORM)
            host = mirror.partition("/")[0]
            if not (host == "localhost" or "." in host or ":" in host or host != host.lower()):
                # containers/image reads such a name as a path of docker.io, and every pull of the
                # source fails.
                raise _make_error(path, "a host with a dot or a port", mirror)
        if entry.policy not in (_NEVER, _ALLOW):
            raise _make_error(
                f"{entry.path}.mirrorSourcePolicy", f"{_NEVER} or {_ALLOW}", entry.policy
            )
        if entry.source in entry.mirrors and (
            entry.policy == _NEVER or set(entry.mirrors) == {entry.source}
        ):
            raise _make_error(
                f"{entry.path}.mirrors", "another registry than the source", entry.source,
                "remove it from the mirrors",
            )  # fmt: skip


def _check_image_config(name: str, spec: decode.Fields) -> None:
    if name != IMAGE_CONFIG_NAME:
        raise _make_error("metadata.name", IMAGE_CONFIG_NAME, name)
    decode.reject_unknown_fields(spec, _IMAGE_FIELDS)
    fields = spec.get_object("registrySources")
    decode.reject_unknown_fields(fields, (*_SCOPE_FIELDS, _SEARCH_FIELD))
    for field in (*_SCOPE_FIELDS, _SEARCH_FIELD):
        scopes = fields.get_text_list(field)
        if len(scopes) > _SCOPES_LIMIT:
            raise _make_error(fields.path_of(field), f"at most {_SCOPES_LIMIT}", str(len(scopes)))
        is_search = field == _SEARCH_FIELD
        for index, scope in enumerate(scopes):
            path = f"{fields.path_of(field)}[{index}]"
            if is_search:
                # CRI-O does not start with an entry of another form.
                _match(_SEARCH, scope, path, "HOST[:PORT]")
            else:
                _match(_SOURCE, scope[: _SCOPE_LENGTH + 1], path, f"{_FORM}, or *.DOMAIN")


def _check_policies(source: sources.SourceObject, others: Iterable[sources.SourceObject]) -> None:
    """Refuse two policies for one source; the MCO then writes no registries.conf at all."""
    own: dict[str, str] = {}
    for _, entry in _read_mirror_sets(source):
        if own.setdefault(entry.source, entry.policy) != entry.policy:
            raise _make_conflict(entry, own[entry.source], "another entry of this object")
    for other in others if own else ():
        for _, entry in _read_mirror_sets(other):
            if own.get(entry.source, entry.policy) != entry.policy:
                raise _make_conflict(entry, own[entry.source], other.title)


def _make_conflict(entry: _MirrorSet, policy: str, title: str) -> ConfigError:
    return ConfigError(
        f"mirrorSourcePolicy of source {entry.source}: expected {policy} everywhere, found "
        f"{entry.policy} in {title}",
        remedy="set the same mirrorSourcePolicy in both",
    )


def _check_allowed(lists: RegistryLists, facts: sources.ClusterFacts) -> None:
    path = "spec.registrySources.allowedRegistries"
    allowed = lists.allowed or ()
    if allowed and lists.policy_blocked and allowed != (_read_repository(facts.release_image),):
        raise ConfigError(
            f"{path}: expected none beside blockedRegistries, found {', '.join(allowed):.200}",
            remedy="remove one of the two lists",
        )
    for image in facts.node_images if allowed else ():
        name = _read_repository(image)
        if not any(is_inside(name, scope) for scope in allowed):
            raise ConfigError(
                f"{path}: expected {name}, which the image of the nodes is in, found "
                f"{', '.join(allowed):.200}: {_UNREACHABLE}",
                remedy=f"add {name}",
            )


def _is_unreachable(registries: tuple[Registry, ...], image: str) -> bool:
    return all(_is_blocked(registries, place) for place in _list_places(registries, image))


def _is_blocked(registries: Iterable[Registry], name: str) -> bool:
    matches = [registry for registry in registries if is_inside(name, registry.scope)]
    return bool(matches) and max(matches, key=lambda match: len(match.scope)).is_blocked


def _match(pattern: re.Pattern[str], text: str, path: str, expected: str) -> None:
    if not pattern.fullmatch(text):
        raise _make_error(path, expected, text)


def _make_error(path: str, expected: str, found: str, remedy: str = "") -> ConfigError:
    return ConfigError(
        f"{path}: expected {expected}, found {found!r:.100}", remedy=remedy or "correct the field"
    )


def _is_image_config(source: sources.SourceObject) -> bool:
    return source.kind == IMAGE_CONFIG and source.metadata.name == IMAGE_CONFIG_NAME


def _read_repository(image: str) -> str:
    name = image.partition("@")[0]
    host, slash, path = name.partition("/")
    return f"{host}{slash}{path.partition(':')[0]}"


def _has_open_mirror(
    objects: Iterable[sources.SourceObject],
    image: str,
    insecure: tuple[str, ...],
    blocked: tuple[str, ...],
) -> bool:
    """Return whether a mirror that is not blocked serves the release image."""
    # A release is pulled by digest, and mirrors for tags do not count even for one with a tag.
    digest_sets = [source for source in objects if source.kind != image_mirrors.TAG_SET]
    registries = _merge_registries((), digest_sets, RegistryLists(insecure, blocked))
    return any(
        not any(is_inside(place, scope) for scope in blocked)
        for place in _list_places(registries, image)
    )


def _list_places(registries: Iterable[Registry], image: str) -> tuple[str, ...]:
    """Return the repositories that an image can come from; its own is there even if blocked."""
    name = _read_repository(image)
    rules = (
        image_mirrors.MirrorRule(
            registry.scope,
            "" if registry.location == registry.scope else registry.location,
            tuple(image_mirrors.MirrorLocation(*mirror) for mirror in registry.mirrors),
        )
        for registry in registries
    )
    return image_mirrors.ImageMirrors(tuple(rules)).list_places(name, is_digest="@" in image)


def _merge_registries(
    base: Iterable[Registry], objects: Iterable[sources.SourceObject], lists: RegistryLists
) -> tuple[Registry, ...]:
    registries = {registry.scope: registry for registry in base}

    def get_entry(scope: str) -> Registry:
        is_wildcard = scope.startswith(_WILDCARD)
        new = Registry(scope, "") if is_wildcard else Registry("", scope)
        return registries.setdefault(scope, new)

    sets = [entry for source in objects for entry in _read_mirror_sets(source)]
    merged = []
    for is_tag, pull in ((False, image_mirrors.DIGEST_ONLY), (True, image_mirrors.TAG_ONLY)):
        chosen = [mirrors for kind, mirrors in sets if (kind == image_mirrors.TAG_SET) is is_tag]
        for name, locations, is_blocked in _merge_sets(chosen):
            merged.append(name)
            entry = get_entry(name)
            registries[name] = replace(
                entry,
                is_blocked=entry.is_blocked or is_blocked,
                mirrors=(*entry.mirrors, *((location, pull) for location in locations)),
            )
    for scope in lists.blocked or ():
        get_entry(scope)
    for outer in lists.insecure or ():
        get_entry(outer)
        for scope, entry in registries.items():
            insecure = (location for location, _ in entry.mirrors if is_inside(location, outer))
            registries[scope] = replace(
                entry,
                is_insecure=entry.is_insecure or is_inside(scope, outer),
                insecure_mirrors=entry.insecure_mirrors.union(insecure),
            )
    for outer in lists.blocked or ():
        for scope, entry in registries.items():
            if is_inside(scope, outer):
                registries[scope] = replace(entry, is_blocked=True)
    for outer in merged:
        for scope, entry in registries.items():
            if scope != outer and is_inside(scope, outer) and not entry.mirrors:
                registries[scope] = _copy_mirrors(registries[outer], entry)
    return tuple(registries.values())


def _copy_mirrors(outer: Registry, inner: Registry) -> Registry:
    """Return the inner entry with the mirrors of the outer one, at their paths."""
    if outer.scope.startswith(_WILDCARD):
        raise ConfigError(
            f"source {outer.scope}: expected no other entry for a part of it, "
            f"found {inner.scope}, which no mirror can be derived for",
            remedy=f"add mirrors for {inner.scope}, or name the hosts instead of the wildcard",
        )
    rest = inner.scope[len(outer.scope) :]
    return replace(
        inner,
        mirrors=tuple((location + rest, pull) for location, pull in outer.mirrors),
        insecure_mirrors=frozenset(location + rest for location in outer.insecure_mirrors),
    )


def _read_mirror_sets(source: sources.SourceObject) -> Iterator[tuple[str, _MirrorSet]]:
    if source.kind not in _MIRROR_LISTS:
        return
    for entry in source.get_spec().iter_objects(_MIRROR_LISTS[source.kind]):
        yield (
            source.kind,
            _MirrorSet(
                entry.get_text("source"),
                entry.get_text_list("mirrors"),
                entry.get_text("mirrorSourcePolicy") or _ALLOW,
                entry.path,
            ),
        )


def _merge_sets(sets: Iterable[_MirrorSet]) -> Iterator[tuple[str, list[str], bool]]:
    """Yield each source with its mirrors in one order, and whether only these may be used."""
    by_source: dict[str, list[_MirrorSet]] = {}
    for entry in sets:
        # Mirrors that repeat the source are none; their policy has no effect.
        if set(entry.mirrors) - {entry.source}:
            by_source.setdefault(entry.source, []).append(entry)
    for source in sorted(by_source):
        entries = by_source[source]
        order = _sort_mirrors(source, (entry.mirrors for entry in entries))
        # The source follows its mirrors anyway.
        mirrors = order[:-1] if order[-1] == source else order
        yield source, mirrors, any(entry.policy == _NEVER for entry in entries)


def _sort_mirrors(source: str, lists: Iterable[tuple[str, ...]]) -> list[str]:
    """Sort topologically; a circle begins with its first mirror in the order of names."""
    before: dict[str, set[str]] = {}
    after: dict[str, set[str]] = {}
    for mirrors in lists:
        names = mirrors if source in mirrors else (*mirrors, source)
        for name in names:
            before.setdefault(name, set())
            after.setdefault(name, set())
        for first, second in zip(names, names[1:], strict=False):
            after[first].add(second)
            before[second].add(first)
    rest = sorted(before)
    ready = [name for name in rest if not before[name]]
    order: dict[str, None] = {}
    while len(order) < len(before):
        name = ready.pop(0) if ready else next(name for name in rest if name not in order)
        order[name] = None
        for following in after[name]:
            before[following].discard(name)
        ready += sorted(
            following
            for following in after[name]
            if not before[following] and following not in order
        )
    return list(order)


def _read_registry(fields: decode.Fields) -> Registry:
    mirrors = list(fields.iter_objects("mirror"))
    return Registry(
        fields.get_text("prefix"),
        fields.get_text("location"),
        fields.get_bool("insecure"),
        fields.get_bool("blocked"),
        tuple((each.get_text("location"), each.get_text("pull-from-mirror")) for each in mirrors),
        frozenset(each.get_text("location") for each in mirrors if each.get_bool("insecure")),
        fields.get_bool("mirror-by-digest-only"),
    )


def _format_registries(base: decode.Fields, registries: Iterable[Registry]) -> str:
    return toml_writer.format_toml(
        {
            "registry": [_encode_registry(registry) for registry in registries] or None,
            "unqualified-search-registries": base.values.get("unqualified-search-registries"),
            "credential-helpers": base.values.get("credential-helpers"),
            "short-name-mode": base.get_text("short-name-mode"),
            "additional-layer-store-auth-helper": base.get_text(
                "additional-layer-store-auth-helper"
            ),
            "aliases": base.get_object("aliases").values or None,
        }
    )


def _encode_registry(registry: Registry) -> decode.Json:
    return {
        "prefix": registry.prefix,
        "location": registry.location or None,
        "insecure": registry.is_insecure or None,
        "blocked": registry.is_blocked or None,
        "mirror-by-digest-only": registry.is_digest_only or None,
        "mirror": [
            {
                "location": location or None,
                "insecure": location in registry.insecure_mirrors or None,
                "pull-from-mirror": pull or None,
            }
            for location, pull in registry.mirrors
        ],
    }
