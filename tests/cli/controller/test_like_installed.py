"""``treenail-controller manifests --like-installed``: an upgrade keeps the options."""

from typing import Any

import pytest

from tests.controllers.installed import apply
from tests.fixtures.clusters import server
from treenail.api import documents as yaml_documents
from treenail.api.component_names import PART_OF_LABELS
from treenail.cli.controller.main import main
from treenail.manifests import installed_options
from treenail_lab.apiserver.serving.server import LabServer

__all__ = ["server"]

ALL = (
    *("--enable", "render,rollout,drain,build,approve,install,serve"),
    *("--image", "r.example.com/treenail:1", "--builder-image", "r.example.com/builder:1"),
    *("--build-namespace", "openshift-machine-config-operator", "--build-cpu", "2"),
    *("--build-memory", "3Gi", "--build-storage", "30Gi", "--build-cache", "r.example.com/cache"),
    *("--tokens", "ask", "--api-server", "https://api.example.com:6443", "--web"),
    *("--registry-needs-cluster", "r1.example.com", "--registry-needs-cluster", "r2.example.com"),
    *("--metrics-from", "observe,monitoring", "--signing-key-secret", "signing", "--monitoring"),
    *("--image-annotation", "desiredImage", "--serve-namespace", "machines"),
)
FEWER = ("--enable", "render,rollout,build,serve")
KINDS = {"Namespace", "Deployment", "DaemonSet", "NetworkPolicy", "ConfigMap"}
Document = dict[str, Any]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[Document], str]:
    assert main(["manifests", *arguments]) == 0
    printed = capsys.readouterr()
    return yaml_documents.load_documents(printed.out, where="manifests"), printed.err


def find(documents: list[Document], kind: str, name: str = "") -> Document | None:
    matching = [item for item in documents if item["kind"] == kind]
    return next((item for item in matching if name in ("", item["metadata"]["name"])), None)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ALL,
        ("--enable", "serve"),
        ("--enable", "drain", "-n", "ops"),
        ("--enable", "install,rollout"),
        ("--enable", "approve,serve", "--tokens", "off"),
        ("--enable", "rollout,build", "--build-namespace", "builds", "--monitoring"),
    ],
)
def test_options_of_installed_objects_make_the_same_manifests(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    documents, _ = run(capsys, *arguments)
    options, unknown = installed_options.read_options(
        installed_options.InstalledObjects(
            find(documents, "Deployment"),
            find(documents, "DaemonSet"),
            find(documents, "NetworkPolicy", "treenail-controller"),
            find(documents, "ConfigMap", "treenail-dashboard"),
        )
    )
    assert run(capsys, *options)[0] == documents
    assert unknown == []


@pytest.mark.integration
@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {
            "labels": PART_OF_LABELS,
            "annotations": {"include.release.openshift.io/single-node-developer": "true"},
        },
    ],
)
def test_upgrade_leaves_the_kinds_of_openshift(
    capsys: pytest.CaptureFixture[str], server: LabServer, metadata: Document
) -> None:
    enable = ("--enable", "render,generate")
    documents, _ = run(capsys, *enable)
    skipped, _ = run(capsys, *enable, "--skip-generator-kinds")
    kinds = [item for item in documents if item not in skipped]
    assert len(kinds) == 8
    apply(server, [item for item in skipped if item["kind"] in KINDS])
    like = ("--like-installed", "--kubeconfig", str(server.admin_kubeconfig))
    assert run(capsys, *like)[0] == documents
    kinds[0]["metadata"] = {"name": kinds[0]["metadata"]["name"], **metadata}
    apply(server, kinds)
    assert run(capsys, *like)[0] == skipped


@pytest.mark.integration
def test_upgrade_keeps_options_and_names_what_changes(
    capsys: pytest.CaptureFixture[str], server: LabServer
) -> None:
    like = ("--like-installed", "--kubeconfig", str(server.admin_kubeconfig))
    assert main(["manifests", *like]) == 1
    assert "no Deployment treenail-controller" in capsys.readouterr().err
    documents, _ = run(capsys, *ALL)
    deployment = find(documents, "Deployment")
    assert deployment is not None
    deployment["spec"]["template"]["spec"]["containers"][0]["args"].append("--log-level=debug")
    apply(server, [item for item in documents if item["kind"] in KINDS])

    again, notes = run(capsys, *like, "--image", "r.example.com/treenail:2", *FEWER)

    assert "removes the argument --log-level=debug" in notes
    assert "changes --image: r.example.com/treenail:1 to r.example.com/treenail:2" in notes
    assert "approve,install,serve to render,rollout,build,serve" in notes
    assert notes.count("changes --") == 2
    assert again == run(capsys, *ALL, "--image", "r.example.com/treenail:2", *FEWER)[0]
