"""HTTPS_PROXY and NO_PROXY: which hosts go through the proxy, and a real CONNECT."""

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.fakes.clock import FakeClock
from tests.registry.images import push_image
from tests.registry.real_registry import PUSHER, RegistryService
from tests.registry.scripted_server import ScriptedServer
from treenail.config.pullsecret import parse_pull_secret
from treenail.errors import ConfigError
from treenail.registry.authorization import select_login
from treenail.registry.client import RegistryClient
from treenail.registry.errors import Unreachable
from treenail.registry.proxies import ProxySettings, make_variables, read_proxy_settings
from treenail.registry.transport import TlsSettings

NAME = "kubernetes.default.svc"
"""In the certificates of test registries: loopback is never reached through a proxy."""


class TunnelProxy(ScriptedServer):
    """Opens tunnels by CONNECT for one login, and remembers the requests."""

    def __init__(self, status: int = 200) -> None:
        super().__init__(lambda _: b"")
        self.heads: list[str] = []
        self._status = status
        self.address = self.host

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(4096)
            self.heads.append(head.decode())
            connection.sendall(f"HTTP/1.1 {self._status} X\r\n\r\n".encode())
            if self._status != 200:
                return
            # Its own DNS: the client need not resolve the name.
            port = int(head.split()[1].decode().rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as upstream:
                back = threading.Thread(target=_copy, args=(upstream, connection))
                back.start()
                _copy(connection, upstream)
                back.join(10)


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while piece := source.recv(65536):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@pytest.fixture
def proxy() -> Iterator[TunnelProxy]:
    with TunnelProxy() as proxy:
        yield proxy


def make_client(
    service: RegistryService, proxies: ProxySettings, name: str = NAME
) -> RegistryClient:
    host = f"{name}:{service.port}"
    secret = parse_pull_secret(service.make_auth_json(PUSHER, host=host), where="the test")
    return RegistryClient(
        host,
        FakeClock(),
        login=select_login(secret.credentials, host, "os/node"),
        tls=TlsSettings(service.ca_file.read_text()),
        proxies=proxies,
    )


def test_requests_go_through_the_proxy_with_its_login(
    lab_registry: RegistryService, proxy: TunnelProxy
) -> None:
    url = f"http://user:pa%40ss@{proxy.address}"
    client = make_client(lab_registry, read_proxy_settings({"HTTPS_PROXY": url}))
    push_image(client)
    client.close()
    assert proxy.heads
    assert proxy.heads[0].startswith(f"CONNECT {NAME}:{lab_registry.port} HTTP/1.1\r\n")
    assert "Proxy-Authorization: Basic dXNlcjpwYUBzcw==" in proxy.heads[0]
    assert not any("Authorization: Basic cHVzaGVy" in head for head in proxy.heads)


def test_loopback_is_reached_directly(lab_registry: RegistryService, proxy: TunnelProxy) -> None:
    settings = read_proxy_settings({"https_proxy": f"http://{proxy.address}"})
    push_image(make_client(lab_registry, settings, "127.0.0.1"))
    assert proxy.heads == []


def test_refusal_of_the_proxy_is_unreachable_without_its_password(
    lab_registry: RegistryService,
) -> None:
    with TunnelProxy(407) as proxy:
        settings = read_proxy_settings({"HTTPS_PROXY": f"http://user:canary@{proxy.address}"})
        with pytest.raises(Unreachable, match="answered 407") as raised:
            make_client(lab_registry, settings).get_manifest("os/node", "base")
    assert "canary" not in str(raised.value)


@pytest.mark.parametrize(
    ("exceptions", "host", "is_direct"),
    # As Go 1.26 answers: http.ProxyFromEnvironment.
    [
        ("", "quay.io", False),
        ("*", "quay.io", True),
        ("a.example,*", "quay.io", True),
        ("quay.io", "quay.io", True),
        ("quay.io", "cdn.quay.io", True),
        (".quay.io", "cdn.quay.io", True),
        (".quay.io", "quay.io", False),
        ("*.quay.io", "cdn.quay.io", True),
        ("*.quay.io", "quay.io", False),
        ("*quay.io", "cdn.quay.io", False),
        ("*quay.io", "quay.io", False),
        ("quay.io", "evilquay.io", False),
        ("QUAY.io", "quay.IO", True),
        ("quay.io:443", "quay.io", True),
        ("quay.io:5000", "quay.io", False),
        (".quay.io:443", "cdn.quay.io", True),
        (":443", "quay.io", False),
        ("a.example, quay.io ,", "quay.io", True),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.1.2.3/8", "10.1.2.3", True),
        ("10.0.0.0/255.0.0.0", "10.1.2.3", False),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("10.0.0.0/8", "10.example", False),
        ("10.0.0.0/99", "10.1.2.3", False),
        ("10.1.2.3", "10.1.2.3", True),
        ("10.1.2.3:443", "10.1.2.3", True),
        ("10.1.2.3:80", "10.1.2.3", False),
        ("1.2.3", "10.1.2.3", False),
        (".2.3", "10.1.2.3", False),
        ("fd00::/8", "fd00::1", True),
        ("fd00::1", "fd00::1", True),
        ("[fd00::1]:443", "fd00::1", True),
        ("[fd00::1]:80", "fd00::1", False),
        ("[fd00::1]", "fd00::1", False),
        ("FD00:0::1", "fd00::1", True),
        ("10.0.0.0/8", "::ffff:10.1.2.3", True),
        ("10.1.2.3", "::ffff:10.1.2.3", True),
        ("", "127.0.0.1", True),
        ("", "127.9.9.9", True),
        ("", "::1", True),
        ("", "localhost", True),
        ("", "a.localhost", False),
        ("10.0.0.0/8", "10.1.2.3.example", False),
    ],
)
def test_exceptions_are_those_of_go(exceptions: str, host: str, is_direct: bool) -> None:
    settings = read_proxy_settings({"HTTPS_PROXY": "http://p:1", "NO_PROXY": exceptions})
    assert (settings.find_proxy(host, 443) is None) == is_direct


def test_variables_have_both_names_and_need_a_proxy() -> None:
    upper = {"HTTPS_PROXY": "http://u:1", "NO_PROXY": "a"}
    # As in Go, the upper-case name comes first.
    assert make_variables({**upper, "https_proxy": "http://l:1"}) == {
        **upper,
        "https_proxy": "http://u:1",
        "no_proxy": "a",
    }
    assert make_variables({"http_proxy": "http://l:1"})["HTTP_PROXY"] == "http://l:1"
    assert make_variables({"NO_PROXY": "*", "PATH": "/bin", "HTTPS_PROXY": ""}) == {}


@pytest.mark.parametrize("url", ["https://p:1", "socks5://p:1", "http://", "http://p:x", "://"])
def test_unusable_proxy_is_refused_without_its_url(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_proxy_settings({"HTTPS_PROXY": url.replace("p:1", "user:canary@p:1")})
    assert "canary" not in str(raised.value)
