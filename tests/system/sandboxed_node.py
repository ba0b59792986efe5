"""A node whose agent runs in the shipped unit, by a real systemd in a container.

systemd, D-Bus, journal, mounts and sandbox are real. rpm-ostreed and the API server are the lab's.
"""

import ctypes
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import quote, urlsplit

from tests.system.nspawn import REPOSITORY, Container
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.kube.resources import NODES
from treenail_lab import images
from treenail_lab.cluster import Lab, LabPlan, build_rendered_config
from treenail_lab.images import Image, ImageCatalogue, make_image
from treenail_lab.lifetime.interpreter import PYTHON_MODULE, build_script
from treenail_lab.machine import rootfs, settings
from treenail_lab.machine.settings import MachineSettings

NODE = "n1"
LIMIT_S = 30.0
FILE = "/etc/nmstate/openshift/net.yml"
"""A change of it needs neither a drain nor a reboot."""
_CLONE_NEWNET = 0x40000000
_AGENT_SETTINGS = f"""
node_name = "{NODE}"
backend = "rpm-ostree"
[limits]
retry_first_s = 0.1
retry_max_s = 0.5
"""
_RPM_OSTREED_UNIT = """
[Unit]
StartLimitIntervalSec=0
[Service]
Type=dbus
BusName=org.projectatomic.rpmostree1
Environment=DBUS_SYSTEM_BUS_ADDRESS=unix:path=/run/dbus/system_bus_socket
ExecStart=/usr/local/bin/rpm-ostreed
"""
_RPM_OSTREED_ACTIVATION = """
[D-BUS Service]
Name=org.projectatomic.rpmostree1
Exec=/bin/false
User=root
SystemdService=rpm-ostreed.service
"""
_RPM_OSTREED_POLICY = """
<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-BUS Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <policy context="default">
    <allow own="org.projectatomic.rpmostree1"/>
    <allow send_destination="org.projectatomic.rpmostree1"/>
  </policy>
</busconfig>
"""
# The health check of the container runtime connects to its socket.
_CRIO_PROGRAM = """
import signal, socket
listener = socket.socket(socket.AF_UNIX)
listener.bind("/run/crio/crio.sock")
listener.listen()
signal.pause()
"""
_CRIO_UNIT = f"""
[Service]
RuntimeDirectory=crio
ExecStart={sys.executable} /usr/local/bin/crio
ExecReload=/bin/true
"""
# Those of the shipped unit would wait for half a minute before each new start.
_DROP_IN = "[Service]\nRestartSec=100ms\n"


