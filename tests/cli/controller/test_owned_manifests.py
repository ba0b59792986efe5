"""Manifests and options of the controller nodepools."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fixtures import hosted
from tests.fixtures.controllers import open_client
from tests.fixtures.objects import make_object
from tests.waiting import wait_until
from treenail.cli.controller.main import main
from treenail.errors import InvalidError, NotFoundError
from treenail.kube.api_client import Client
from treenail.kube.resources import (
    CUSTOMRESOURCEDEFINITIONS,
    HOSTEDCLUSTERS,
    NAMESPACES,
    NODEPOOLS,
)
from treenail.manifests.installed_options import InstalledObjects, read_options
from treenail_lab.apiserver.serving.server import LabServer

Json = dict[str, Any]
URL = "https://ignition.example.com:22623"
KINDS = {"nodepools.hypershift.openshift.io", "hostedclusters.hypershift.openshift.io"}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[tuple[LabServer, Client]]:
    with LabServer(tmp_path / "lab") as server, open_client(server.admin_kubeconfig) as client:
        yield server, client


def print_manifests(capsys: pytest.CaptureFixture[str], *options: str) -> list[Json]:
    assert main(["manifests", *options]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def print_kinds(capsys: pytest.CaptureFixture[str], server: LabServer) -> list[Json]:
    connection = ("--kubeconfig", str(server.admin_kubeconfig))
    found = print_manifests(capsys, "--hosted", "--only", "hosted", *connection)
    return [each for each in found if each and each["kind"] == "CustomResourceDefinition"]


@pytest.mark.integration
def test_small_kinds_are_printed_only_where_no_others_exist(
    lab: tuple[LabServer, Client], capsys: pytest.CaptureFixture[str]
) -> None:
    server, client = lab
    found = print_kinds(capsys, server)
    assert {each["metadata"]["name"] for each in found} == KINDS
    client.create(CUSTOMRESOURCEDEFINITIONS, found[1])
    assert {each["metadata"]["name"] for each in print_kinds(capsys, server)} == KINDS
    client.create(CUSTOMRESOURCEDEFINITIONS, hosted.build_crd(HOSTEDCLUSTERS, "v1beta1"))
    assert [each["metadata"]["name"] for each in print_kinds(capsys, server)] == [
        found[1]["metadata"]["name"]
    ]


@pytest.mark.integration
def test_small_kinds_accept_the_objects_and_refuse_others(
    lab: tuple[LabServer, Client], capsys: pytest.CaptureFixture[str]
) -> None:
    server, client = lab
    for document in print_kinds(capsys, server):
        client.create(CUSTOMRESOURCEDEFINITIONS, document)

    def is_served() -> bool:
        try:
            client.list(NODEPOOLS)
            client.list(HOSTEDCLUSTERS)
        except NotFoundError:
            return False
        return True

    wait_until(is_served)
    client.create(NAMESPACES, make_object(NAMESPACES, hosted.NAMESPACE))
    hosted.add_object(client, HOSTEDCLUSTERS, hosted.make_hosted_cluster())
    pool = hosted.make_node_pool(nodeDrainTimeout="5m", config=[{"name": "a"}])
    stored: Any = hosted.add_object(client, NODEPOOLS, pool)
    assert stored["spec"] == pool["spec"]
    assert stored["status"]["version"] == "4.22.0"
    with pytest.raises(InvalidError):
        client.create(
            NODEPOOLS, hosted.make_node_pool("other", "Recreate"), namespace=hosted.NAMESPACE
        )


def test_kinds_need_the_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = str(tmp_path / "absent")
    assert main(["manifests", "--hosted", "--only", "hosted", "--kubeconfig", absent]) != 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "cannot read kubeconfig" in captured.err


def test_deployment_has_the_options_of_nodepools(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--ignition-url", URL, "--ignition-ca", "ca", "--scope", "other")
    image = ("--agent-image", "registry.example.com/agent:1")
    found = print_manifests(capsys, "--enable", "hosted,nodepools", *options, *image)
    [deployment] = [each for each in found if each["kind"] == "Deployment"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    wanted = (f"--ignition-url={URL}", "--ignition-ca=ca", "--scope=other", "=".join(image))
    for argument in wanted:
        assert argument in container["args"]
    installed, unknown = read_options(InstalledObjects(deployment, None))
    assert {*wanted} <= {*installed}
    assert unknown == []


@pytest.mark.parametrize(
    ("parts", "rules"),
    [
        ("hosted", {"machines"}),
        ("nodepools", {"machinedeployments", "nodepools/status"}),
        ("hosted,nodepools", {"machines", "machinedeployments", "nodepools/status"}),
    ],
)
def test_roles_are_those_of_the_chosen_controllers(
    capsys: pytest.CaptureFixture[str], parts: str, rules: set[str]
) -> None:
    pools = ("--node-pools", "clusters") if "nodepools" in parts else ()
    found = print_manifests(capsys, "--only", parts, "--control-plane", "clusters-one", *pools)
    roles = [each for each in found if each["kind"] == "Role"]
    assert [each["metadata"]["namespace"] for each in roles] == ["clusters-one", "clusters"][
        : 1 + bool(pools)
    ]
    granted = {name for role in roles for rule in role["rules"] for name in rule["resources"]}
    assert granted & {"machines", "machinedeployments", "nodepools/status"} == rules


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("manifests", "--enable", "nodepools", "--ignition-url", URL), "without hosted"),
        (("manifests", "--enable", "hosted,nodepools"), "without --ignition-url"),
        (
            ("manifests", "--only", "hosted", "--node-pools", "a"),
            "without the controller nodepools",
        ),
    ],
)
def test_missing_option_is_named(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], text: str
) -> None:
    assert main(options) == 64
    assert text in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.parametrize(
    ("enable", "text"), [("nodepools", "without hosted"), ("hosted,nodepools", "--ignition-url")]
)
def test_process_needs_hosted_and_the_url(
    lab: tuple[LabServer, Client], capsys: pytest.CaptureFixture[str], enable: str, text: str
) -> None:
    connection = ("--kubeconfig", str(lab[0].admin_kubeconfig), "--no-leader-election")
    assert main(["run", "--enable", enable, *connection, "--metrics", "127.0.0.1:0"]) == 64
    assert text in capsys.readouterr().err
