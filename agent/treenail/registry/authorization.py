"""Logins: the choice for a repository from a pull secret, and the authorization of requests.

A registry answers 401 with a challenge: HTTP Basic, or tokens of a token server (bearer). For a
bearer challenge, the token server that it names receives the login and returns a token for a
repository and actions.
"""

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlencode

from treenail import clocks, sanitize
from treenail.registry import names
from treenail.registry.errors import AnswerInvalid, LoginRefused, make_status_error
from treenail.registry.transport import (
    RegistryAnswer,
    RegistryLimits,
    RegistryTransport,
    Url,
    parse_url,
)


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
        # RFC 7617 leaves the encoding of the pair open; pull secrets may hold bytes that are not
        # UTF-8.
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
    for name in names.DOCKER_HUB if host in names.DOCKER_HUB else (host,):
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


WITHHELD = "<withheld>"
_TEXT_LIMIT = 300
_CHALLENGES, _CHALLENGE_LIMIT = 4, 4096
# One parameter of a challenge: a token or a quoted string (RFC 9110, 11.2).
_CHALLENGE = re.compile(r'\s*,?\s*([A-Za-z0-9_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')
_TOKEN = re.compile(r"[\x21-\x7e]+")
_CLIENT_ID = "treenail"
# The lifetime of a token without expires_in, of the token protocol.
_DEFAULT_LIFETIME_S = 60.0
_LIFETIME_LIMIT_S = 86400.0
_EARLY_S = 10.0


@dataclass(frozen=True, slots=True)
class BearerChallenge:
    """The token server of a registry."""

    realm: Url
    service: str


@dataclass(frozen=True, slots=True)
class _Token:
    text: str = field(repr=False)
    end: float


class Authorization:
    """Chooses the Authorization of each request to one registry, and learns from its challenges."""

    def __init__(
        self,
        transport: RegistryTransport,
        login: Login,
        limits: RegistryLimits,
        clock: clocks.Clock,
    ) -> None:
        self._transport = transport
        self._login = login
        self._limits = limits
        self._clock = clock
        self._challenge: BearerChallenge | None = None
        self._is_basic = False
        self._tokens: dict[tuple[str, ...], _Token] = {}

    def clone(self, transport: RegistryTransport) -> "Authorization":
        """Return a copy for another thread, with all that was learned."""
        copy = Authorization(transport, self._login, self._limits, self._clock)
        copy._challenge, copy._is_basic = self._challenge, self._is_basic
        copy._tokens = dict(self._tokens)
        return copy

    def get_header(self, scopes: tuple[str, ...], *, action: str) -> str:
        """Return the value of Authorization; empty before the first challenge."""
        if self._is_basic:
            return self._login.basic
        if self._challenge is None:
            return ""
        token = self._tokens.get(scopes)
        if token is None or token.end <= self._clock.monotonic():
            token = self._fetch_token(self._challenge, scopes, action=action)
            self._tokens[scopes] = token
        return f"Bearer {token.text}"

    def accept_challenge(
        self, answer: RegistryAnswer, scopes: tuple[str, ...], *, had_header: bool, action: str
    ) -> bool:
        """Return whether the request can be sent again with another Authorization.

        A token may have expired early, so that a refused one is fetched once more.
        """
        if had_header and self._is_basic:
            return False
        challenges = dict(_parse_challenges(answer.get_headers("WWW-Authenticate")))
        if "bearer" in challenges:
            self._challenge = _read_bearer(challenges["bearer"], answer.url, action=action)
            return self._tokens.pop(scopes, None) is None or had_header
        if "basic" in challenges and not self._login.is_anonymous:
            # An identity token is a refresh token: only a token server takes it, not HTTP Basic.
            if not self._login.password and self._login.identity_token:
                return False
            self._is_basic = True
            return True
        return False

    def withhold_credentials(self, text: str) -> str:
        """Return text of the registry, bounded, escaped and without credentials."""
        secrets = [*self._login.list_secrets(), *(token.text for token in self._tokens.values())]
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, WITHHELD)
        return sanitize.escape_line(text)[:_TEXT_LIMIT]

    def _fetch_token(
        self, challenge: BearerChallenge, scopes: tuple[str, ...], *, action: str
    ) -> _Token:
        """Fetch a token. Redirects are not followed: they would carry the login elsewhere."""
        realm = challenge.realm
        fields = [("service", challenge.service), *(("scope", scope) for scope in scopes)]
        headers = {"Accept": "application/json"}
        # OAuth2 form of the token protocol (distribution, spec/auth/oauth.md): client_id is
        # required, and scopes are one text instead of one parameter each.
        if self._login.identity_token:
            form = [
                ("grant_type", "refresh_token"),
                ("service", challenge.service),
                ("client_id", _CLIENT_ID),
                ("scope", " ".join(scopes)),
                ("refresh_token", self._login.identity_token),
            ]
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            content = urlencode(form).encode()
            answer = self._transport.send("POST", realm, headers, content, action=action)
        else:
            if not self._login.is_anonymous:
                headers["Authorization"] = self._login.basic
            joint = "&" if "?" in realm.target else "?"
            target = f"{realm.target}{joint}{urlencode(fields)}"
            place = Url(realm.scheme, realm.host, realm.port, target)
            answer = self._transport.send("GET", place, headers, action=action)
        if answer.status != 200:
            raise self._make_token_error(answer, action=action)
        return self._read_token(answer.read(self._limits.token_bytes), realm, action=action)

    def _make_token_error(self, answer: RegistryAnswer, *, action: str) -> Exception:
        address = answer.url.address
        code, text = read_error_text(answer, self._limits)
        # Token servers answer 401 for a wrong password (spec/auth/token.md), OAuth2 ones 400
        # invalid_grant for a refresh token that has expired (RFC 6749, 5.2).
        if answer.status in {400, 401, 403}:
            return LoginRefused(
                f"cannot {action}: the token server {address} refuses the login "
                f"({answer.status}{self._format_error(code, text)})",
                status=401,
                remedy="check the login in the Secret, with: podman login REGISTRY",
            )
        cause = self._format_error(code, text).removeprefix(": ")
        return make_status_error(action, f"the token server {address}", answer.status, cause)

    def _format_error(self, code: str, text: str) -> str:
        detail = self.withhold_credentials(" ".join(filter(None, (code, text))))
        return f": {detail}" if detail else ""

    def _read_token(self, content: bytes, realm: Url, *, action: str) -> _Token:
        try:
            document = json.loads(content)
        except (ValueError, RecursionError):
            document = None
        fields = document if isinstance(document, dict) else {}
        # Either name is allowed, or both with equal values (distribution, spec/auth/token.md).
        text = fields.get("token") or fields.get("access_token")
        if not isinstance(text, str) or not _TOKEN.fullmatch(text):
            raise AnswerInvalid(
                f"cannot {action}: the token server {realm.address} returned no token"
            )
        lifetime_s = fields.get("expires_in")
        seconds = _DEFAULT_LIFETIME_S
        if isinstance(lifetime_s, int | float) and 0 < lifetime_s < _LIFETIME_LIMIT_S:
            seconds = float(lifetime_s)
        return _Token(text, self._clock.monotonic() + seconds - min(_EARLY_S, seconds / 2))


