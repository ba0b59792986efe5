"""A registry over HTTPS with a login that may push, one that may only pull, and faults.

It is the program docker-registry on a Unix socket where that is installed, and the lab's small
registry elsewhere.
"""

import base64
import http.client
import json
import shutil
import ssl
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from treenail.errors import HostError
from treenail.process import stop_process
from treenail_lab.apiserver.access.certificates import CertificateAuthority
from treenail_lab.lifetime.owner import owner
from treenail_lab.registry.front import FaultPlan, LoginAuthorizer, RegistryFront, UnixConnection
from treenail_lab.registry.small_registry import SmallRegistry

PROGRAMS = ("docker-registry", "registry")
"""Names of the program in Debian and in Fedora."""
_START_LIMIT_S = 20.0
_STOP_LIMIT_S = 5.0
_CONFIG = """\
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: {storage}}}
  delete: {{enabled: true}}
  maintenance: {{uploadpurging: {{enabled: false}}}}
auth: {{htpasswd: {{realm: lab, path: {htpasswd}}}}}
http: {{net: unix, addr: {socket}, relativeurls: true}}
"""


def find_docker_registry() -> str | None:
    """Return the path of the installed program; None without one."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class DockerRegistry:
    """Runs docker-registry; ``storage_bytes`` puts its storage on a small tmpfs, as root."""

    def __init__(self, directory: Path, htpasswd: str, *, storage_bytes: int = 0) -> None:
        self.socket = directory / "registry.sock"
        self._log = directory / "registry.log"
        self._storage = directory / "storage"
        self._storage_bytes = storage_bytes
        self._config = directory / "config.yml"
        self._htpasswd = directory / "htpasswd"
        self._process: subprocess.Popen[bytes] | None = None
        self.set_htpasswd(htpasswd)

    def set_htpasswd(self, text: str) -> None:
        """Replace the passwords; the program reads them again by the file's time."""
        self._htpasswd.write_text(text)

    def start(self) -> None:
        """Start the program; it answers when this returns."""
        program = find_docker_registry()
        if program is None:
            raise HostError(
                "cannot start docker-registry: it is not installed",
                remedy="install the package docker-registry (Debian) or docker-distribution "
                "(Fedora)",
            )
        self._storage.mkdir(exist_ok=True)
        text = _CONFIG.format(storage=self._storage, htpasswd=self._htpasswd, socket=self.socket)
        self._config.write_text(text)
        command = [program, "serve", str(self._config)]
        if self._storage_bytes:
            mount = f'mount -t tmpfs -o size={self._storage_bytes} none "$0" && exec "$@"'
            command = ["unshare", "-m", "sh", "-c", mount, str(self._storage), *command]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **owner.mark_environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + _START_LIMIT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise HostError("cannot start docker-registry", remedy=f"see {self._log}")
            time.sleep(0.01)

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            stop_process(process, _STOP_LIMIT_S)

    def collect_garbage(self) -> None:
        """Delete all manifests without a tag, and all blobs that no manifest names, offline."""
        program = find_docker_registry()
        assert program is not None
        self.stop()
        words = [program, "garbage-collect", "--delete-untagged", str(self._config)]
        subprocess.run(words, check=True, capture_output=True, timeout=_START_LIMIT_S)
        self.start()

    def _is_ready(self) -> bool:
        connection = UnixConnection(self.socket, timeout_s=2.0)
        try:
            connection.request("GET", "/v2/")
            return connection.getresponse().status in {200, 401}
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


PUSHER, PULLER = "pusher", "puller"
# The hashes are bcrypt's (htpasswd -B): Python's standard library cannot compute them.
_HASHES = {
    "push-password-1": "$2b$04$treenaillabregistryaa.jD5Nvp5pPX3ipiO1/JUBpBTrhDaQNii",
    "push-password-2": "$2b$04$treenaillabregistryaa.bcOWBK6gZEXVIF4sfFUk.bBIARpmxtu",
    "pull-password-1": "$2b$04$treenaillabregistryaa.hZY1114RpHe5Wl2BmXeaLuRc3MFSokm",
}
_PASSWORDS = {PUSHER: "push-password-1", PULLER: "pull-password-1"}


