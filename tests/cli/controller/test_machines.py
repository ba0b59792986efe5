"""``treenail-controller machines`` with a cluster of the lab."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.controllers import open_client
from tests.fixtures.objects import install_kinds
from tests.provisioning.logged import make_refusal, make_row
from tests.provisioning.samples import make_pool
from treenail.cli.controller.main import main
from treenail.clocks import SystemClock
from treenail.kube.api_client import Client
from treenail.kube.resources import CONFIGMAPS, MACHINECONFIGPOOLS, NAMESPACES, NODES
from treenail.manifests.ignition_server import NAME
from treenail.provisioning.machines.logged_requests import (
    RequestOutcome,
    RequestRow,
    format_requests,
    log_request,
)
from treenail.provisioning.machines.request_log import REQUEST_CONFIGMAP
from treenail_lab.apiserver.serving.server import LabServer

pytestmark = pytest.mark.integration
IMAGE = "quay.io/example/os@sha256:" + "ab" * 32
WORKER = "node-role.kubernetes.io/worker"


class Provisioned:
    """A cluster with an Ignition server's log of requests."""

    def __init__(self, client: Client, kubeconfig: Path) -> None:
        self.client = client
        self._kubeconfig = str(kubeconfig)
        self.now = SystemClock().now()
        install_kinds(client)
        selector = {"nodeSelector": {"matchLabels": {WORKER: ""}}}
        client.create(MACHINECONFIGPOOLS, make_pool(**selector))
        named: dict[str, Any] = {"apiVersion": "v1", "metadata": {"name": NAME}}
        client.create(NAMESPACES, {**named, "kind": "Namespace"})
        named = {"apiVersion": "v1", "metadata": {"name": REQUEST_CONFIGMAP}}
        client.create(CONFIGMAPS, {**named, "kind": "ConfigMap"}, namespace=NAME)

    def write(self, *rows: RequestRow) -> None:
        text = format_requests(log_request(f"a-{number}", row) for number, row in enumerate(rows))
        self.client.patch(CONFIGMAPS, REQUEST_CONFIGMAP, {"data": text}, namespace=NAME)

    def add_node(self, name: str, address: str) -> None:
        metadata = {"name": name, "labels": {WORKER: ""}}
        self.client.create(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        addresses = [{"type": "InternalIP", "address": address}]
        self.client.patch(NODES, name, {"status": {"addresses": addresses}}, subresource="status")

    def run(self, *arguments: str) -> int:
        return main(["machines", "--kubeconfig", self._kubeconfig, *arguments])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Provisioned]:
    with LabServer(tmp_path / "api") as server, open_client(server.admin_kubeconfig) as client:
        yield Provisioned(client, server.admin_kubeconfig)


def test_machines_are_listed_worst_first(
    cluster: Provisioned, capsys: pytest.CaptureFixture[str]
) -> None:
    now = cluster.now
    cluster.add_node("w1", "10.0.0.1")
    cluster.write(
        make_row(now - 30, address="10.0.0.1", token="one", image=IMAGE),
        make_row(now - 1500, address="10.0.0.2", token="two", machine="w2"),
        make_row(now - 60, address="10.0.0.3", token="three"),
        make_refusal(now - 10, address="10.0.0.4"),
        make_refusal(now - 20, address="10.0.0.5", token="five", reason="the token has expired"),
        make_row(now - 90_000, address="10.0.0.6", token="six"),
    )
    assert cluster.run("-o", "json") == 3
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "MachineRequestList"
    assert [
        (each["address"], each["node"]["arrival"], each["node"]["name"], each["needsUser"])
        for each in document["requests"]
    ] == [
        ("10.0.0.2", "missing", "", True),
        ("10.0.0.5", "waiting", "", True),
        ("10.0.0.3", "waiting", "", False),
        ("10.0.0.4", "unexpected", "", False),
        ("10.0.0.1", "appeared", "w1", False),
    ]
    assert document["requests"][-1]["image"] == IMAGE
    assert cluster.run() == 3
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == [
        "AGE", "ADDRESS", "POOL", "TOKEN", "MACHINE", "VERSION", "OUTCOME", "NODE", "IMAGE",
    ]  # fmt: skip
    assert "none for 25 min" in table[1]
    step = "it received rendered-worker-1 in Ignition 3.4.0 (165000 bytes)"
    assert table[2] == f"  no Node appeared; {step}"
    assert table[3] == (
        "  read its console; on the machine run: journalctl -u treenail-firstboot -u kubelet"
    )
    assert table[5] == "  the token has expired"
    assert table[6].startswith("  create another token, and install the machine with it: ")
    assert table[6].endswith("treenail-controller token create --pool worker")
    assert "none yet" in table[7]
    assert table[9] == "  the token is unknown"
    assert table[11].split()[-2:] == ["w1", "os@abababababab"]
    assert cluster.run("-o", "name") == 3
    assert capsys.readouterr().out == "node/w1\n"
    assert cluster.run("-o", "wide") == 3
    assert IMAGE in capsys.readouterr().out


def test_exit_code_is_that_of_the_worst_machine(
    cluster: Provisioned, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cluster.run() == 0
    assert capsys.readouterr().err == "no machine requested a config in the last 24 hours\n"
    cluster.write(make_row(cluster.now, pool="worker"), make_refusal(cluster.now, pool="infra"))
    assert cluster.run() == 2
    assert cluster.run("infra") == 0
    assert cluster.run("--expect", "0s") == 3
    cluster.add_node("w1", "10.0.0.5")
    assert cluster.run() == 0


def test_text_from_outside_cannot_control_the_terminal(
    cluster: Provisioned, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        '{"id":"a","time":"%s","address":"\\u001b[2J10.0.0.1","pool":"a\\nb","outcome":"invalid"}'
    )
    text = line % "2999-01-01T00:00:00Z"
    cluster.client.patch(
        CONFIGMAPS, REQUEST_CONFIGMAP, {"data": {"requests": text}}, namespace=NAME
    )
    for output in ("table", "wide", "yaml", "json"):
        assert cluster.run("-o", output) == 0
        shown = capsys.readouterr().out
        assert "\x1b" not in shown
        assert "a\nb" not in shown
        assert r"\u001b[2J10.0.0.1" in shown or r"\e[2J10.0.0.1" in shown


def test_missing_log_is_an_error_with_a_remedy(
    cluster: Provisioned, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cluster.run("-n", "other") == 1
    error = capsys.readouterr().err
    assert f"ConfigMap other/{REQUEST_CONFIGMAP} does not exist" in error
    assert "treenail-controller manifests --enable serve" in error


def test_no_outcome_is_left_out(cluster: Provisioned, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.write(
        *(
            make_row(cluster.now, address=f"10.0.1.{number}", token="", outcome=outcome)
            for number, outcome in enumerate(RequestOutcome)
        )
    )
    cluster.run("--json")
    found = {each["outcome"] for each in json.loads(capsys.readouterr().out)["requests"]}
    assert found == {each.value for each in RequestOutcome}
