"""A registry that only a proxy with a login reaches: tinyproxy between two network namespaces."""

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from tests.registry.images import push_image
from tests.registry.real_registry import PUSHER, RegistryService, needs_docker_registry
from tests.registry.test_proxies import NAME, make_client
from tests.waiting import wait_until
from treenail.clocks import SystemClock
from treenail.errors import CommandError
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.system.proxies import PROXY_FILE
from treenail.process import stop_process
from treenail.registry.errors import Unreachable
from treenail.registry.proxies import read_proxy_settings

PROGRAMS = ("tinyproxy", "skopeo", "unshare", "nsenter", "ip")
pytestmark = [
    pytest.mark.integration,
    needs_docker_registry,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not all(map(shutil.which, PROGRAMS)), reason=f"needs {PROGRAMS}"),
]

T = TypeVar("T")
PASSWORD = "canary-of-the-proxy"
PORT = 3128
CONFIG = f"""\
Port {PORT}
Listen 10.77.0.1
Timeout 60
MaxClients 20
BasicAuth user {PASSWORD}
LogLevel Connect
LogFile "{{log}}"
"""
# The node has a link to the proxy, and neither a route nor a name server.
_OUTER = """\
ip link set lo up
ip link add out type veth peer name in netns "$1"
ip address add 10.77.0.1/30 dev out
ip link set out up
"""
_INNER = "ip address add 10.77.0.2/30 dev in; ip link set in up"
_SERVE = 'mount --bind "$1" /etc/hosts; shift; exec "$@"'
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


class NetworkNamespace:
    """A network namespace while it is entered."""

    def __enter__(self) -> "NetworkNamespace":
        command = ["unshare", "--net", "sh", "-c", "echo; exec sleep 900"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        stop_process(self._process, 5.0)
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def run_script(self, script: str, *arguments: str) -> None:
        enter = ["nsenter", f"--net=/proc/{self.pid}/ns/net"]
        subprocess.run([*enter, "sh", "-ec", script, "sh", *arguments], check=True)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on a thread in this namespace; its programs are there, too."""

        def enter() -> T:
            with Path(f"/proc/{self.pid}/ns/net").open("rb") as file:
                if _LIBC.setns(file.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            return function()

        with ThreadPoolExecutor(1) as executor:
            return executor.submit(enter).result()


@dataclass
class ProxiedNode:
    """A node that reaches nothing but the proxy, and a registry behind it."""

    network: NetworkNamespace
    registry: RegistryService
    log: Path

    @property
    def image(self) -> str:
        return f"{NAME}:{self.registry.port}/os/node:base"

    def read_tunnels(self) -> int:
        """Count the tunnels to the registry that the proxy opened."""
        return self.log.read_text().count(f'Established connection to host "{NAME}"')

    def push(self, environ: dict[str, str]) -> None:
        client = make_client(self.registry, read_proxy_settings(environ))
        self.network.call(lambda: push_image(client, tag="base"))
        client.close()

    def inspect(self, root: Path, environ: dict[str, str]) -> bytes:
        """Inspect the image with skopeo as the agent runs it."""
        file, login = root / PROXY_FILE[1:], root / "auth.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{name}={value}\n" for name, value in environ.items()))
        host = f"{NAME}:{self.registry.port}"
        login.write_bytes(self.registry.make_auth_json(PUSHER, host=host))
        command = ["skopeo", "inspect", "--no-tags", "--authfile", str(login), "--cert-dir"]
        command += [str(self.registry.ca_file.parent), f"docker://{self.image}"]
        with Machine(Root(root), clock=SystemClock(), environ=dict(os.environ)) as machine:
            return self.network.call(lambda: machine.programs.run_command(command, timeout_s=60))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ProxiedNode]:
    with ExitStack() as stack:
        outer, inner = (stack.enter_context(NetworkNamespace()) for _ in range(2))
        outer.run_script(_OUTER, str(inner.pid))
        inner.run_script(_INNER)
        registry = RegistryService(is_real=True)
        outer.call(registry.__enter__)
        stack.callback(registry.__exit__)
        log, hosts, config = tmp_path / "log", tmp_path / "hosts", tmp_path / "config"
        hosts.write_text(f"127.0.0.1 {NAME}\n")
        config.write_text(CONFIG.format(log=log))
        serve = ["unshare", "--mount", "sh", "-ec", _SERVE, "sh", str(hosts)]
        serve += ["tinyproxy", "-d", "-c", str(config)]
        proxy = outer.call(lambda: subprocess.Popen(serve, stdout=subprocess.DEVNULL))
        stack.callback(stop_process, proxy, 5.0)
        wait_until(lambda: inner.call(is_proxy_open))
        yield ProxiedNode(inner, registry, log)


def is_proxy_open() -> bool:
    try:
        socket.create_connection(("10.77.0.1", PORT), 5.0).close()
    except OSError:
        return False
    return True


def test_only_way_to_the_registry_is_the_proxy_with_its_login(
    node: ProxiedNode, tmp_path: Path
) -> None:
    environ = {
        "HTTPS_PROXY": f"http://user:{PASSWORD}@10.77.0.1:{PORT}",
        "NO_PROXY": "other,.svc.a",
    }
    node.push(environ)
    pushed = node.read_tunnels()
    assert pushed > 0
    assert b'"Digest"' in node.inspect(tmp_path, environ)
    assert node.read_tunnels() > pushed
    for name, value, expected in (
        (
            "HTTPS_PROXY",
            f"http://user:{PASSWORD}x@10.77.0.1:{PORT}",
            "answered 40[17]|Unauthorized|Proxy Auth",
        ),
        ("HTTPS_PROXY", f"http://10.77.0.1:{PORT}", "answered 40[17]|Unauthorized|Proxy Auth"),
        ("NO_PROXY", ".svc", "resol|dial tcp"),
    ):
        before = node.read_tunnels()
        changed = {**environ, name: value}
        with pytest.raises(Unreachable, match=expected) as failed_push:
            node.push(changed)
        with pytest.raises(CommandError, match=expected) as failed_inspection:
            node.inspect(tmp_path, changed)
        assert PASSWORD not in f"{failed_push.value} {failed_inspection.value}"
        assert node.read_tunnels() == before
