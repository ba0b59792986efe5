"""A token server and a registry that accepts its tokens only, on loopback without TLS."""

import base64
import json
from collections.abc import Mapping
from urllib.parse import parse_qs, urlsplit

from tests.registry.scripted_server import ScriptedServer, SeenRequest, make_answer
from treenail.clocks import Clock

PASSWORD = "token-password-4711"  # of a user that exists here only


class TokenServer:
    """Issues tokens for the granted actions of a user; a token ends after ``lifetime_s``."""

    def __init__(self, clock: Clock, *, lifetime_s: int = 60) -> None:
        self.clock = clock
        self.lifetime_s = lifetime_s
        self.granted: Mapping[str, str] = {"os/node": "pull,push,delete"}
        self.identity_token = "identity-canary-4711"
        self.answer: bytes | None = None
        self.issued: dict[str, tuple[float, frozenset[str]]] = {}
        self.server = ScriptedServer(self._serve)

    def accepts(self, authorization: str, scope: str) -> bool:
        end, scopes = self.issued.get(authorization.removeprefix("Bearer "), (0.0, frozenset()))
        return end > self.clock.monotonic() and scope in scopes

    def _serve(self, request: SeenRequest) -> bytes:
        if self.answer is not None:
            return self.answer
        if request.method == "POST":
            fields = parse_qs(request.body.decode())
            if fields.get("refresh_token") != [self.identity_token]:
                return make_answer(401, b'{"errors": [{"code": "UNAUTHORIZED"}]}')
            wanted = fields["scope"][0].split()
        else:
            wanted = parse_qs(urlsplit(request.target).query).get("scope", [])
            expected = base64.b64encode(f"robot:{PASSWORD}".encode()).decode()
            login = request.headers.get("authorization")
            if login not in {None, f"Basic {expected}"}:
                return make_answer(401, b'{"errors": [{"code": "UNAUTHORIZED"}]}')
            if login is None:
                wanted = [each for each in wanted if each.endswith(":pull")]
        token = f"token-canary-{len(self.issued)}"
        self.issued[token] = (
            self.clock.monotonic() + self.lifetime_s,
            frozenset(each for scope in wanted for each in self._grant(scope)),
        )
        content = {"token": token, "expires_in": self.lifetime_s}
        return make_answer(200, json.dumps(content).encode())

    def _grant(self, scope: str) -> list[str]:
        _, name, actions = scope.split(":")
        allowed = self.granted.get(name, "").split(",")
        return [f"{name}:{action}" for action in actions.split(",") if action in allowed]


class TokenRegistry:
    """A registry with one manifest for clients with a token of the token server."""

    def __init__(self, tokens: TokenServer, manifest: bytes, media_type: str) -> None:
        self._tokens = tokens
        self._manifest = manifest
        self._media_type = media_type
        self.server = ScriptedServer(self._serve)

    def _serve(self, request: SeenRequest) -> bytes:
        name = request.target.removeprefix("/v2/").partition("/manifests/")[0]
        action = "pull" if request.method in {"GET", "HEAD"} else "push"
        if not self._tokens.accepts(request.headers.get("authorization", ""), f"{name}:{action}"):
            realm = f"http://{self._tokens.server.host}/token?account=x"
            challenge = f'Bearer realm="{realm}",service="the registry",scope="repository:x:pull"'
            text = json.dumps({"errors": [{"code": "UNAUTHORIZED", "message": str(request)}]})
            return make_answer(401, text.encode(), WWW_Authenticate=challenge)
        if action == "push":
            return make_answer(201)
        return make_answer(200, self._manifest, Content_Type=self._media_type)
