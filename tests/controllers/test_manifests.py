"""The output of ``treenail-controller manifests``, applied to a cluster."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.controllers.installed import apply
from treenail.api import documents as yaml_documents
from treenail.cli.controller.main import main
from treenail.clock import SystemClock
from treenail.controllers.install.installation import InstallOptions, build_documents
from treenail.controllers.install.permissions import iter_granted_verbs
from treenail.kube.client import Client
from treenail.kube.kubeconfig import read_kubeconfig
from treenail.kube.resources import (
    ROLLOUTPOLICIES,
)
from treenail.kube.transport import HttpTransport
from treenail_lab.apiserver.serving.server import LabServer

COMMAND = "import sys; from treenail.cli.controller.main import main; sys.exit(main())"
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LabServer]:
    with LabServer(tmp_path) as found:
        yield found


class Clients:
    """Create clients and close them at the end."""

    def __init__(self) -> None:
        self._transports: list[HttpTransport] = []

    def of(self, kubeconfig: Path) -> Client:
        self._transports.append(HttpTransport(read_kubeconfig(str(kubeconfig)), SystemClock()))
        return Client(self._transports[-1])

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


@pytest.fixture
def clients() -> Iterator[Clients]:
    found = Clients()
    yield found
    found.close()


@pytest.fixture
def client(server: LabServer, clients: Clients) -> Client:
    apply(server, build_documents(InstallOptions()))
    return clients.of(server.admin_kubeconfig)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["manifests", *arguments]) == 0
    text = capsys.readouterr().out
    return yaml_documents.load_documents(text, where="manifests")


def of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in found if each["kind"] == kind]


@needs_kubectl
@pytest.mark.integration
def test_manifests_can_be_piped_into_kubectl_twice(server: LabServer) -> None:
    paths = os.pathsep.join(filter(None, sys.path))
    printed = subprocess.run(
        [sys.executable, "-c", COMMAND, "manifests"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        check=True,
        timeout=30,
    )
    apply_command = ["kubectl", "--kubeconfig", str(server.admin_kubeconfig), "apply", "-f", "-"]
    said = []
    for _ in range(2):
        applied = subprocess.run(
            apply_command, input=printed.stdout, capture_output=True, check=False, timeout=50
        )
        assert applied.returncode == 0, applied.stderr
        said.append(applied.stdout.decode())
    again = said[1].splitlines()
    assert "deployment.apps/treenail-controller unchanged" in again
    assert len(again) == len(build_documents(InstallOptions()))


def test_printed_manifests_are_all_documents(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys) == build_documents(InstallOptions())


def test_manifests_follow_the_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = printed(
        capsys, "--enable", "drain", "--namespace", "ops", "--image", "r.example.com/c@sha256:1"
    )
    (deployment,) = of_kind(found, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (role,) = [
        each
        for each in of_kind(found, "ClusterRole")
        if each["metadata"]["name"] == "treenail-controller"
    ]

    assert container["image"] == "r.example.com/c@sha256:1"
    assert container["args"] == ["run", "--enable=drain", "--metrics=:8080"]
    assert {resource for rule in role["rules"] for resource in rule["resources"]} == {
        "daemonsets",
        "machineconfignodes",
        "machineconfignodes/status",
        "nodes",
        "poddisruptionbudgets",
        "pods",
        "pods/eviction",
    }
    (namespace,) = of_kind(found, "Namespace")
    assert namespace["metadata"]["name"] == "ops"
    placed = {each["metadata"].get("namespace") for each in found}
    assert placed == {None, "default", "ops"}
    subjects = [
        subject
        for kind in ("ClusterRoleBinding", "RoleBinding")
        for each in of_kind(found, kind)
        for subject in each["subjects"]
        if subject["kind"] == "ServiceAccount"
    ]
    assert {subject["namespace"] for subject in subjects} == {"ops"}


def test_only_agent_prints_access_of_nodes_and_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = printed(capsys, "--only", "agent")
    assert [(each["kind"], each["metadata"]["name"]) for each in found] == [
        ("ClusterRole", "treenail-node"),
        ("ClusterRoleBinding", "treenail-node"),
        ("Role", "treenail-node"),
        ("RoleBinding", "treenail-node"),
        ("ValidatingAdmissionPolicy", "treenail-node"),
        ("ValidatingAdmissionPolicyBinding", "treenail-node"),
    ]


def test_node_may_list_no_config_and_get_no_machineconfignode() -> None:
    (role,) = [
        each
        for each in build_documents(InstallOptions())
        if (each["kind"], each["metadata"]["name"]) == ("ClusterRole", "treenail-node")
    ]
    granted = set(iter_granted_verbs(role["rules"]))
    group = "machineconfiguration.openshift.io"
    assert {verb for resource, verb in granted if resource == f"machineconfigs.{group}"} == {"get"}
    assert {entry for entry in granted if entry[0].startswith("machineconfignodes")} == {
        (f"machineconfignodes/status.{group}", "patch")
    }


@pytest.mark.parametrize("names", ["", ",", "drain,reboot"])
def test_unknown_controller_is_rejected(names: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["manifests", "--enable", names])
    assert ended.value.code == 2
    assert "render, rollout, drain" in capsys.readouterr().err or names in ("", ",")


def test_replicas_prefer_different_nodes_and_zones() -> None:
    (deployment,) = of_kind(build_documents(InstallOptions()), "Deployment")
    affinity = deployment["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
    preferred = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [(each["weight"], each["podAffinityTerm"]["topologyKey"]) for each in preferred] == [
        (100, "kubernetes.io/hostname"),
        (50, "topology.kubernetes.io/zone"),
    ]


def test_pods_meet_the_restricted_pod_security_standard() -> None:
    (deployment,) = of_kind(build_documents(InstallOptions()), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]

    assert deployment["spec"]["replicas"] == 2
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}


@needs_kubectl
@pytest.mark.integration
@pytest.mark.parametrize(
    ("field", "value", "path"),
    [
        ("windows", '[{"day": ["Sat"], "start": "01:00", "duration": "4h", "timeZone": "UTC"}]',
         "spec.windows[0].day"),
        ("canary", '{"nodeselector": {}}', "spec.canary.nodeselector"),
    ],
)  # fmt: skip
def test_kubectl_refuses_a_nested_typo_in_a_policy(
    server: LabServer, client: Client, field: str, value: str, path: str
) -> None:
    document = f"""
apiVersion: treenail.io/v1alpha1
kind: RolloutPolicy
metadata: {{name: careful}}
spec: {{{field}: {value}}}
"""
    found = subprocess.run(
        ["kubectl", f"--kubeconfig={server.admin_kubeconfig}", "apply", "-f", "-"],
        input=document, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode != 0
    assert f'unknown field "{path}"' in found.stderr
    assert not client.list(ROLLOUTPOLICIES).items
