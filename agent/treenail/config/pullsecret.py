"""Pull secrets: credentials by registry."""

import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail.errors import CredentialError

Json = dict[str, object]

_LIMIT = 1024 * 1024  # the maximum size of a Kubernetes Secret
_FIELDS = {"auth", "username", "password", "identitytoken"}
_SECRET_KEYS = {
    "kubernetes.io/dockerconfigjson": ".dockerconfigjson",
    "kubernetes.io/dockercfg": ".dockercfg",
}
"""Types of Secrets with logins, and the key of the content."""
_DOCKER_HUB = {"index.docker.io", "registry-1.docker.io"}


@dataclass(frozen=True, slots=True)
class RegistryCredential:
    """Credential for a registry; empty fields mean anonymous access."""

    auth: str = field(default="", repr=False)
    """``user:password`` in base64."""
    identity_token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class PullSecret:
    """Credentials by registry: ``host`` or ``host:port``, optionally with a path."""

    credentials: Mapping[str, RegistryCredential] = field(default_factory=dict, repr=False)


def parse_pull_secret(content: bytes, *, where: str) -> PullSecret:
    """Parse a ``.dockerconfigjson`` or the older ``.dockercfg``; empty content has no credentials.

    Raises `CredentialError`, which contains no part of the content. It identifies an entry by its
    number, because even the name of a registry may be a misplaced password.
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
        raise _make_error(where, 'it has no object "auths" and is not a .dockercfg')
    found: dict[str, RegistryCredential] = {}
    exact: set[str] = set()
    for number, (name, entry) in enumerate(auths.items(), 1):
        registry = _normalize_registry(name)
        if not registry or not registry.isprintable() or " " in registry:
            raise _make_error(where, f"the name of entry {number} is not a registry name")
        login = _parse_credential(entry)
        if login is None:
            raise _make_error(
                where, f"entry {number} has no usable auth, username and password, or identitytoken"
            )
        # Two spellings of one registry: pulls look up the one that is normalized already.
        if registry == name or registry not in exact:
            found[registry] = login
        if registry == name:
            exact.add(registry)
    return PullSecret(found)


def read_login_secret(document: object, *, where: str) -> PullSecret:
    """Read the logins of a Secret of type dockerconfigjson or dockercfg.

    Raises `CredentialError` for another type, without its key, and for invalid content. No error
    contains a part of the content.
    """
    secret = document if isinstance(document, dict) else {}
    kind = secret.get("type")
    name = _SECRET_KEYS.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise _make_secret_error(
            where, f"expected type {' or '.join(_SECRET_KEYS)}, found {kind!r:.80}"
        )
    values = secret.get("data")
    content = values.get(name) if isinstance(values, dict) else None
    if not isinstance(content, str):
        raise _make_secret_error(where, f"it has no key {name}")
    try:
        decoded = binascii.a2b_base64(content, strict_mode=True)
    except ValueError:
        raise _make_secret_error(where, f"the value of {name} is not base64") from None
    found = parse_pull_secret(decoded, where=where)
    if not found.credentials:
        raise _make_secret_error(where, "it has no login")
    return found


def find_credential(
    secret: PullSecret, registry: str, repository: str
) -> RegistryCredential | None:
    """Return the login for a repository: that of its longest path, then that of its registry."""
    path = f"{'docker.io' if registry in _DOCKER_HUB else registry}/{repository}"
    while path:
        if path in secret.credentials:
            return secret.credentials[path]
        path = path.rpartition("/")[0]
    return None


def merge_pull_secrets(internal: PullSecret, cluster: PullSecret) -> PullSecret:
    """Merge both pull secrets; the cluster's entry overrides the internal one.

    The Machine Config Operator builds its merged secret in the same order: first the entries of
    the internal registry, then the global pull secret.
    """
    return PullSecret({**internal.credentials, **cluster.credentials})


def encode_pull_secret(secret: PullSecret) -> bytes:
    """Encode the secret as ``.dockerconfigjson``; equal credentials give equal bytes.

    User name and password become ``auth``, the only form that containers-auth.json(5) reads.
    """
    auths = {registry: _encode_entry(login) for registry, login in secret.credentials.items()}
    return json.dumps({"auths": auths}, sort_keys=True, indent=1).encode() + b"\n"


def _decode_json(content: bytes) -> object:
    """Decode JSON; None for invalid JSON, because the parser's error contains the content."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _find_auths(document: Json) -> object:
    """Return the entries by registry; a .dockercfg has them at the top level."""
    if "auths" in document:
        return {} if document["auths"] is None else document["auths"]
    known = (isinstance(entry, dict) and entry.keys() & _FIELDS for entry in document.values())
    return document if all(known) else None


def _normalize_registry(name: str) -> str:
    """Return the name that pulls look up; a name with a scheme loses its scheme and path."""
    for scheme in ("https://", "http://"):
        if name.startswith(scheme):
            name = name.removeprefix(scheme).partition("/")[0]
    return "docker.io" if name in _DOCKER_HUB else name


def _parse_credential(entry: object) -> RegistryCredential | None:
    """Parse an entry; None when it is invalid."""
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


def _make_secret_error(where: str, why: str) -> CredentialError:
    return CredentialError(
        f"cannot read {where}: {why}",
        remedy="create it with: kubectl create secret docker-registry NAME "
        "--docker-server=REGISTRY --docker-username=USER --docker-password=PASSWORD",
    )


def _make_error(where: str, why: str) -> CredentialError:
    return CredentialError(
        f"cannot parse pull secret {where}: {why}",
        remedy='write it as {"auths": {"REGISTRY": {"auth": "USER:PASSWORD in base64"}}}, '
        "or run: podman login --authfile FILE REGISTRY",
    )