class RegistryService:
    """Runs a registry while entered; ``is_real`` chooses docker-registry, None what is installed.

    `ca_file` has the CA's certificate, also as ``ca.crt`` of the directory for ``--cert-dir``.
    """

    def __init__(
        self,
        *,
        is_real: bool | None = None,
        storage_bytes: int = 0,
        has_referrers: bool = False,
        has_tls: bool = True,
    ) -> None:
        self.is_real = find_docker_registry() is not None if is_real is None else is_real
        self.passwords: dict[str, str] = dict(_PASSWORDS)
        self._storage_bytes = storage_bytes
        self._has_referrers = has_referrers
        self._has_tls = has_tls
        self.directory = Path()
        self.front: RegistryFront
        self._backend: DockerRegistry | SmallRegistry

    @property
    def host(self) -> str:
        """The address that pull specs begin with, on loopback."""
        return self.front.host

    @property
    def port(self) -> int:
        return int(self.host.rpartition(":")[2])

    @property
    def ca_file(self) -> Path:
        return self.directory / "ca" / "ca.crt"

    @property
    def faults(self) -> FaultPlan:
        """The faults between the registry and its clients."""
        return self.front.faults

    def make_auth_json(self, user: str, *, host: str = "") -> bytes:
        """Return a ``.dockerconfigjson`` with the login of a user."""
        login = {"auth": _encode_login(user, self.passwords[user])}
        return json.dumps({"auths": {host or self.host: login}}).encode()

    def rotate_password(self, user: str, password: str) -> None:
        """Replace the password of a user; the old one is refused from now on."""
        self.passwords[user] = password
        if isinstance(self._backend, DockerRegistry):
            # The program reads a changed file again, and compares only its time.
            self._backend.set_htpasswd(_render_htpasswd(self.passwords))
        else:
            self._backend.passwords = dict(self.passwords)

    def stop_backend(self) -> None:
        """Stop the registry; its front answers no request."""
        self._backend.stop()

    def start_backend(self) -> None:
        """Start the registry again with its storage."""
        self._backend.start()

    def collect_garbage(self) -> None:
        """Run the garbage collection of docker-registry with ``--delete-untagged``."""
        assert isinstance(self._backend, DockerRegistry)
        self._backend.collect_garbage()

    def __enter__(self) -> Self:
        self.directory = owner.make_directory()
        certificates = self.directory / "ca"
        certificates.mkdir()
        authority = CertificateAuthority(self.directory)
        self.ca_file.write_bytes(authority.pem)
        context: ssl.SSLContext | None = None
        if self._has_tls:
            context = authority.make_server_context(self.directory)
        if self.is_real:
            self._backend = DockerRegistry(
                self.directory,
                _render_htpasswd(self.passwords),
                storage_bytes=self._storage_bytes,
            )
        else:
            self._backend = SmallRegistry(
                self.directory,
                self.passwords,
                storage_bytes=self._storage_bytes,
                has_referrers=self._has_referrers,
            )
        try:
            self._backend.start()
        except BaseException:
            owner.remove_directory(self.directory)
            raise
        self.front = RegistryFront(
            self._backend.socket, context, LoginAuthorizer(find_user, frozenset({PULLER}))
        )
        self.front.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.front.stop()
        self._backend.stop()
        owner.remove_directory(self.directory)


def find_user(authorization: str) -> str:
    """Return the user of a Basic authorization; empty without one."""
    kind, _, text = authorization.partition(" ")
    try:
        return base64.b64decode(text).decode().partition(":")[0] if kind == "Basic" else ""
    except ValueError:
        return ""


def _encode_login(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


def _render_htpasswd(passwords: Mapping[str, str]) -> str:
    return "".join(f"{user}:{_HASHES[password]}\n" for user, password in passwords.items())
