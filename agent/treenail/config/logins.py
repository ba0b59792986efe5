"""Which login a registry is shown: the newest, or, once that was refused, the one before it."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from treenail.config.pullsecret import Login, PullSecret, encode, parse
from treenail.errors import CredentialError

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Experience:
    """What using logins has shown; by registry, as pull secrets name it."""

    good: Mapping[str, Login] = field(default_factory=dict, repr=False)
    """What was used with success last, or what was in place before a newer one came."""
    refused: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The digest of the newest login, where the registry refused it."""

    @property
    def empty(self) -> bool:
        return not self.good and not self.refused


def renewed(known: Experience, in_place: PullSecret, newest: PullSecret) -> Experience:
    """What is known once the newest logins stand beside those that are in place.

    A login that is replaced without ever having been used is kept if there is no better one. Of
    registries without a login any more nothing is kept: somebody took it away.
    """
    good = {name: login for name, login in known.good.items() if name in newest.logins}
    for name, login in newest.logins.items():
        before = in_place.logins.get(name)
        if before is not None and before != login:
            good.setdefault(name, before)
    refused = {
        name: digest
        for name, digest in known.refused.items()
        if name in newest.logins and digest == _digest(newest.logins[name])
    }
    return Experience(good, refused)


def in_use(known: Experience, newest: PullSecret) -> PullSecret:
    """The logins to pull with."""
    return PullSecret(
        {
            name: known.good.get(name, login) if name in known.refused else login
            for name, login in newest.logins.items()
        }
    )


def refused(known: Experience, newest: PullSecret, image: str) -> Experience | None:
    """What is known once the registry refused the login in use for the image's pull spec.

    None when there is no other login to try. When it was the earlier one that was refused, the
    newest is on trial again from the next attempt on: the registry may have learnt of it by then.
    """
    name = registry_of(newest, image)
    if name is None:
        return None
    if name in known.refused:
        left = {each: digest for each, digest in known.refused.items() if each != name}
        return replace(known, refused=left)
    login = newest.logins[name]
    if known.good.get(name, login) == login:
        return None
    return replace(known, refused={**known.refused, name: _digest(login)})


def proven(known: Experience, newest: PullSecret, image: str) -> Experience:
    """What is known once the image was pulled: nothing before the login in use is needed."""
    name = registry_of(newest, image)
    if name is None:
        return known
    login = in_use(known, newest).logins[name]
    return replace(known, good={**known.good, name: login})


def registry_of(secret: PullSecret, image: str) -> str | None:
    """The entry whose login is shown for the pull spec: the longest that begins it.

    That is how containers-auth.json(5) looks them up: by ever shorter paths, down to the host.
    """
    path = image.partition("@")[0]
    host, slash, rest = path.partition("/")
    path = f"{host}{slash}{rest.partition(':')[0]}"
    while path:
        if path in secret.logins:
            return path
        path = path.rpartition("/")[0]
    return None


def complaints(known: Experience, newest: PullSecret) -> Iterator[str]:
    """A sentence for each newest login that is not used."""
    for name in sorted(known.refused):
        if known.good.get(name, newest.logins[name]) != newest.logins[name]:
            yield f"{name} refused the newest login for it; the one before stays in use"


def dump(known: Experience) -> bytes:
    """The experience as JSON; it holds logins."""
    document: Json = json.loads(encode(PullSecret(known.good)))
    return json.dumps({**document, "refused": dict(known.refused)}, sort_keys=True).encode() + b"\n"


def load(content: bytes, *, where: str) -> Experience:
    """What `dump` made; raises `CredentialError`, which repeats nothing of it."""
    good = parse(content, where=where).logins
    document = json.loads(content) if content.strip() else {}
    noted = document.get("refused") or {}
    if not isinstance(noted, dict) or not all(isinstance(each, str) for each in noted.values()):
        raise CredentialError(f"{where}: what was refused is not digests by registry")
    return Experience(good, noted)


def _digest(login: Login) -> str:
    return hashlib.sha256(encode(PullSecret({"": login}))).hexdigest()
