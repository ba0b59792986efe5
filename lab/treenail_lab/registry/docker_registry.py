"""The program docker-registry on a Unix socket, with its storage in a directory."""

import http.client
import shutil
import subprocess
import time
from pathlib import Path

from treenail.errors import HostError
from treenail.process import stop_process
from treenail_lab.lifetime.owner import owner
from treenail_lab.registry.front import UnixConnection

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

    def _is_ready(self) -> bool:
        connection = UnixConnection(self.socket, timeout_s=2.0)
        try:
            connection.request("GET", "/v2/")
            return connection.getresponse().status in {200, 401}
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
