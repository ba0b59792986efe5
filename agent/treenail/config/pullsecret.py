"""Pull secrets: credentials by registry, and the history of accepted and rejected ones."""

import binascii
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from treenail.encoding import json_text
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
    ignored: str = field(default="", compare=False)
    """The settings of credential helpers: no program on a node or in a build has any."""


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
        missing = 'it has no object "auths" and is not a .dockercfg'
        raise _make_error(where, _name_ignored(document) or missing)
    credentials: dict[str, RegistryCredential] = {}
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
            credentials[registry] = login
        if registry == name:
            exact.add(registry)
    return PullSecret(credentials, _name_ignored(document))


def _name_ignored(document: Json) -> str:
    names = [name for name in ("credHelpers", "credsStore") if document.get(name)]
    return f"credential helpers are not supported: {' and '.join(names)}" if names else ""


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
        decoded = json_text.decode_base64(content)
    except ValueError:
        raise _make_secret_error(where, f"the value of {name} is not base64") from None
    pull_secret = parse_pull_secret(decoded, where=where)
    if not pull_secret.credentials:
        more = f"; {pull_secret.ignored}" if pull_secret.ignored else ""
        raise _make_secret_error(where, f"it has no login{more}")
    return pull_secret


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


@dataclass(frozen=True, slots=True)
class CredentialHistory:
    """Results of using credentials, by registry as named in pull secrets."""

    last_good: Mapping[str, RegistryCredential] = field(default_factory=dict, repr=False)
    """Credential of the last successful pull, or the one in place before a newer one arrived."""
    rejected_digests: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Digest of the newest credential, where the registry rejected it."""

    @property
    def is_empty(self) -> bool:
        return not self.last_good and not self.rejected_digests


def renew_history(
    history: CredentialHistory, in_place: PullSecret, newest: PullSecret
) -> CredentialHistory:
    """Return the history after the newest credentials arrived.

    A replaced credential that was never used is retained when there is no better one. The history
    drops registries that the newest pull secret does not contain: a user removed them.
    """
    good = {name: login for name, login in history.last_good.items() if name in newest.credentials}
    for name, login in newest.credentials.items():
        before = in_place.credentials.get(name)
        if before is not None and before != login:
            good.setdefault(name, before)
    rejected = {
        name: digest
        for name, digest in history.rejected_digests.items()
        if name in newest.credentials
        and digest == _compute_credential_digest(newest.credentials[name])
    }
    return CredentialHistory(good, rejected)


def select_credentials(history: CredentialHistory, newest: PullSecret) -> PullSecret:
    """Return the credentials to pull with."""
    return PullSecret(
        {
            name: history.last_good.get(name, login) if name in history.rejected_digests else login
            for name, login in newest.credentials.items()
        }
    )


def record_rejection(
    history: CredentialHistory, newest: PullSecret, image: str
) -> CredentialHistory | None:
    """Return the history after the registry rejected the current credential for the image.

    None when there is no other credential to try. After a rejection of the previous credential
    the next attempt uses the newest again: the registry may accept it by then.
    """
    name = find_registry(newest, image)
    if name is None:
        return None
    if name in history.rejected_digests:
        left = {
            registry: digest
            for registry, digest in history.rejected_digests.items()
            if registry != name
        }
        return replace(history, rejected_digests=left)
    login = newest.credentials[name]
    if history.last_good.get(name, login) == login:
        return None
    return replace(
        history,
        rejected_digests={**history.rejected_digests, name: _compute_credential_digest(login)},
    )


def record_success(history: CredentialHistory, newest: PullSecret, image: str) -> CredentialHistory:
    """Return the history after a pull: it needs no credential older than the current one."""
    name = find_registry(newest, image)
    if name is None:
        return history
    login = select_credentials(history, newest).credentials[name]
    return replace(history, last_good={**history.last_good, name: login})


def find_registry(secret: PullSecret, image: str) -> str | None:
    """Return the registry entry for the pull spec: the longest one that is its prefix.

    containers-auth.json(5) specifies this lookup: ever shorter paths, down to the host.
    """
    path = image.partition("@")[0]
    host, slash, rest = path.partition("/")
    path = f"{host}{slash}{rest.partition(':')[0]}"
    while path:
        if path in secret.credentials:
            return path
        path = path.rpartition("/")[0]
    return None


def describe_rejections(history: CredentialHistory, newest: PullSecret) -> Iterator[str]:
    """Yield a message for each newest credential that is not in use."""
    for name in sorted(history.rejected_digests):
        if history.last_good.get(name, newest.credentials[name]) != newest.credentials[name]:
            yield f"registry {name} rejected the newest credential; the previous one stays in use"


def encode_history(history: CredentialHistory) -> bytes:
    """Encode the history as JSON, which contains credentials."""
    document: Json = json.loads(encode_pull_secret(PullSecret(history.last_good)))
    document["rejected"] = dict(history.rejected_digests)
    return json.dumps(document, sort_keys=True).encode() + b"\n"


def decode_history(content: bytes, *, where: str) -> CredentialHistory:
    """Decode the output of `encode_history`; raises `CredentialError` without its content."""
    good = parse_pull_secret(content, where=where).credentials
    document = json.loads(content) if content.strip() else {}
    digests = document.get("rejected") or {}
    if not isinstance(digests, dict) or not all(
        isinstance(digest, str) for digest in digests.values()
    ):
        raise CredentialError(f'cannot parse {where}: "rejected" is not an object of digests')
    return CredentialHistory(good, digests)


def _compute_credential_digest(login: RegistryCredential) -> str:
    return hashlib.sha256(encode_pull_secret(PullSecret({"": login}))).hexdigest()