class SandboxedNode:
    """One Node; its agent is ``treenail.service`` in the container."""

    def __init__(self, container: Container) -> None:
        self.container = container
        self.root = Path(f"/proc/{container.leader}/root")
        self._machine = container.shared / "m"
        self.image = make_image("os/node", "1", 1_000)
        # Its machine is the container.
        self.lab = Lab(container.shared / "lab", LabPlan((), (self.image,)))
        self._listener: socket.socket | None = None
        self._retries = 0
        self._images = self._machine / "images.json"

    def __enter__(self) -> Self:
        self.lab.start_api()
        port = urlsplit(self.lab.server.url).port
        assert port is not None
        self._listener = listen_inside(self.container, port)
        threading.Thread(target=forward, args=(self._listener, port), daemon=True).start()
        self._install_rpmostreed()
        self._install_agent()
        return self

    def __exit__(self, *_: object) -> None:
        self.run("systemctl", "stop", "treenail", is_checked=False)
        if self._listener is not None:
            # Only a shutdown ends accept(2) in the other thread.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        self.lab.stop()

    def run(self, *command: str, is_checked: bool = True) -> str:
        """Run a command in the container, outside the sandbox; return its output."""
        inside = self.container.inside(*command)
        done = subprocess.run(inside, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 or not is_checked, (command, done.stdout, done.stderr)
        return done.stdout

    def shell(self, script: str) -> str:
        return self.run("sh", "-ec", script)

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(mode)

    def read(self, path: str) -> str:
        """Return the content of a file in the container; empty without one."""
        with suppress(FileNotFoundError):
            return (self.root / path.lstrip("/")).read_text()
        return ""

    def show(self, name: str) -> str:
        """Return a property of the agent's unit."""
        return self.run("systemctl", "show", "--value", "--property", name, "treenail").strip()

    # The cluster

    def add_config(self, name: str, files: dict[str, str], **spec: object) -> str:
        entries = [
            {"path": path, "contents": {"source": f"data:,{quote(text)}"}, "overwrite": True}
            for path, text in files.items()
        ]
        config = {"ignition": {"version": "3.5.0"}, "storage": {"files": entries}, **spec}
        return self.lab.add_config(build_rendered_config(name, {"config": config}))

    def request(self, config: str, image: Image | None = None) -> None:
        notes = {key.DESIRED_CONFIG: config}
        if image is not None:
            notes[key.DESIRED_OS_IMAGE] = image.pull_spec
        self.annotate(notes)

    def annotate(self, notes: dict[str, str]) -> None:
        self.lab.client.patch(NODES, NODE, {"metadata": {"annotations": notes}})

    def read_note(self, name: str) -> str:
        """Return an annotation of the Node; empty without it."""
        return self.lab.read_annotations(NODE).get(name, "")

    def retry(self) -> None:
        """Let the agent repeat a failed step at once: it waits for minutes before it does."""
        self._retries += 1
        self.annotate({key.RETRY: str(self._retries)})

    def wait_done(self, config: str) -> None:
        """Wait until the Node reports that it has the config."""
        self._wait(lambda notes: is_at(notes, config), f"{config} is not reached")

    def wait_degraded(self, *words: str, limit_s: float = LIMIT_S) -> str:
        """Wait until the Node is Degraded with a reason that has these words; return the reason."""

        def has_words(notes: dict[str, str]) -> bool:
            reason = notes.get(key.REASON, "")
            return notes.get(key.STATE) == "Degraded" and all(word in reason for word in words)

        return self._wait(has_words, f"no reason with {words}", limit_s).get(key.REASON, "")

    def _wait(
        self, condition: Callable[[dict[str, str]], bool], problem: str, limit_s: float = LIMIT_S
    ) -> dict[str, str]:
        def notes() -> dict[str, str]:
            found = self.lab.read_annotations(NODE)
            return found if condition(found) else {}

        try:
            return wait_until(notes, limit_s=limit_s)
        except AssertionError as error:
            log = self.run("journalctl", "-n", "80", is_checked=False)
            raise AssertionError(
                f"{problem}: {self.lab.read_annotations(NODE)}\n{log}\n{self.show('Result')}"
            ) from error

    # The machine

    def install_dying_agent(self, order: str) -> None:
        """Replace the agent by one that obeys `tests.fakes.dying_ledger`."""
        words = ("--root", "/", "--node-name", NODE, "--kubeconfig", "/var/lib/kubelet/kubeconfig")
        command = shlex.join(
            ["exec", sys.executable, "-m", "tests.fakes.dying_ledger", *words, "--order", order]
        )
        path = f"{REPOSITORY}/agent:{REPOSITORY}/lab:{REPOSITORY}"
        self.write("/usr/bin/treenail", f"#!/bin/sh\nPYTHONPATH={path} {command}\n", 0o755)
        self.run("systemctl", "restart", "treenail")

    def install_drop_in(self, text: str) -> None:
        """Change the agent's unit from its next start on; an empty text restores it."""
        self.write("/etc/systemd/system/treenail.service.d/case.conf", text)
        self.run("systemctl", "daemon-reload")

    def add_image(self, name: str) -> Image:
        """Create an image that rpm-ostreed can pull."""
        image = make_image("os/node", name, 1_000)
        self.lab.add_image(image)
        known = images.load_catalogue(self._images)
        images.save_catalogue(known.with_image(image), self._images)
        return image

    def start_crio(self) -> None:
        """Start a service in place of CRI-O, which can be reloaded."""
        self.write("/usr/local/bin/crio", _CRIO_PROGRAM)
        self.write("/usr/lib/systemd/system/crio.service", _CRIO_UNIT)
        self.shell("systemctl daemon-reload; systemctl start crio")

    def read_phase(self) -> str:
        """Return the phase of the update in the ledger; empty without one."""
        update = json.loads(self.read("/var/lib/treenail/ledger.json") or "{}").get("update")
        return str(update["phase"]) if update else ""

    def count_tracebacks(self) -> int:
        return self.run("journalctl", "-u", "treenail", "-o", "cat").count("Traceback")

    def start_agent(self) -> None:
        self.run("systemctl", "start", "treenail")

    def restart_count(self) -> int:
        return int(self.show("NRestarts"))

    def _install_rpmostreed(self) -> None:
        behaviour = self._machine / "settings.json"
        root = self._machine / "root"
        root.mkdir(parents=True)
        images.save_catalogue(ImageCatalogue((self.image,)), self._images)
        settings.save_settings(MachineSettings(), behaviour)
        rootfs.install_root(root, self.image)
        rootfs.boot_root(root)
        places = {
            "--root": root,
            "--images": self._images,
            "--settings": behaviour,
            "--pid-file": self._machine / "rpm-ostreed.pid",
        }
        words = [str(word) for place in places.items() for word in place]
        script = build_script([*PYTHON_MODULE, "treenail_lab.machine.rpmostree.daemon", *words])
        self.write("/usr/local/bin/rpm-ostreed", script, 0o755)
        self.write("/usr/lib/systemd/system/rpm-ostreed.service", _RPM_OSTREED_UNIT)
        services = "/usr/share/dbus-1/system-services"
        self.write(f"{services}/org.projectatomic.rpmostree1.service", _RPM_OSTREED_ACTIVATION)
        self.write("/etc/dbus-1/system.d/rpm-ostree.conf", _RPM_OSTREED_POLICY)
        self.write("/run/ostree-booted", "")
        self.shell(
            f"rm -rf /sysroot /run/ostree; ln -s {root}/sysroot /sysroot; "
            f"ln -s {root}/run/ostree /run/ostree; systemctl daemon-reload; systemctl reload dbus"
        )

    def _install_agent(self) -> None:
        kubeconfig = self.lab.add_node(NODE)
        self.write("/var/lib/kubelet/kubeconfig", kubeconfig.read_text(), 0o600)
        self.write("/etc/treenail/agent.toml", _AGENT_SETTINGS)
        command = shlex.join(["exec", sys.executable, "-m", "treenail"])
        path = f"{REPOSITORY}/agent"
        self.write("/usr/bin/treenail", f'#!/bin/sh\nPYTHONPATH={path} {command} "$@"\n', 0o755)
        shutil.copy(REPOSITORY / "systemd/treenail.service", self.root / "usr/lib/systemd/system")
        self.write("/etc/systemd/system/treenail.service.d/test.conf", _DROP_IN)
        self.shell("id core >/dev/null 2>&1 || useradd --create-home core; systemctl daemon-reload")


def is_at(notes: dict[str, str], config: str) -> bool:
    return notes.get(key.STATE) == "Done" and notes.get(key.CURRENT_CONFIG) == config


def listen_inside(container: Container, port: int) -> socket.socket:
    """Return a socket that listens on the loopback interface of the container."""
    found: list[socket.socket] = []

    def listen() -> None:
        # setns(2) changes the namespace of this thread only, and the socket keeps it.
        with Path(f"/proc/{container.leader}/ns/net").open() as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        found.append(socket.create_server(("127.0.0.1", port)))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    return found[0]


def forward(listener: socket.socket, port: int) -> None:
    """Connect each client of the listener with this port outside, until the listener is closed."""
    with suppress(OSError):
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", port))
            threading.Thread(target=connect, args=(client, server), daemon=True).start()


def connect(client: socket.socket, server: socket.socket) -> None:
    """Copy what either side sends to the other one, until both have ended; close both."""
    with client, server:
        backwards = threading.Thread(target=copy_bytes, args=(server, client), daemon=True)
        backwards.start()
        copy_bytes(client, server)
        backwards.join()


def copy_bytes(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while received := source.recv(65536):
            target.sendall(received)
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
