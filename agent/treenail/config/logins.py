"""Which login a registry is shown: the newest, or, once that was refused, the one before it."""

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
    """What using logins has shown; by registry, as pull secrets name it."""

    last_good: Mapping[str, RegistryCredential] = field(default_factory=dict, repr=False)
    """What was used with success last, or what was in place before a newer one came."""
    rejected_digests: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The digest of the newest login, where the registry refused it."""

    @property
    def is_empty(self) -> bool:
        return not self.last_good and not self.rejected_digests


def renew_history(
    history: CredentialHistory, in_place: PullSecret, newest: PullSecret
) -> CredentialHistory:
    """What is known once the newest logins stand beside those that are in place.

    A login that is replaced without ever having been used is kept if there is no better one. Of
    registries without a login any more nothing is kept: somebody took it away.
    """
    good = {name: login for name, login in history.last_good.items() if name in newest.credentials}
    for name, login in newest.credentials.items():
        before = in_place.credentials.get(name)
        if before is not None and before != login:
            good.setdefault(name, before)
    refused = {
        name: digest
        for name, digest in history.rejected_digests.items()
        if name in newest.credentials
        and digest == _compute_credential_digest(newest.credentials[name])
    }
    return CredentialHistory(good, refused)


def select_credentials(history: CredentialHistory, newest: PullSecret) -> PullSecret:
    """The logins to pull with."""
    return PullSecret(
        {
            name: history.last_good.get(name, login) if name in history.rejected_digests else login
            for name, login in newest.credentials.items()
        }
    )


def record_rejection(
    history: CredentialHistory, newest: PullSecret, image: str
) -> CredentialHistory | None:
    """What is known once the registry refused the login in use for the image's pull spec.

    None when there is no other login to try. When it was the earlier one that was refused, the
    newest is on trial again from the next attempt on: the registry may have learnt of it by then.
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
    """What is known once the image was pulled: nothing before the login in use is needed."""
    name = find_registry(newest, image)
    if name is None:
        return history
    login = select_credentials(history, newest).credentials[name]
    return replace(history, last_good={**history.last_good, name: login})


def find_registry(secret: PullSecret, image: str) -> str | None:
    """The entry whose login is shown for the pull spec: the longest that begins it.

    That is how containers-auth.json(5) looks them up: by ever shorter paths, down to the host.
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
    """A sentence for each newest login that is not used."""
    for name in sorted(history.rejected_digests):
        if history.last_good.get(name, newest.credentials[name]) != newest.credentials[name]:
            yield f"{name} refused the newest login for it; the one before stays in use"


def encode_history(history: CredentialHistory) -> bytes:
    """The experience as JSON; it holds logins."""
    document: Json = json.loads(encode_pull_secret(PullSecret(history.last_good)))
    return (
        json.dumps({**document, "refused": dict(history.rejected_digests)}, sort_keys=True).encode()
        + b"\n"
    )


def decode_history(content: bytes, *, where: str) -> CredentialHistory:
    """What `encode_history` made; raises `CredentialError`, which repeats nothing of it."""
    good = parse_pull_secret(content, where=where).credentials
    document = json.loads(content) if content.strip() else {}
    noted = document.get("refused") or {}
    if not isinstance(noted, dict) or not all(isinstance(each, str) for each in noted.values()):
        raise CredentialError(f"{where}: what was refused is not digests by registry")
    return CredentialHistory(good, noted)


def _compute_credential_digest(login: RegistryCredential) -> str:
    return hashlib.sha256(encode_pull_secret(PullSecret({"": login}))).hexdigest()
