"""Who makes a request: client certificates and bearer tokens to a user and its groups.

Tokens are signed claims (JSON Web Tokens, HS256), so they outlive a restart without being kept.
"""

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treenail.clock import Clock, rfc3339
from treenail_lab.apiserver.access.certificates import write_private
from treenail_lab.apiserver.errors import Cause, invalid, unauthorized
from treenail_lab.apiserver.objects import Json, uid

MASTERS = "system:masters"
NODES = "system:nodes"
AUTHENTICATED = "system:authenticated"
NODE_PREFIX = "system:node:"
_SERVICE_ACCOUNT = "system:serviceaccount:"
_TOKEN_S = 3600
_LEAST_TOKEN_S = 600


@dataclass(frozen=True, slots=True)
class User:
    """An authenticated user."""

    name: str
    groups: tuple[str, ...]

    @property
    def node(self) -> str:
        """The node this user is the kubelet or an agent of; empty for everybody else."""
        if NODES in self.groups and self.name.startswith(NODE_PREFIX):
            return self.name.removeprefix(NODE_PREFIX)
        return ""

    @property
    def master(self) -> bool:
        return MASTERS in self.groups


class Tokens:
    """Makes bearer tokens and tells whose they are; the key is kept in a directory."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._clock = clock
        file = directory / "token.key"
        if not file.exists():
            write_private(file, secrets.token_bytes(32))
        self._key = file.read_bytes()

    def issue(self, user: str, groups: Sequence[str]) -> str:
        """A token for a user that never expires."""
        return self._signed({"sub": user, "groups": list(groups)})

    def requested(self, account: Json, request: Json) -> Json:
        """The answer to a TokenRequest; the token ends with its time or with the account."""
        namespace, name = account["metadata"]["namespace"], account["metadata"]["name"]
        spec = request.get("spec") or {}
        seconds = int(spec.get("expirationSeconds") or _TOKEN_S)
        if seconds < _LEAST_TOKEN_S:
            message = f"Invalid value: {seconds}: may not specify a duration less than 10 minutes"
            cause = Cause("FieldValueInvalid", message, "spec.expirationSeconds")
            raise invalid("authentication.k8s.io", "TokenRequest", "", [cause])
        now = int(self._clock.now())
        claims = {
            "sub": f"{_SERVICE_ACCOUNT}{namespace}:{name}",
            "groups": ["system:serviceaccounts", f"system:serviceaccounts:{namespace}"],
            "aud": spec.get("audiences") or [],
            "iat": now,
            "exp": now + seconds,
            "account": {"namespace": namespace, "name": name, "uid": uid(account)},
        }
        status = {"token": self._signed(claims), "expirationTimestamp": rfc3339(now + seconds)}
        return {
            "kind": "TokenRequest",
            "apiVersion": "authentication.k8s.io/v1",
            "metadata": {"name": name, "namespace": namespace},
            "spec": spec | {"expirationSeconds": seconds},
            "status": status,
        }

    def claims(self, token: str) -> Json:
        """What a token says; raises 401 for a forged or expired one."""
        body, _, signature = token.rpartition(".")
        if not body or not hmac.compare_digest(self._signature(body), signature):
            raise unauthorized()
        try:
            claims: Json = json.loads(_unbase64(body.partition(".")[2]))
        except (ValueError, binascii.Error):
            raise unauthorized() from None
        if "exp" in claims and claims["exp"] < self._clock.now():
            raise unauthorized()
        return claims

    def _signed(self, claims: Json) -> str:
        header = _base64(json.dumps({"alg": "HS256", "typ": "JWT"}).encode())
        body = f"{header}.{_base64(json.dumps(claims).encode())}"
        return f"{body}.{self._signature(body)}"

    def _signature(self, body: str) -> str:
        return _base64(hmac.new(self._key, body.encode(), hashlib.sha256).digest())


class Authenticator:
    """Tells who makes a request; ``account`` finds a ServiceAccount by namespace and name."""

    def __init__(self, tokens: Tokens, account: Callable[[str, str], Json | None]) -> None:
        self._tokens = tokens
        self._account = account

    def user(self, authorization: str, certificate: Mapping[str, Any] | None) -> User:
        """The user of a request's ``Authorization`` header or client certificate; else 401."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "bearer":
            return self._of_token(token.strip())
        if certificate:
            return _of_certificate(certificate)
        raise unauthorized()

    def _of_token(self, token: str) -> User:
        claims = self._tokens.claims(token)
        if account := claims.get("account"):
            found = self._account(account["namespace"], account["name"])
            if found is None or uid(found) != account["uid"]:
                raise unauthorized()
        return User(claims["sub"], (*claims["groups"], AUTHENTICATED))


def _of_certificate(certificate: Mapping[str, Any]) -> User:
    pairs = [pair for part in certificate.get("subject", ()) for pair in part]
    names = [value for key, value in pairs if key == "commonName"]
    groups = [value for key, value in pairs if key == "organizationName"]
    if not names:
        raise unauthorized()
    return User(names[0], (*groups, AUTHENTICATED))


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _unbase64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
