"""A small registry of images on a Unix socket, for hosts without docker-registry.

It has what the OCI distribution API needs for pull, push, tags, deletion and referrers. Its
contract tests run on docker-registry, too.
"""

import base64
import hashlib
import json
import re
import socketserver
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

from treenail_lab.registry.front import RefusedRequest

_DIGEST = r"sha256:[0-9a-f]{64}"
_NAME = r"(?P<name>[a-z0-9]+(?:[._/-][a-z0-9]+)*)"
_PIECE = 256 * 1024
_MANIFEST_LIMIT = 4 * 1024 * 1024
_PAGE = 100
_FULL = "unknown error: write: no space left on device"

Json = dict[str, object]


class SmallRegistry:
    """Serves images from a directory; ``storage_bytes`` limits the blobs, 0 does not."""

    def __init__(
        self,
        directory: Path,
        passwords: Mapping[str, str],
        *,
        storage_bytes: int = 0,
        has_referrers: bool = False,
    ) -> None:
        self.socket = directory / "registry.sock"
        self.passwords = dict(passwords)
        self.has_referrers = has_referrers
        self.storage_bytes = storage_bytes
        self.blobs = directory / "blobs"
        self.uploads = directory / "uploads"
        self.guard = threading.RLock()
        self.repositories: dict[str, _Repository] = {}
        registry = self

        class SmallHandler(_Handler):
            server_registry = registry

        class SmallServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request: object, client_address: object) -> None:
                """Stay silent: clients break connections in tests."""

        self._server_class = SmallServer
        self._handler = SmallHandler
        self._server: socketserver.UnixStreamServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self.blobs.mkdir(exist_ok=True)
        self.uploads.mkdir(exist_ok=True)
        self.socket.unlink(missing_ok=True)
        self._server = self._server_class(str(self.socket), self._handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def find_repository(self, name: str) -> "_Repository":
        with self.guard:
            if name not in self.repositories:
                raise RefusedRequest(404, "NAME_UNKNOWN", "repository name not known to registry")
            return self.repositories[name]

    def open_repository(self, name: str) -> "_Repository":
        with self.guard:
            return self.repositories.setdefault(name, _Repository())

    def check_space(self, more: int) -> None:
        """Refuse bytes beyond the limit as a real registry does when its disk is full."""
        if self.storage_bytes:
            used = sum(
                path.stat().st_size for path in (*self.blobs.iterdir(), *self.uploads.iterdir())
            )
            if used + more > self.storage_bytes:
                raise RefusedRequest(500, "UNKNOWN", _FULL)

    def find_blob(self, name: str, digest: str) -> Path:
        if name not in self.repositories or digest not in self.repositories[name].blobs:
            raise RefusedRequest(404, "BLOB_UNKNOWN", "blob unknown to registry")
        return self.blobs / digest.partition(":")[2]


class _Repository:
    """The references of one repository; the blobs of all are stored once."""

    def __init__(self) -> None:
        self.blobs: set[str] = set()
        self.manifests: dict[str, tuple[str, bytes]] = {}
        self.tags: dict[str, str] = {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 120
    server_registry: SmallRegistry

    def handle_request(self) -> None:
        parts = urlsplit(self.path)
        self._query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        try:
            self._check_password()
            method, arguments = _find_route(self.command, parts.path)
            method(self, **arguments)
        except RefusedRequest as refusal:
            # The body may be unread.
            self.close_connection = True
            errors = {"errors": [{"code": refusal.code, "message": str(refusal)}]}
            self._answer(refusal.status, json.dumps(errors).encode(), **refusal.headers)

    def log_message(self, *_: object) -> None:
        """Stay silent."""

    def address_string(self) -> str:
        return "unix"

    def show_version(self) -> None:
        self._answer(200, b"{}")

    def get_blob(self, name: str, digest: str) -> None:
        path = self.server_registry.find_blob(name, digest)
        size = path.stat().st_size
        start, status = 0, 200
        asked = re.fullmatch(r"bytes=([0-9]+)-", self.headers.get("Range", ""))
        if asked is not None and (start := int(asked[1])) < size:
            status = 206
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Docker-Content-Digest", digest)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.send_header("Content-Length", str(size - start))
        self.end_headers()
        if self.command == "GET":
            with path.open("rb") as file:
                file.seek(start)
                while piece := file.read(_PIECE):
                    self.wfile.write(piece)

    def delete_blob(self, name: str, digest: str) -> None:
        self.server_registry.find_blob(name, digest)
        self.server_registry.repositories[name].blobs.discard(digest)
        self._answer(202)

    def start_upload(self, name: str) -> None:
        registry = self.server_registry
        digest, source = self._query.get("mount", ""), self._query.get("from", "")
        repository = registry.open_repository(name)
        if digest and digest in registry.open_repository(source).blobs:
            repository.blobs.add(digest)
            self._answer(201, Location=f"/v2/{name}/blobs/{digest}", Docker_Content_Digest=digest)
            return
        upload = uuid.uuid4().hex
        (registry.uploads / upload).touch()
        self._answer(202, Location=f"/v2/{name}/blobs/uploads/{upload}?_state=1", Range="0-0")

    def continue_upload(self, name: str, upload: str) -> None:
        path = self._find_upload(upload)
        asked = re.match(r"([0-9]+)-", self.headers.get("Content-Range", ""))
        if asked is not None and int(asked[1]) != path.stat().st_size:
            raise RefusedRequest(416, "BLOB_UPLOAD_INVALID", "the range does not continue")
        self._append_body(path)
        self._answer_upload(202, name, upload)

    def show_upload(self, name: str, upload: str) -> None:
        self._find_upload(upload)
        self._answer_upload(204, name, upload)

    def finish_upload(self, name: str, upload: str) -> None:
        registry = self.server_registry
        path = self._find_upload(upload)
        self._append_body(path)
        digest = self._query.get("digest", "")
        with path.open("rb") as file:
            actual = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        if digest != actual:
            path.unlink()
            text = "provided digest did not match uploaded content"
            raise RefusedRequest(400, "DIGEST_INVALID", text)
        path.rename(registry.blobs / digest.partition(":")[2])
        registry.open_repository(name).blobs.add(digest)
        self._answer(201, Location=f"/v2/{name}/blobs/{digest}", Docker_Content_Digest=digest)

    def cancel_upload(self, name: str, upload: str) -> None:  # noqa: ARG002 - as the other routes
        self._find_upload(upload).unlink()
        self._answer(204)

    def get_manifest(self, name: str, reference: str) -> None:
        repository = self.server_registry.find_repository(name)
        digest = repository.tags.get(reference, reference)
        if digest not in repository.manifests:
            raise RefusedRequest(404, "MANIFEST_UNKNOWN", "manifest unknown")
        kind, content = repository.manifests[digest]
        self._answer(200, content, Content_Type=kind, Docker_Content_Digest=digest)

    def put_manifest(self, name: str, reference: str) -> None:
        registry = self.server_registry
        content = b"".join(self._iter_body())
        if len(content) > _MANIFEST_LIMIT:
            raise RefusedRequest(413, "MANIFEST_INVALID", "the manifest is too large")
        registry.check_space(len(content))
        repository = registry.open_repository(name)
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        document = _decode_manifest(content)
        is_digest = ":" in reference
        if is_digest and reference != digest:
            text = "provided digest did not match uploaded content"
            raise RefusedRequest(400, "DIGEST_INVALID", text)
        for part in (document.get("config"), *_list(document, "layers")):
            if isinstance(part, dict) and part.get("digest") not in repository.blobs:
                raise RefusedRequest(400, "MANIFEST_BLOB_UNKNOWN", "blob unknown to registry")
        for part in _list(document, "manifests"):
            if isinstance(part, dict) and part.get("digest") not in repository.manifests:
                raise RefusedRequest(400, "MANIFEST_BLOB_UNKNOWN", "blob unknown to registry")
        headers = {"Location": f"/v2/{name}/manifests/{digest}", "Docker_Content_Digest": digest}
        subject = document.get("subject")
        if registry.has_referrers and isinstance(subject, dict):
            headers["OCI_Subject"] = str(subject.get("digest"))
        kind = self.headers.get("Content-Type", "application/octet-stream")
        with registry.guard:
            repository.manifests[digest] = kind, content
            if not is_digest:
                repository.tags[reference] = digest
        self._answer(201, b"", **headers)

    def delete_manifest(self, name: str, reference: str) -> None:
        repository = self.server_registry.find_repository(name)
        if ":" not in reference:
            # As docker-registry 2.8 answers.
            text = "provided digest did not match uploaded content"
            raise RefusedRequest(400, "DIGEST_INVALID", text)
        with self.server_registry.guard:
            if repository.manifests.pop(reference, None) is None:
                raise RefusedRequest(404, "MANIFEST_UNKNOWN", "manifest unknown")
            for tag in [tag for tag, tagged in repository.tags.items() if tagged == reference]:
                del repository.tags[tag]
        self._answer(202)

    def list_tags(self, name: str) -> None:
        tags = sorted(self.server_registry.find_repository(name).tags)
        after, limit = self._query.get("last", ""), int(self._query.get("n", _PAGE))
        rest = [tag for tag in tags if tag > after]
        page = rest[:limit]
        link: dict[str, str] = {}
        if len(rest) > len(page):
            link = {"Link": f'</v2/{name}/tags/list?last={quote(page[-1])}&n={limit}>; rel="next"'}
        content = json.dumps({"name": name, "tags": page}).encode()
        self._answer(200, content, **link)

    def list_referrers(self, name: str, digest: str) -> None:
        if not self.server_registry.has_referrers:
            raise RefusedRequest(404, "NOT_FOUND", "page not found")
        repository = self.server_registry.find_repository(name)
        referrers: list[Json] = []
        for referrer, (kind, content) in repository.manifests.items():
            document = _decode_manifest(content)
            subject = document.get("subject")
            if isinstance(subject, dict) and subject.get("digest") == digest:
                entry: Json = {"mediaType": kind, "digest": referrer, "size": len(content)}
                config = document.get("config")
                config_type = config.get("mediaType") if isinstance(config, dict) else None
                entry["artifactType"] = document.get("artifactType") or config_type
                entry["annotations"] = document.get("annotations") or {}
                referrers.append(entry)
        index = "application/vnd.oci.image.index.v1+json"
        content = json.dumps(
            {"schemaVersion": 2, "mediaType": index, "manifests": referrers}
        ).encode()
        self._answer(200, content, Content_Type=index)

    def _check_password(self) -> None:
        kind, _, text = self.headers.get("Authorization", "").partition(" ")
        try:
            user, _, password = base64.b64decode(text).decode().partition(":")
        except ValueError:
            user = password = ""
        if kind != "Basic" or not password or self.server_registry.passwords.get(user) != password:
            challenge = {"WWW_Authenticate": 'Basic realm="lab"'}
            raise RefusedRequest(401, "UNAUTHORIZED", "authentication required", **challenge)

    def _find_upload(self, upload: str) -> Path:
        path = self.server_registry.uploads / upload
        if not path.exists():
            raise RefusedRequest(404, "BLOB_UPLOAD_UNKNOWN", "blob upload unknown to registry")
        return path

    def _append_body(self, path: Path) -> None:
        with path.open("ab") as file:
            for piece in self._iter_body():
                self.server_registry.check_space(len(piece))
                file.write(piece)
                file.flush()

    def _iter_body(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while length := int(self.rfile.readline(64).partition(b";")[0], 16):
                yield self.rfile.read(length)
                self.rfile.readline(64)
            self.rfile.readline(64)
        left = int(self.headers.get("Content-Length", 0))
        while left > 0:
            piece = self.rfile.read(min(left, _PIECE))
            if not piece:
                raise ConnectionResetError("the client sent less than it announced")
            left -= len(piece)
            yield piece

    def _answer_upload(self, status: int, name: str, upload: str) -> None:
        size = (self.server_registry.uploads / upload).stat().st_size
        self._answer(
            status,
            Location=f"/v2/{name}/blobs/uploads/{upload}?_state={size}",
            Docker_Upload_UUID=upload,
            Range=f"0-{max(size - 1, 0)}",
        )

    def _answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        if content and "Content_Type" not in headers:
            self.send_header("Content-Type", "application/json; charset=utf-8")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


for _method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"):
    setattr(_Handler, f"do_{_method}", _Handler.handle_request)

_ROUTES: tuple[tuple[str, dict[str, Callable[..., None]]], ...] = (
    (r"/v2/", {"GET": _Handler.show_version, "HEAD": _Handler.show_version}),
    (
        rf"/v2/{_NAME}/blobs/(?P<digest>{_DIGEST})",
        {"GET": _Handler.get_blob, "HEAD": _Handler.get_blob, "DELETE": _Handler.delete_blob},
    ),
    (rf"/v2/{_NAME}/blobs/uploads/?", {"POST": _Handler.start_upload}),
    (
        rf"/v2/{_NAME}/blobs/uploads/(?P<upload>[0-9a-f]{{32}})",
        {
            "GET": _Handler.show_upload,
            "PATCH": _Handler.continue_upload,
            "PUT": _Handler.finish_upload,
            "DELETE": _Handler.cancel_upload,
        },
    ),
    (
        rf"/v2/{_NAME}/manifests/(?P<reference>[\w.-]+|{_DIGEST})",
        {
            "GET": _Handler.get_manifest,
            "HEAD": _Handler.get_manifest,
            "PUT": _Handler.put_manifest,
            "DELETE": _Handler.delete_manifest,
        },
    ),
    (rf"/v2/{_NAME}/tags/list", {"GET": _Handler.list_tags}),
    (rf"/v2/{_NAME}/referrers/(?P<digest>{_DIGEST})", {"GET": _Handler.list_referrers}),
)


def _find_route(command: str, path: str) -> tuple[Callable[..., None], dict[str, str]]:
    for pattern, methods in _ROUTES:
        match = re.fullmatch(pattern, path)
        if match is not None:
            if command not in methods:
                raise RefusedRequest(405, "UNSUPPORTED", "the operation is unsupported")
            return methods[command], match.groupdict()
    raise RefusedRequest(404, "NOT_FOUND", "page not found")


def _decode_manifest(content: bytes) -> Json:
    try:
        document = json.loads(content)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise RefusedRequest(400, "MANIFEST_INVALID", "manifest invalid")
    return document


def _list(document: Json, name: str) -> list[object]:
    entries = document.get(name)
    return entries if isinstance(entries, list) else []
