"""A registry with TLS and credentials on this host, where the machines reach it."""

import base64
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from vmlab.tools import ToolError, cache, run, unpacked

PORT = 5443
ADDRESS = f"10.0.2.2:{PORT}"
"""How a machine names it: QEMU's user network gives it this host's loopback there."""
LOCAL = f"localhost:{PORT}"
"""How this host names it."""
USER, PASSWORD = "puller", "canary-5d0b77e2"
_START_LIMIT_S = 20.0


def pull_secret() -> str:
    """The credential of a node, as the kubelet's config.json has it."""
    login = {"auth": base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()}
    return json.dumps({"auths": {ADDRESS: login, LOCAL: login}})


class Registry:
    """docker-registry in ``directory``, which keeps images and certificates."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.certificate = directory / "trust/ca.crt"
        self._process: subprocess.Popen[bytes] | None = None

    def options(self, prefix: str = "") -> tuple[str, ...]:
        """How this host's skopeo gets in; with ``dest-`` or ``src-`` when it copies."""
        return (
            f"--{prefix}creds={USER}:{PASSWORD}",
            f"--{prefix}cert-dir={self.certificate.parent}",
        )

    @property
    def local(self) -> str:
        """How this host names it."""
        return LOCAL

    def blob(self, digest: str) -> Path:
        """The file that a layer is kept in."""
        algorithm, _, name = digest.partition(":")
        blobs = self._directory / "images/docker/registry/v2/blobs"
        return blobs / algorithm / name[:2] / name / "data"

    def prepare(self) -> None:
        """Make the certificate and the password file, unless they are there."""
        self.certificate.parent.mkdir(parents=True, exist_ok=True)
        if not self.certificate.exists():
            names = "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:10.0.2.2"
            run(
                "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
                "-nodes", "-days", "3650", "-subj", "/CN=treenail-vm", "-addext", names,
                "-keyout", self._directory / "registry.key", "-out", self.certificate,
            )  # fmt: skip
            listed = run("htpasswd", "-Bni", "-C", "4", USER, stdin=PASSWORD)
            (self._directory / "htpasswd").write_text(f"{listed}\n")

    def start(self) -> None:
        """Serve; returns when connections are taken."""
        self.prepare()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", PORT)) == 0:
                raise ToolError(f"port {PORT} is taken on this host; the images name it")
        # What Debian and what Fedora call it.
        installed = shutil.which("docker-registry") or shutil.which("registry")
        program = installed or str(unpacked("docker-registry", "docker-registry"))
        configuration = self._directory / "config.yml"
        configuration.write_text(
            "version: 0.1\n"
            "log: {level: warn}\n"
            f"storage: {{filesystem: {{rootdirectory: {self._directory / 'images'}}}}}\n"
            f"http: {{addr: '127.0.0.1:{PORT}', tls: {{certificate: {self.certificate}, "
            f"key: {self._directory / 'registry.key'}}}}}\n"
            f"auth: {{htpasswd: {{realm: vm, path: {self._directory / 'htpasswd'}}}}}\n"
        )
        with (self._directory / "registry.log").open("ab") as output:
            self._process = subprocess.Popen(
                [program, "serve", str(configuration)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        end = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < end and self._process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", PORT)) == 0:
                    return
            time.sleep(0.05)
        self.stop()
        raise ToolError(f"the registry did not start; see {self._directory}/registry.log")

    def stop(self) -> None:
        """End it; images stay."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait(10)

    def __enter__(self) -> "Registry":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def main() -> int:
    """Serve until Ctrl-C, so that images made elsewhere can be pushed."""
    store = Registry(cache() / "registry")
    with store, suppress(KeyboardInterrupt):
        options = " ".join(store.options("dest-"))
        print(f"push with: skopeo copy {options} SOURCE docker://{store.local}/os/node:1")
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
