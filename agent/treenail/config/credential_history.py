"""Selection of registry credentials: the newest, or the previous one after a rejection."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from treenail.config.pullsecret import (
    PullSecret,
    RegistryCredential,
    encode_pull_secret,
    parse_pull_secret,
)
from treenail.errors import CredentialError

Json = dict[str, object]


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
        left = {each: digest for each, digest in history.rejected_digests.items() if each != name}
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
    if not isinstance(digests, dict) or not all(isinstance(each, str) for each in digests.values()):
        raise CredentialError(f'cannot parse {where}: "rejected" is not an object of digests')
    return CredentialHistory(good, digests)


def _compute_credential_digest(login: RegistryCredential) -> str:
    return hashlib.sha256(encode_pull_secret(PullSecret({"": login}))).hexdigest()
