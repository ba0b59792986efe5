"""Signature policies of all pools: policy.json, registries.d and the policies of namespaces.

The contents are those of the Machine Config Operator (MCO). One wrong entry makes every reader
refuse all of policy.json, and then the node pulls nothing (containers-policy.json(5)): this module
demands what the CRDs demand, and what readers demand beyond that.

A policy that covers the OS image of nodes is refused without a confirmation. rpm-ostree and bootc
pull with ``skopeo experimental-image-proxy``. It applies policy.json to every image that it opens,
also for ostree-unverified-registry (cmd/skopeo/proxy.go, newer than skopeo 1.13). Whether the next
OS image will be signed is not known here. The user confirms it with `COVERS_OS_IMAGE`; a policy of
the release, which the ClusterVersion owns, needs no confirmation. CRI-O alone reads the policies of
namespaces, so an ImagePolicy has no effect on the OS image.
"""

import binascii
import json
import re
from collections.abc import Iterable, Iterator, Sequence

from treenail.api import annotations, decode, pullspec
from treenail.config.generated import registries, sources
from treenail.encoding import json_text, yaml11
from treenail.errors import ConfigError

CLUSTER_KIND, NAMESPACE_KIND = "ClusterImagePolicy", "ImagePolicy"
POLICY_PATH = "/etc/containers/policy.json"
ATTACHMENTS_PATH = "/etc/containers/registries.d/sigstore-registries.yaml"
NAMESPACES_PATH = "/etc/crio/policies"
COVERS_OS_IMAGE, CONFIRMED = annotations.OWN_PREFIX + "covers-os-image", "confirmed"
"""Annotation of a ClusterImagePolicy, and its value: all OS images of the nodes are signed."""

