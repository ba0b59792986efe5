"""Pull secrets: which registry is shown which login."""

import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail.errors import CredentialError

Json = dict[str, object]

_LIMIT = 1024 * 1024  # the most that a Kubernetes Secret holds
_FIELDS = {"auth", "username", "password", "identitytoken"}
_DOCKER_HUB = {"index.docker.io", "registry-1.docker.io"}


@dataclass(frozen=True, slots=True)
class RegistryCredential:
    """What a registry is shown; without both fields nothing, which is a login too."""

    auth: str = field(default="", repr=False)
    """``user:password`` in base64."""
    identity_token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class PullSecret:
    """Logins by registry: ``host`` or ``host:port``, perhaps with a path that narrows it."""

    credentials: Mapping[str, RegistryCredential] = field(default_factory=dict, repr=False)


def parse_pull_secret(content: bytes, *, where: str) -> PullSecret:
    """The logins in a ``.dockerconfigjson`` or in the older ``.dockercfg``; empty is none.

    Raises `CredentialError`, which says where and what is wrong and repeats nothing of the
    content: an entry is named by its number, because even a registry's name may be a password
    that somebody put in the wrong place.
    """
    if len(content) > _LIMIT:
        raise _make_error(where, f"it is longer than {_LIMIT} bytes")
    if not content.strip():
        return PullSecret()
    document = _decode_json(content)
    if not isinstance(document, dict):
        raise _make_error(where, "it is not a JSON object")
    auths = _find_auths(document)
    if not isinstance(auths, dict):
        raise _make_error(where, 'it has no object "auths", and is no .dockercfg either')
    found: dict[str, RegistryCredential] = {}
    exact: set[str] = set()
    for number, (name, entry) in enumerate(auths.items(), 1):
        registry = _normalize_registry(name)
        if not registry or not registry.isprintable() or " " in registry:
            raise _make_error(where, f"the name of entry {number} is not that of a registry")
        login = _parse_credential(entry)
        if login is None:
            raise _make_error(
                where, f"entry {number} has no usable auth, username and password, or identitytoken"
            )
        # Two spellings of one registry: the one that needed no tidying is what pulls look for.
        if registry == name or registry not in exact:
            found[registry] = login
        if registry == name:
            exact.add(registry)
    return PullSecret(found)


def merge_pull_secrets(internal: PullSecret, cluster: PullSecret) -> PullSecret:
    """The logins of both; the cluster's wins where both name the same registry.

    That is the order in which the Machine Config Operator builds its own merged secret: the
    internal registry's entries first, the global pull secret over them.
    """
    return PullSecret({**internal.credentials, **cluster.credentials})


def encode_pull_secret(secret: PullSecret) -> bytes:
    """The secret as ``.dockerconfigjson``; the same logins are always the same bytes.

    A user name with its password becomes ``auth``: it is all that containers-auth.json(5) reads.
    """
    auths = {registry: _encode_entry(login) for registry, login in secret.credentials.items()}
    return json.dumps({"auths": auths}, sort_keys=True, indent=1).encode() + b"\n"


def _decode_json(content: bytes) -> object:
    """None for what is not JSON; the parser's own error would carry the content along."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _find_auths(document: Json) -> object:
    """The entries by registry; in a .dockercfg they are the document."""
    if "auths" in document:
        return {} if document["auths"] is None else document["auths"]
    known = (isinstance(entry, dict) and entry.keys() & _FIELDS for entry in document.values())
    return document if all(known) else None


def _normalize_registry(name: str) -> str:
    """The name as pulls look for it: without a scheme, and what such a name has after the host."""
    for scheme in ("https://", "http://"):
        if name.startswith(scheme):
            name = name.removeprefix(scheme).partition("/")[0]
    return "docker.io" if name in _DOCKER_HUB else name


def _parse_credential(entry: object) -> RegistryCredential | None:
    """None when the entry can't be understood."""
    if not isinstance(entry, dict):
        return None
    texts = {key: entry.get(key) or "" for key in _FIELDS}
    if not all(isinstance(text, str) for text in texts.values()):
        return None
    pair = f"{texts['username']}:{texts['password']}".encode("utf-8", "surrogatepass")
    if texts["auth"]:
        decoded = _decode_auth(texts["auth"])
        if decoded is None:
            return None
        pair = decoded
    auth = binascii.b2a_base64(pair, newline=False).decode() if pair != b":" else ""
    return RegistryCredential(auth, texts["identitytoken"])


def _decode_auth(auth: str) -> bytes | None:
    try:
        decoded = binascii.a2b_base64("".join(auth.split()), strict_mode=True)
    except ValueError:
        return None
    return decoded if b":" in decoded else None


def _encode_entry(login: RegistryCredential) -> Json:
    entry: Json = {}
    if login.auth:
        entry["auth"] = login.auth
    if login.identity_token:
        entry["identitytoken"] = login.identity_token
    return entry


def _make_error(where: str, why: str) -> CredentialError:
    return CredentialError(
        f"{where} is not a pull secret: {why}",
        remedy='it has to be {"auths": {"REGISTRY": {"auth": "USER:PASSWORD in base64"}}}, '
        "as podman login --authfile writes it",
    )