def read_error_text(answer: RegistryAnswer, limits: RegistryLimits) -> tuple[str, str]:
    """Return code and message of the first error in an answer's body; empty without them."""
    try:
        content = answer.read(limits.error_bytes)
    except AnswerInvalid:
        return "", ""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return "", ""
    errors = document.get("errors") if isinstance(document, dict) else None
    first = errors[0] if isinstance(errors, list) and errors else None
    if not isinstance(first, dict):
        return "", ""
    code, message, detail = (first.get(name) for name in ("code", "message", "detail"))
    texts = [message] if isinstance(message, str) else []
    # docker-registry has the error of its storage only here: "no space left on device".
    if isinstance(detail, dict):
        texts.append(json.dumps(detail, sort_keys=True))
    return code if isinstance(code, str) else "", " ".join(texts)


def _read_bearer(parameters: Mapping[str, str], url: Url, *, action: str) -> BearerChallenge:
    try:
        realm = parse_url(parameters.get("realm", ""))
    except ValueError:
        realm = None
    # The login goes there: never without TLS when the registry has TLS.
    if realm is None or (realm.scheme != "https" and url.scheme == "https"):
        raise AnswerInvalid(
            f"cannot {action}: {url.address} names no token server with an https URL", status=401
        )
    return BearerChallenge(realm, parameters.get("service", ""))


def _parse_challenges(headers: list[str]) -> list[tuple[str, dict[str, str]]]:
    """Return the schemes, in lower case, with their parameters (RFC 9110, 11.6.1)."""
    challenges: list[tuple[str, dict[str, str]]] = []
    for header in headers[:_CHALLENGES]:
        rest = header[:_CHALLENGE_LIMIT].strip()
        while rest:
            scheme, _, rest = rest.lstrip(", ").partition(" ")
            parameters: dict[str, str] = {}
            while match := _CHALLENGE.match(rest):
                quoted = re.sub(r"\\(.)", r"\1", match[2]) if match[2] is not None else match[3]
                parameters.setdefault(match[1].lower(), quoted)
                rest = rest[match.end() :]
            challenges.append((scheme.lower(), parameters))
            rest = rest.lstrip(", ")
    return challenges