# The MCO's templates and containers-common accept the same.
_ACCEPT, _REJECT = {"type": "insecureAcceptAnything"}, {"type": "reject"}
_DEFAULT = json.dumps({"default": [_ACCEPT], "transports": {"docker-daemon": {"": [_ACCEPT]}}})
# The patterns of openshift/api, without their ambiguity: Python's re would backtrack. Beyond
# them, readers refuse upper-case letters in names of Docker Hub, which have no path, and tags below
# a path of one part in the transport atomic. A scope with tag and digest would match no image.
_LABEL = r"[a-zA-Z0-9]+(?:-+[a-zA-Z0-9]+)*"
_DOMAIN = rf"{_LABEL}(?:\.{_LABEL})+"
_HOST = rf"(?:{_DOMAIN}|localhost)(?::[0-9]+)?"
_PART = r"(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)"
_DIGEST = r"[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,}"
_NAME = rf"(?=[^A-Z]*$|.*/)(?:localhost(?::[0-9]+)?|{_DOMAIN}|{_HOST}{_PART}+)"
_TAIL = rf"(?::\w[\w.-]{{0,127}}|@{_DIGEST})"
_SCOPE = rf"\*(?:\.{_LABEL})+|{_HOST}{_PART}*|{_HOST}{_PART}{{2,}}{_TAIL}"
# With docker.io/library/ before it, a name has 255 characters (docker/reference).
_SCOPES_LIMIT, _SCOPE_LENGTH, _NAME_LENGTH, _DATA_LENGTH = 256, 512, 237, 8192
_KEY, _CERTIFICATE = "PUBLIC KEY", "CERTIFICATE"
# Of DER: the length of the outer SEQUENCE, and the tag in its first SEQUENCE.
_DER = re.compile(rb"0(?:([\0-\x7f])|\x81(.)|\x82(..))0(?:[\0-\x7f]|\x81.|\x82..)(.)", re.DOTALL)
_DER_TAGS = {_KEY: b"\x06", _CERTIFICATE: b"\xa0\x02"}
"""The algorithm of a key; the version or the serial number of a certificate."""
_ROOTS = {"PublicKey": "publicKey", "FulcioCAWithRekor": "fulcioCAWithRekor", "PKI": "pki"}
_IDENTITIES = {
    "MatchRepoDigestOrExact": "", "MatchRepository": "",
    "ExactRepository": "exactRepository", "RemapIdentity": "remapIdentity",
}  # fmt: skip
# encoding/json of Go escapes these for HTML and JavaScript.
_GO_ESCAPES = str.maketrans({letter: f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"})

_Scopes = dict[str, list[object]]
"""Requirements by scope."""


def check_policy(
    source: sources.SourceObject,
    others: Iterable[sources.SourceObject],
    facts: sources.ClusterFacts,
) -> None:
    """Raise `ConfigError` when no runtime can use the policy, or no node could update again."""
    others = tuple(others)
    _make_requirement(source)
    scopes, conflicts = _read_scopes(source), _find_conflicts(source, others)
    if not len(set(scopes)) == len(scopes) <= _SCOPES_LIMIT:
        raise _make_error(f"at most {_SCOPES_LIMIT} scopes, none twice", str(len(scopes)))
    lists = registries.read_registry_lists(others, facts)
    for scope in scopes:
        form = "HOST[/PATH], HOST/A/B:TAG, HOST/A/B@DIGEST or *.DOMAIN"
        _check_text(scope, "spec.scopes", _SCOPE, form, _SCOPE_LENGTH)
        if scope not in conflicts:
            _check_lists(scope, lists)
    wider = {scope for other in others for scope in _read_scopes(other, CLUSTER_KIND)}
    for image in () if _is_confirmed(source) else facts.node_images:
        # The scope of one tag or digest covers no update. Of several, the narrowest has effect.
        places = pullspec.list_scopes(pullspec.strip_tag(image))
        known = wider.union(scopes, lists.allowed or ())
        place = next((place for place in places if place in known), None)
        if place in scopes:
            raise _make_error(
                "no OS image of nodes",
                f"{place}, which covers {image}: if it is not signed, the node could never update "
                "again",
                "narrow the scope, or sign all OS images and run: kubectl annotate "
                f"clusterimagepolicy {source.metadata.name} {COVERS_OS_IMAGE}={CONFIRMED}",
            )


def list_partial_problems(
    source: sources.SourceObject, others: Iterable[sources.SourceObject]
) -> tuple[ConfigError, ...]:
    """Return the problems of an accepted policy: scopes that have no effect."""
    return tuple(
        _make_error(
            f"scopes outside of every {CLUSTER_KIND}", f"{scope}, where {title} has effect instead"
        )
        for scope, title in _find_conflicts(source, others).items()
    )


def generate_policy_files(
    objects: Iterable[sources.SourceObject],
    base: sources.BaseFiles,
    facts: sources.ClusterFacts,
    known: Iterable[registries.Registry],
) -> tuple[sources.GeneratedFile, ...]:
    """Return the files in the order of the MCO; ``objects`` includes the image config."""
    objects, known = tuple(objects), sorted(known, key=lambda entry: entry.scope)
    cluster, namespaces = _collect_policies(objects)
    lists = registries.read_registry_lists(objects, facts)
    listed: _Scopes = {name: [_ACCEPT] for name in lists.allowed or () if name not in cluster}
    listed |= {name: [_REJECT] for name in lists.policy_blocked or ()}
    if not (lists.allowed or listed or cluster or namespaces):
        return ()
    text = base.find_text(POLICY_PATH) or _DEFAULT
    policy = decode.Fields.from_json(decode.load_json(text, where=POLICY_PATH), POLICY_PATH)
    docker = policy.get_object("transports").get_object("docker")
    shared = _join({scope: docker.get_list(scope) for scope in docker.values} | listed, cluster)
    if lists.policy_blocked or lists.allowed:
        policy.values["default"] = [_ACCEPT if lists.policy_blocked else _REJECT]
    if listed or cluster:
        text = _format_policy(policy, shared)
    files = [sources.GeneratedFile(POLICY_PATH, text)]
    if signed := {*cluster, *(scope for own in namespaces.values() for scope in own)}:
        places = {place for scope in signed for place in _list_places(scope, known)}
        attachments = {scope: {"use-sigstore-attachments": True} for scope in signed | places}
        text = yaml11.dump_yaml({"docker": attachments})
        files.append(sources.GeneratedFile(ATTACHMENTS_PATH, text))
    for namespace, own in namespaces.items():
        text = _format_policy(policy, _join(shared, own))
        files.append(sources.GeneratedFile(f"{NAMESPACES_PATH}/{namespace}.json", text))
    return tuple(files)


def _collect_policies(
    objects: Iterable[sources.SourceObject],
) -> tuple[_Scopes, dict[str, _Scopes]]:
    """Return the requirements of the cluster, and those of namespaces in the order of their names.

    The MCO adds those of one scope in the order of Go's maps, except at the bootstrap: here it is
    that of the policies' names.
    """
    cluster: _Scopes = {}
    namespaces: dict[str, _Scopes] = {}
    policies = [source for source in objects if source.kind in (CLUSTER_KIND, NAMESPACE_KIND)]
    for source in sorted(policies, key=lambda source: source.key):
        conflicts, requirement = _find_conflicts(source, policies), _make_requirement(source)
        for scope in filter(lambda scope: scope not in conflicts, _read_scopes(source)):
            is_cluster = source.kind == CLUSTER_KIND
            scopes = cluster if is_cluster else namespaces.setdefault(source.key[1], {})
            scopes.setdefault(scope, []).append(requirement)
    return cluster, namespaces


def _find_conflicts(
    source: sources.SourceObject, others: Iterable[sources.SourceObject]
) -> dict[str, str]:
    """Return the scopes of an ImagePolicy that have no effect, and the policies that cover them."""
    wider = [(outer, other) for other in others for outer in _read_scopes(other, CLUSTER_KIND)]
    return {
        scope: other.title
        for scope in _read_scopes(source, NAMESPACE_KIND)
        for outer, other in wider
        if registries.is_inside(scope, outer)
    }


def _read_scopes(source: sources.SourceObject, kind: str = "") -> tuple[str, ...]:
    """Return the scopes of a policy; of ``kind`` only, if that is not empty."""
    return source.get_spec().get_text_list("scopes") if source.kind == (kind or source.kind) else ()


def _is_confirmed(source: sources.SourceObject) -> bool:
    return (
        source.kind != CLUSTER_KIND
        or source.metadata.annotations.get(COVERS_OS_IMAGE) == CONFIRMED
        or any(owner.kind == "ClusterVersion" for owner in source.metadata.owner_references)
    )


def _check_lists(scope: str, lists: registries.RegistryLists) -> None:
    is_blocked = any(registries.is_inside(scope, outer) for outer in lists.policy_blocked or ())
    allowed = lists.allowed or (scope,)
    if is_blocked or not any(registries.is_inside(scope, outer) for outer in allowed):
        name = "blockedRegistries" if is_blocked else "allowedRegistries"
        raise _make_error(f"scopes that the {name} of Image cluster allow", scope)


def _list_places(name: str, known: Sequence[registries.Registry]) -> Iterator[str]:
    """Yield where images of a scope, and of registries inside it, come from; as scopes."""
    inner = (entry.scope for entry in known if registries.is_inside(entry.scope, name))
    for scope in {name, *inner}:
        covering = [entry for entry in known if _measure(scope, entry.scope)]
        # The MCO asks for an image of the scope, with a host for the wildcard. Of entries of one
        # length it takes the first in the order of scopes.
        repository = (pullspec.strip_tag(scope) if "/" in scope else scope).replace("*", "any", 1)
        if entry := max(covering, key=lambda entry: len(entry.scope), default=None):
            rest = repository[_measure(repository, entry.scope) :]
            locations = (entry.location, *(mirror.location for mirror in entry.mirrors))
            yield from (location + rest for location in locations if location)


def _measure(name: str, prefix: str) -> int:
    """Return the length of what the prefix covers, with a host also that host with a port."""
    is_wildcard = prefix.startswith("*.")
    start = name.find(prefix[1:]) if is_wildcard else 0
    end = start + len(prefix) - is_wildcard
    is_covered = start >= 0 and name.startswith(prefix[is_wildcard:], start)
    return end if is_covered and "/" not in name[:start] and name[end : end + 1] in ":/@" else 0


def _join(scopes: _Scopes, more: _Scopes) -> _Scopes:
    return scopes | {scope: [*scopes.get(scope, ()), *added] for scope, added in more.items()}


def _format_policy(policy: decode.Fields, scopes: _Scopes) -> str:
    """Format as encoding/json of Go does: maps are sorted, structs are not."""
    # A scope of atomic has three parts at most: readers refuse a longer one.
    short = {scope: added for scope, added in scopes.items() if scope.count("/") < 3}
    present = policy.get_object("transports").values
    transports = decode.Fields({**present, "docker": scopes, "atomic": short}, POLICY_PATH)
    ordered = {
        name: dict(sorted(transports.get_object(name).values.items()))
        for name in sorted(transports.values)
    }
    document = {"default": policy.get_list("default"), "transports": ordered}
    return json.dumps(document, indent=2, ensure_ascii=False).translate(_GO_ESCAPES)


def _make_requirement(source: sources.SourceObject) -> decode.Json:
    """Return the requirement of a policy, with the fields in Go's order; raise `ConfigError`."""
    policy = source.get_spec().get_object("policy")
    kind, member = _select(policy.get_object("rootOfTrust"), "policyType", _ROOTS)
    root: decode.Json
    if kind == "PublicKey":
        root = {"keyData": _read_pem(member, "keyData", _KEY)}
    elif kind == "PKI":
        subject = member.get_object("pkiCertificateSubject")
        root = {
            "caRootsData": _read_pem(member, "caRootsData", _CERTIFICATE),
            "caIntermediatesData": _read_pem(member, "caIntermediatesData", _CERTIFICATE, ""),
            "subjectEmail": subject.get_text("email"),
            "subjectHostname": subject.get_text("hostname"),
        }
        if not (root["subjectEmail"] or root["subjectHostname"]):
            raise _make_error("email or hostname", "neither", field=subject.path)
        root = {"pki": {name: value for name, value in root.items() if value}}
    else:
        subject = member.get_object("fulcioSubject")
        fulcio = {
            "caData": _read_pem(member, "fulcioCAData", _CERTIFICATE),
            "oidcIssuer": subject.get_required_text("oidcIssuer"),
            "subjectEmail": subject.get_required_text("signedEmail"),
        }
        root = {"fulcio": fulcio}
    if kind == "FulcioCAWithRekor" or member.get_text("rekorKeyData"):
        root["rekorPublicKeyData"] = _read_pem(member, "rekorKeyData", _KEY)
    return {"type": "sigstoreSigned", **root, "signedIdentity": _make_identity(policy)}


def _make_identity(policy: decode.Fields) -> decode.Json:
    if policy.values.get("signedIdentity") is None:
        return {"type": "matchRepoDigestOrExact"}
    kind, member = _select(policy.get_object("signedIdentity"), "matchPolicy", _IDENTITIES)
    identity: decode.Json = {"type": kind[0].lower() + kind[1:]}
    names = {"repository": "dockerRepository", "prefix": "prefix", "signedPrefix": "signedPrefix"}
    wanted = {"ExactRepository": ["repository"], "RemapIdentity": ["prefix", "signedPrefix"]}
    for name in wanted.get(kind, ()):
        text = member.get_required_text(name)
        _check_text(text, member.path_of(name), _NAME, "HOST[/PATH]", _NAME_LENGTH)
        identity[names[name]] = text
    return identity


def _select(fields: decode.Fields, name: str, members: dict[str, str]) -> tuple[str, decode.Fields]:
    """Return the kind of a union and its member."""
    kind = fields.get_text(name)
    if kind not in members:
        raise fields.make_error(name, f"one of {', '.join(members)}")
    return kind, fields.get_object(members[kind])


def _check_text(text: str, field: str, pattern: str, form: str, limit: int) -> None:
    if len(text) > limit or not re.fullmatch(pattern, text, re.ASCII):
        raise _make_error(f"{form} of at most {limit} characters", repr(text), field=field)


def _read_pem(fields: decode.Fields, name: str, label: str, default: str | None = None) -> str:
    """Return base64 as Go writes it, of PEM blocks with this label; check their outline alone."""
    text = fields.get_text(name)
    if not text and default is not None:
        return default
    try:
        content = json_text.decode_base64(text)
    except ValueError:
        content = b""
    begin, end = f"-----BEGIN {label}-----".encode(), f"-----END {label}-----".encode()
    before, *rest = content.split(begin)
    blocks = [block.partition(end) for block in rest]
    is_valid = not before and blocks and blocks[-1][2] in (b"", b"\n")
    if (
        not is_valid
        or len(text) > _DATA_LENGTH
        or not all(e and _is_der(b, label) for b, e, _ in blocks)
    ):
        raise _make_error(
            f"base64 of a {label} in PEM, of at most {_DATA_LENGTH} characters",
            "other data",
            f"encode a file that begins with {begin.decode()}: base64 -w0 FILE",
            fields.path_of(name),
        )
    return binascii.b2a_base64(content, newline=False).decode()


def _is_der(block: bytes, label: str) -> bool:
    try:
        content = binascii.a2b_base64(b"".join(block.split()), strict_mode=True)
    except ValueError:
        return False
    found = _DER.match(content)
    if not found or found[4] not in _DER_TAGS[label]:
        return False
    index = next(index for index in (1, 2, 3) if found[index] is not None)
    return len(content) == found.end(index) + int.from_bytes(found[index], "big")


def _make_error(
    expected: str, found: str, remedy: str = "", field: str = "spec.scopes"
) -> ConfigError:
    return ConfigError(f"{field}: expected {expected}, found {found:.300}", remedy=remedy)
