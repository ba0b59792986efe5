"""The transport that a command or the controllers get."""

import argparse
from pathlib import Path

import pytest

from tests.fixtures.files import write_kubeconfig
from treenail.cli.controller.connect import (
    connect_cluster,
    create_pod_transport,
    create_transport,
    find_kubeconfigs,
)
from treenail.clocks import SystemClock
from treenail.errors import UsageError
from treenail.kube.transport.native import HttpTransport
from treenail.kube.transport.official import OfficialTransport

PROXIES = ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def kubeconfig(tmp_path: Path) -> str:
    return write_kubeconfig(tmp_path / "config", {"token": "t0ps3cret"})


def test_list_skips_missing_files_only(kubeconfig: str) -> None:
    # The system refuses the long name, as it does a file of another user.
    refused = "/" + "a" * 300
    listed = f"/nonexistent:{refused}::{kubeconfig}"
    assert find_kubeconfigs(None, {"KUBECONFIG": listed}) == [refused, kubeconfig]
    with pytest.raises(UsageError, match="cannot read kubeconfig"):
        create_transport([refused, kubeconfig], "", SystemClock())


def test_token_needs_no_package(kubeconfig: str) -> None:
    assert isinstance(create_transport([kubeconfig], "", SystemClock()), HttpTransport)


@pytest.mark.parametrize(
    ("no_proxy", "host", "kind"),
    [
        ("", "api.example.com", OfficialTransport),
        ("other.example.com", "api.example.com", OfficialTransport),
        ("localhost,.example.com", "api.example.com", HttpTransport),
        ("*", "api.example.com", HttpTransport),
        ("172.30.0.0/16", "172.30.0.1", HttpTransport),
        ("172.30.0.0/16", "172.31.0.1", OfficialTransport),
        ("", "localhost", HttpTransport),
    ],
)
def test_package_connects_through_the_proxy_of_the_environment(
    tmp_path: Path, no_proxy: str, host: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = f"https://{host}:6443"
    kubeconfig = write_kubeconfig(tmp_path / "config", {"token": "t0ps3cret"}, server=server)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.com:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    transport = create_transport([kubeconfig], "", SystemClock())
    transport.close()
    assert isinstance(transport, kind)


@pytest.mark.process
def test_package_runs_credential_plugins(tmp_path: Path) -> None:
    plugin = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "/bin/false"}}
    path = write_kubeconfig(tmp_path / "config", plugin)
    transport = create_transport([path], "", SystemClock())
    transport.close()
    assert isinstance(transport, OfficialTransport)


def test_process_outside_a_pod_has_no_service_account() -> None:
    with pytest.raises(UsageError, match="this is not a pod") as raised:
        create_pod_transport(SystemClock())
    assert raised.value.remedy == "pass --kubeconfig FILE"


def test_list_of_files_needs_no_package(kubeconfig: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("current-context: it\n")
    transport = create_transport([str(other), kubeconfig], "", SystemClock())
    transport.close()
    assert isinstance(transport, HttpTransport)


@pytest.mark.process
def test_package_uses_the_current_context_of_a_later_file(tmp_path: Path) -> None:
    plugin = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "/bin/false"}}
    path = write_kubeconfig(tmp_path / "config", plugin)
    other = tmp_path / "other"
    other.write_text("apiVersion: v1\nkind: Config\n")
    transport = create_transport([str(other), path], "", SystemClock())
    transport.close()
    assert isinstance(transport, OfficialTransport)


def test_pod_without_kubeconfig_uses_its_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    arguments = argparse.Namespace(kubeconfig=None, context="")
    with pytest.raises(UsageError, match="cannot read kubeconfig"), connect_cluster(arguments):
        pass
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    # Without a port: this process may run in a pod with a service account.
    with (
        pytest.raises(UsageError, match="cannot use the service account"),
        connect_cluster(arguments),
    ):
        pass
