"""A registry of images on a port of this host: what the OCI distribution API needs for a pull."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

Json = dict[str, object]

_OCI = "application/vnd.oci.image"
MANIFEST, INDEX = f"{_OCI}.manifest.v1+json", f"{_OCI}.index.v1+json"


class OciRegistry:
    """Serves blobs and manifests while entered, over HTTP without TLS."""

    def __init__(self, repository: str) -> None:
        self._repository = repository
        self._contents: dict[str, tuple[str, bytes]] = {}
        contents, prefix = self._contents, f"/v2/{repository}/"

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                digest = self.path.rpartition("/")[2]
                if self.path == "/v2/":
                    kind, content = "application/json", b"{}"
                elif self.path.startswith(prefix) and digest in contents:
                    kind, content = contents[digest]
                else:
                    kind = "application/json"
                    content = b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "unknown"}]}'
                    self.send_response(404)
                    self._finish(kind, content)
                    return
                self.send_response(200)
                self._finish(kind, content)

            def do_HEAD(self) -> None:
                self.do_GET()

            def _finish(self, kind: str, content: bytes) -> None:
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def host(self) -> str:
        """Return the address that pull specs begin with."""
        return f"127.0.0.1:{self._server.server_port}"

    def pull_spec(self, digest: str) -> str:
        return f"{self.host}/{self._repository}@{digest}"

    def push_image(self, architecture: str, labels: dict[str, str]) -> str:
        """Store an image with one layer; return the digest of its manifest."""
        config: Json = {
            "architecture": architecture,
            "os": "linux",
            "created": "2026-01-01T00:00:00Z",
            "config": {"Labels": labels},
            "rootfs": {"type": "layers", "diff_ids": [_compute_digest(b"layer")]},
        }
        manifest: Json = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self._store_blob(f"{_OCI}.config.v1+json", json.dumps(config).encode()),
            "layers": [self._store_blob(f"{_OCI}.layer.v1.tar", b"layer")],
        }
        return self._store(MANIFEST, json.dumps(manifest).encode())

    def push_list(self, manifests: dict[str, str]) -> str:
        """Store a manifest list of architectures and digests; return its digest."""
        entries = [
            {
                "mediaType": MANIFEST,
                "digest": digest,
                "size": len(self._contents[digest][1]),
                "platform": {"os": "linux", "architecture": architecture},
            }
            for architecture, digest in manifests.items()
        ]
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}
        return self._store(INDEX, json.dumps(index).encode())

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _store_blob(self, kind: str, content: bytes) -> Json:
        return {"mediaType": kind, "digest": self._store(kind, content), "size": len(content)}

    def _store(self, kind: str, content: bytes) -> str:
        digest = _compute_digest(content)
        self._contents[digest] = kind, content
        return digest


def _compute_digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
