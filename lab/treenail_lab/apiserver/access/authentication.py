"""Authentication: the user and groups of a client certificate or bearer token.

Tokens are signed claims (JSON Web Tokens, HS256): they stay valid over a restart.
"""

import base64
import binascii
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treenail.clocks import Clock, format_rfc3339, parse_rfc3339
from treenail_lab.apiserver.access.certificates import write_private_file
from treenail_lab.apiserver.errors import StatusCause, invalid_error, unauthorized_error
from treenail_lab.apiserver.objects import Json, read_uid

MASTERS = "system:masters"
NODES = "system:nodes"
AUTHENTICATED = "system:authenticated"
NODE_PREFIX = "system:node:"
_SERVICE_ACCOUNT = "system:serviceaccount:"
_TOKEN_S = 3600
_BOOTSTRAP_TOKEN = re.compile(r"([a-z0-9]{6})\.([a-z0-9]{16})")
_BOOTSTRAP_GROUP = re.compile(r"system:bootstrappers:[a-z0-9:-]{0,255}[a-z0-9]")
_MIN_TOKEN_S = 600


@dataclass(frozen=True, slots=True)
class ApiUser:
    """An authenticated user."""

    name: str
    groups: tuple[str, ...]

    @property
    def node_name(self) -> str:
        """Return the node whose credential this is; empty for other users."""
        if NODES in self.groups and self.name.startswith(NODE_PREFIX):
            return self.name.removeprefix(NODE_PREFIX)
        return ""

    @property
    def is_master(self) -> bool:
        return MASTERS in self.groups


class TokenIssuer:
    """Issues and verifies bearer tokens; the key is in a directory."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._clock = clock
        file = directory / "token.key"
        if not file.exists():
            write_private_file(file, secrets.token_bytes(32))
        self._key = file.read_bytes()

    @property
    def now(self) -> float:
        """Seconds since the epoch."""
        return self._clock.now()

    def issue_token(self, user: str, groups: Sequence[str]) -> str:
        """Issue a token that never expires."""
        return self._sign_claims({"sub": user, "groups": list(groups)})

    def answer_token_request(self, account: Json, request: Json) -> Json:
        """Answer a TokenRequest; the token expires, and is invalid once the account is deleted."""
        namespace, name = account["metadata"]["namespace"], account["metadata"]["name"]
        spec = request.get("spec") or {}
        seconds = int(spec.get("expirationSeconds") or _TOKEN_S)
        if seconds < _MIN_TOKEN_S:
            message = f"Invalid value: {seconds}: may not specify a duration less than 10 minutes"
            cause = StatusCause("FieldValueInvalid", message, "spec.expirationSeconds")
            raise invalid_error("authentication.k8s.io", "TokenRequest", "", [cause])
        now = int(self._clock.now())
        claims = {
            "sub": f"{_SERVICE_ACCOUNT}{namespace}:{name}",
            "groups": ["system:serviceaccounts", f"system:serviceaccounts:{namespace}"],
            "aud": spec.get("audiences") or [],
            "iat": now,
            "exp": now + seconds,
            "account": {"namespace": namespace, "name": name, "uid": read_uid(account)},
        }
        status = {
            "token": self._sign_claims(claims),
            "expirationTimestamp": format_rfc3339(now + seconds),
        }
        return {
            "kind": "TokenRequest",
            "apiVersion": "authentication.k8s.io/v1",
            "metadata": {"name": name, "namespace": namespace},
            "spec": spec | {"expirationSeconds": seconds},
            "status": status,
        }

    def verify_token(self, token: str) -> Json:
        """Return the claims of a token; raise 401 for a forged or expired one."""
        body, _, signature = token.rpartition(".")
        if not body or not hmac.compare_digest(self._compute_signature(body), signature):
            raise unauthorized_error()
        try:
            claims: Json = json.loads(_decode_base64(body.partition(".")[2]))
        except (ValueError, binascii.Error):
            raise unauthorized_error() from None
        if "exp" in claims and claims["exp"] < self._clock.now():
            raise unauthorized_error()
        return claims

    def _sign_claims(self, claims: Json) -> str:
        header = _encode_base64(json.dumps({"alg": "HS256", "typ": "JWT"}).encode())
        body = f"{header}.{_encode_base64(json.dumps(claims).encode())}"
        return f"{body}.{self._compute_signature(body)}"

    def _compute_signature(self, body: str) -> str:
        return _encode_base64(hmac.new(self._key, body.encode(), hashlib.sha256).digest())


class Authenticator:
    """Authenticates requests; the functions find an object by namespace and name."""

    def __init__(
        self,
        tokens: TokenIssuer,
        find_account: Callable[[str, str], Json | None],
        find_secret: Callable[[str, str], Json | None],
    ) -> None:
        self._tokens = tokens
        self._find_account = find_account
        self._find_secret = find_secret

    def authenticate_user(
        self, authorization: str, certificate: Mapping[str, Any] | None
    ) -> ApiUser:
        """Return the user of the ``Authorization`` header or client certificate; raise 401."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "bearer":
            return self._authenticate_token(token.strip())
        if certificate:
            return _authenticate_certificate(certificate)
        raise unauthorized_error()

    def _authenticate_token(self, token: str) -> ApiUser:
        if parts := _BOOTSTRAP_TOKEN.fullmatch(token):
            return self._authenticate_bootstrap_token(*parts.groups())
        claims = self._tokens.verify_token(token)
        if account := claims.get("account"):
            service_account = self._find_account(account["namespace"], account["name"])
            if service_account is None or read_uid(service_account) != account["uid"]:
                raise unauthorized_error()
        return ApiUser(claims["sub"], (*claims["groups"], AUTHENTICATED))

    def _authenticate_bootstrap_token(self, identity: str, secret: str) -> ApiUser:
        """Return the user of a bootstrap token, as kube-apiserver does; raise 401."""
        token_secret = self._find_secret("kube-system", f"bootstrap-token-{identity}")
        if token_secret is None or token_secret.get("type") != "bootstrap.kubernetes.io/token":
            raise unauthorized_error()
        fields = _read_secret_fields(token_secret)
        expires = parse_rfc3339(fields.get("expiration", "2999-01-01T00:00:00Z"))
        is_valid = (
            hmac.compare_digest(fields.get("token-secret", ""), secret)
            and fields.get("token-id") == identity
            and fields.get("usage-bootstrap-authentication") == "true"
            and expires is not None
            and expires > self._tokens.now
        )
        if not is_valid:
            raise unauthorized_error()
        groups = [group for group in fields.get("auth-extra-groups", "").split(",") if group]
        if not all(map(_BOOTSTRAP_GROUP.fullmatch, groups)):
            raise unauthorized_error()
        extra = sorted({"system:bootstrappers", *groups})
        return ApiUser(f"system:bootstrap:{identity}", (*extra, AUTHENTICATED))


def _read_secret_fields(secret: Json) -> dict[str, str]:
    return {
        name: base64.b64decode(text).decode() for name, text in (secret.get("data") or {}).items()
    }


def _authenticate_certificate(certificate: Mapping[str, Any]) -> ApiUser:
    pairs = [pair for part in certificate.get("subject", ()) for pair in part]
    names = [value for key, value in pairs if key == "commonName"]
    groups = [value for key, value in pairs if key == "organizationName"]
    if not names:
        raise unauthorized_error()
    return ApiUser(names[0], (*groups, AUTHENTICATED))


def _encode_base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _decode_base64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
