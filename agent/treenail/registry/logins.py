"""Choice of the login for a repository from the entries of a pull secret."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

_DOCKER_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")


class LoginEntry(Protocol):
    """One entry of a pull secret, as `treenail.config.pullsecret` parses it."""

    @property
    def auth(self) -> str:
        """``user:password`` in base64."""

    @property
    def identity_token(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Login:
    """A login for a registry; empty for anonymous access. Its repr shows no secret."""

    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)

    @property
    def is_anonymous(self) -> bool:
        return not (self.user or self.password or self.identity_token)

    @property
    def basic(self) -> str:
        """The value of Authorization for HTTP Basic."""
        pair = f"{self.user}:{self.password}".encode("utf-8", "surrogateescape")
        return f"Basic {base64.b64encode(pair).decode()}"

    def list_secrets(self) -> tuple[str, ...]:
        """Return the texts that no message may contain."""
        encoded = self.basic.removeprefix("Basic ") if self.password else ""
        return tuple(filter(None, (self.password, self.identity_token, encoded)))


ANONYMOUS = Login()


def select_login(entries: Mapping[str, LoginEntry], host: str, repository: str) -> Login | None:
    """Return the login of the entry with the longest path that contains the repository.

    The entries are those of containers-auth.json(5): ``host``, ``host/namespace`` and
    ``host/namespace/repository``. Return None without an entry for the registry.
    """
    for name in _DOCKER_HUB if host in _DOCKER_HUB else (host,):
        path = f"{name}/{repository}"
        while True:
            if path in entries:
                return _read_login(entries[path])
            if "/" not in path:
                break
            path = path.rpartition("/")[0]
    return None


def _read_login(entry: LoginEntry) -> Login:
    try:
        pair = base64.b64decode(entry.auth).decode("utf-8", "surrogateescape")
    except (binascii.Error, ValueError):
        pair = ""
    user, _, password = pair.partition(":")
    return Login(user, password, entry.identity_token)
