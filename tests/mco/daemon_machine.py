"""A machine on which the real machine-config-daemon (MCD) runs, and which it can reboot.

The machine is a root directory in namespaces of its own. A reboot ends the daemon, and starts it
again with another boot ID. The OS is not CoreOS, so that the daemon leaves the OS image alone.
"""

import shutil
import subprocess
import sys
import threading
import uuid
from pathlib import Path

from tests.mco import relay
from tests.mco.daemon_root import (
    ENVIRONMENT,
    KUBECONFIGS,
    MOUNTS,
    SPACES,
    make_root,
    remove_root,
    serve_unit_files,
)
from tests.mco.operator import VERSION
from tests.mco.random_files import VENDOR_UNITS
from treenail_lab.lifetime.owner import owner

_DAEMON = """
ip link set lo up
mount --bind "$1/run/boot_id" "$1/proc/sys/kernel/random/boot_id"
chroot "$1" /usr/bin/python3 -I -S /run/relay "$3" /run/api &
# The daemon finds systemd-run first in /run/bin; a request to reboot ends this boot.
export PATH=/run/bin:$PATH
exec chroot "$1" /run/daemon start --root-mount=/ --node-name="$4" \\
    --kubeconfig=/etc/kubernetes/kubeconfig --kubelet-healthz-enabled=false \\
    --metrics-url=127.0.0.1:0 -v=4 $5
"""
_SYSTEMD_RUN = "#!/bin/sh\ntouch /run/reboot-requested\n"
_PRESETS = "disable *\n"
_POLL_S = 0.2


class DaemonMachine:
    """The machine; ``kubeconfig`` names the API server on ``port`` of loopback."""

    def __init__(
        self,
        program: Path,
        directory: Path,
        name: str,
        *,
        kubeconfig: Path,
        port: int,
        argument: str = "",
    ) -> None:
        self.root = directory / "root"
        self.log = directory / "daemon.log"
        self.boot_count = 0
        self._program, self._name, self._port = program, name, port
        self._argument = argument
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"daemon-{name}", daemon=True)
        make_root(self.root, VENDOR_UNITS, {"tree": {}, "presets": _PRESETS})
        for folder in ("etc/kubernetes", "run/bin", "etc/machine-config-daemon"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        for place in KUBECONFIGS:
            shutil.copyfile(kubeconfig, self.root / place)
        shutil.copyfile(relay.__file__, self.root / "run/relay")
        runner = self.root / "run/bin/systemd-run"
        runner.write_text(_SYSTEMD_RUN)
        runner.chmod(0o755)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping.set()
        self._thread.join(30.0)
        remove_root(self.root)

    def _run(self) -> None:
        outside = subprocess.Popen(
            [sys.executable, relay.__file__, str(self.root / "run/api"), str(self._port)],
            env=ENVIRONMENT | owner.mark_environment(),
            start_new_session=True,
        )
        try:
            with serve_unit_files(self.root):
                while not self._is_stopping.is_set():
                    self._boot()
        finally:
            outside.kill()
            outside.wait()

    def _boot(self) -> None:
        """Run the daemon until it requests a reboot or ends, as systemd and the kubelet do."""
        request = self.root / "run/reboot-requested"
        if request.exists() or self.boot_count == 0:
            request.unlink(missing_ok=True)
            (self.root / "run/boot_id").write_text(f"{uuid.uuid4()}\n")
            self.boot_count += 1
        arguments = [str(self.root), str(self._program), str(self._port), self._name]
        arguments.append(self._argument)
        with self.log.open("ab") as log:
            daemon = subprocess.Popen(
                ["unshare", *SPACES, "sh", "-c", MOUNTS + _DAEMON, "sh", *arguments],
                env=ENVIRONMENT | owner.mark_environment() | {"RELEASE_VERSION": VERSION},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            while daemon.poll() is None and not request.exists():
                if self._is_stopping.wait(_POLL_S):
                    break
        finally:
            daemon.kill()
            daemon.wait()
