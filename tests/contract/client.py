"""A client for raw HTTP requests and responses, configured by a kubeconfig."""

import base64
import contextlib
import http.client
import json
import ssl
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

import yaml

Json = dict[str, Any]

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY = "application/apply-patch+yaml"
_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Response of the server."""

    code: int
    body: Json
    headers: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def verdict(self) -> tuple[int, str]:
        """Status code and reason of an error."""
        return self.code, self.body.get("reason", "")

    @property
    def causes(self) -> set[tuple[str, str]]:
        """Reason and field of every cause of an error."""
        causes = self.body.get("details", {}).get("causes", [])
        return {(cause.get("reason", ""), cause.get("field", "")) for cause in causes}

    @property
    def metadata(self) -> Json:
        return self.body["metadata"]

    def ok(self) -> Json:
        """Body of a successful response."""
        assert self.code in {200, 201, 202}, self.body
        return self.body


class Cluster:
    """Client of an API server as one of its users."""

    def __init__(
        self,
        server: str,
        context: ssl.SSLContext,
        token: str = "",
        impersonated: Sequence[tuple[str, str]] = (),
        accept: str = "application/json",
    ) -> None:
        url = urlsplit(server)
        self._host, self._port, self._base = url.hostname or "", url.port or 443, url.path
        self._context = context
        self._token = token
        self._impersonated = impersonated
        self._accept = accept

    @classmethod
    def of_kubeconfig(cls, path: Path) -> Self:
        """Read the current context of a kubeconfig."""
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        current = _named(document["contexts"], document["current-context"])["context"]
        cluster = _named(document["clusters"], current["cluster"])["cluster"]
        user = _named(document["users"], current["user"])["user"]
        authority = _content(cluster, "certificate-authority", path)
        context = ssl.create_default_context(cadata=authority.decode() or None)
        certificate = _content(user, "client-certificate", path)
        if certificate:
            with tempfile.NamedTemporaryFile() as chain:
                chain.write(certificate + b"\n" + _content(user, "client-key", path))
                chain.flush()
                context.load_cert_chain(chain.name)
        return cls(cluster["server"], context, user.get("token", ""))

    def as_bearer(self, token: str) -> "Cluster":
        """Return a client with a token instead of this user's credentials."""
        context = ssl.create_default_context()
        context.load_verify_locations(cadata=b"".join(self._context.get_ca_certs(binary_form=True)))
        return Cluster(f"https://{self._host}:{self._port}{self._base}", context, token)

    def as_user(self, name: str, *groups: str) -> "Cluster":
        """Return a client that impersonates another user."""
        headers = [("Impersonate-User", name), *(("Impersonate-Group", one) for one in groups)]
        server = f"https://{self._host}:{self._port}{self._base}"
        return Cluster(server, self._context, self._token, headers)

    def accepting(self, media_types: str) -> "Cluster":
        """Return a client of the same user that sends this Accept header."""
        server = f"https://{self._host}:{self._port}{self._base}"
        return Cluster(server, self._context, self._token, self._impersonated, media_types)

    def has_controllers(self) -> bool:
        """Return whether a kube-controller-manager serves the cluster."""
        return self.get("/api/v1/namespaces/default/serviceaccounts/default").code == 200

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = "application/json",
        **query: object,
    ) -> Answer:
        """Send one request and return its response."""
        connection, response = self._send(method, path, body, content_type, query)
        with contextlib.closing(connection), response:
            text = response.read()
            try:
                document = json.loads(text)
            except ValueError:
                document = {"text": text.decode(errors="replace")}
            return Answer(response.status, document, dict(response.getheaders()))

    def get(self, path: str, **query: object) -> Answer:
        return self.request("GET", path, **query)

    def post(self, path: str, body: object, **query: object) -> Answer:
        return self.request("POST", path, body, **query)

    def put(self, path: str, body: object, **query: object) -> Answer:
        return self.request("PUT", path, body, **query)

    def delete(self, path: str, options: object = None, **query: object) -> Answer:
        return self.request("DELETE", path, options, **query)

    def patch(self, path: str, body: object, patch_type: str = MERGE, **query: object) -> Answer:
        return self.request("PATCH", path, body, content_type=patch_type, **query)

    def apply(self, path: str, body: Json, owner: str, **query: object) -> Answer:
        """Apply server-side as a field manager."""
        return self.patch(path, body, APPLY, fieldManager=owner, **query)

    @contextlib.contextmanager
    def watch(self, path: str, **query: object) -> Iterator[Iterator[Json]]:
        """Yield the events of a watch until the server ends it."""
        query = {"watch": "true"} | query
        connection, response = self._send("GET", path, None, "", query)
        with contextlib.closing(connection), response:
            assert response.status == 200, response.read()
            yield (json.loads(line) for line in response if line.strip())

    def _send(
        self, method: str, path: str, body: object, content_type: str, query: Json
    ) -> tuple[http.client.HTTPSConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPSConnection(
            self._host, self._port, context=self._context, timeout=_LIMIT_S
        )
        headers = {"Accept": self._accept, "User-Agent": "contract/1"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        content = None
        if body is not None:
            headers["Content-Type"] = content_type
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
        target = self._base + path
        if query:
            texts = {k: str(v).lower() if isinstance(v, bool) else v for k, v in query.items()}
            target += "?" + urlencode(texts)
        try:
            connection.putrequest(method, target)
            for name, value in (*headers.items(), *self._impersonated):
                connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(content or b"")))
            connection.endheaders(content)
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise


def _named(entries: list[Json], name: str) -> Json:
    return next(entry for entry in entries if entry["name"] == name)


def _content(entry: Json, name: str, kubeconfig: Path) -> bytes:
    """Read embedded or referenced credentials; empty without any."""
    if f"{name}-data" in entry:
        return base64.b64decode(entry[f"{name}-data"])
    return (kubeconfig.parent / entry[name]).read_bytes() if name in entry else b""
