"""The proxy of the node reaches the programs that pull images."""

from contextlib import closing
from pathlib import Path

import pytest

from tests.registry.test_proxies import TunnelProxy
from treenail.clocks import SystemClock
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.system.proxies import PROXY_FILE, parse_proxies
from treenail.kube.api_client import Client
from treenail.kube.resources import NODES
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail_lab.apiserver.serving.server import LabServer

UNITS = Path(__file__).parents[3] / "systemd"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("HTTPS_PROXY=http://p:3128\n", {"HTTPS_PROXY": "http://p:3128"}),
        ("# HTTPS_PROXY=a\n;NO_PROXY=b\n\n https_proxy=http://p \n", {"https_proxy": "http://p"}),
        ("NO_PROXY=\"a,b\"\nno_proxy='c'\n", {"NO_PROXY": "a,b", "no_proxy": "c"}),
        ("PATH=/evil\nLD_PRELOAD=/evil\nHTTPS_PROXY", {}),
        ("HTTP_PROXY=http://u:a=b@p\n", {"HTTP_PROXY": "http://u:a=b@p"}),
    ],
)
def test_environment_file_has_proxies(text: str, expected: dict[str, str]) -> None:
    assert parse_proxies(text) == expected


@pytest.mark.process
def test_program_gets_the_proxy_of_the_moment(tmp_path: Path) -> None:
    environ = {"PATH": "/usr/bin:/bin"}
    with Machine(Root(tmp_path), clock=SystemClock(), environ=environ) as machine:
        assert machine.programs.run_command(["printenv", "LC_ALL"], timeout_s=9) == b"C.UTF-8\n"
        file = tmp_path / PROXY_FILE.lstrip("/")
        file.parent.mkdir(parents=True)
        for url in (b"http://one:1\n", b"http://two:2\n"):
            file.write_bytes(b"HTTPS_PROXY=" + url)
            assert machine.programs.run_command(["printenv", "HTTPS_PROXY"], timeout_s=9) == url


def test_agent_reaches_the_api_server_without_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TunnelProxy(407) as proxy, LabServer(tmp_path) as server:
        for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://{proxy.address}")
        connection = read_kubeconfig(str(server.admin_kubeconfig))
        with closing(HttpTransport(connection, SystemClock())) as transport:
            assert Client(transport).list(NODES).items == ()
    assert proxy.heads == []


@pytest.mark.parametrize(
    "unit",
    [
        "treenail.service",
        "treenail-firstboot.service",
        "treenail-bootstrap.service",
        "rpm-ostreed-proxy.conf",
    ],
)
def test_unit_reads_the_proxy(unit: str) -> None:
    assert f"\nEnvironmentFile=-{PROXY_FILE}\n" in (UNITS / unit).read_text()
