"""``treenail-controller status --hosted`` with a management cluster and a hosted one of the lab."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import hosted
from tests.fixtures.clusters import KUBECONFIG
from tests.fixtures.controllers import open_client
from tests.fixtures.objects import Json, make_object
from tests.mco.programs import Variable
from tests.waiting import wait_until
from treenail.api.component_names import HOSTED_ROLLOUTS
from treenail.api.hosted import annotations as hosted_key
from treenail.cli.controller.main import main
from treenail.clocks import SystemClock
from treenail.controllers.hosted.status import rows, snapshot
from treenail.kube.api_client import Client
from treenail.kube.resources import (
    CONFIGMAPS,
    CUSTOMRESOURCEDEFINITIONS,
    MACHINEDEPLOYMENTS,
    MACHINES,
    MACHINESETS,
    NAMESPACES,
    NODEPOOLS,
    NODES,
    SECRETS,
    Resource,
)
from treenail_lab.apiserver.serving.server import LabServer

pytestmark = pytest.mark.integration
NEW, OLD = hosted.NEW_HASH, hosted.OLD_HASH
RBAC = "rbac.authorization.k8s.io"
TREE = Variable("TREENAIL_TEST_HYPERSHIFT_TREE", "a checkout of HyperShift")
OLD_TOKEN, NEW_TOKEN = "first-token-secret", "later-token-secret"


class Management:
    """A management cluster with HyperShift's kinds."""

    def __init__(self, client: Client, server: LabServer, capi_version: str = "v1beta2") -> None:
        self.client = client
        self.server = server
        self.user = server.admin_kubeconfig
        hosted.install_hosted_kinds(client, capi_version)
        hosted.add_hosted_cluster(client)

    def add(self, *objects: tuple[Resource, Json]) -> None:
        for resource, document in objects:
            hosted.add_object(self.client, resource, document)

    def add_replaced_pool(self) -> None:
        self.add(*hosted.build_waiting_pool(OLD_TOKEN, NEW_TOKEN))

    def add_pool_in_place(self, kubeconfig: str, cluster: str = hosted.CLUSTER) -> None:
        data = {
            "token": hosted.encode(NEW_TOKEN),
            "reason": hosted.encode("AsExpected"),
            "payload": hosted.encode("x"),
        }
        secret = {"kubeconfig": hosted.encode(kubeconfig)}
        self.add(
            (NODEPOOLS, hosted.make_node_pool("ip", "InPlace", clusterName=cluster)),
            (MACHINESETS, hosted.make_machine_set("ip")),
            (MACHINES, hosted.make_machine("ip-a", "ip")),
            (SECRETS, hosted.make_secret(f"token-ip-{NEW}", "ip", data=data)),
            (SECRETS, hosted.make_secret("admin-kubeconfig", "ip", data=secret)),
        )

    def run(self, *arguments: str) -> int:
        return main(["status", "--hosted", "--kubeconfig", str(self.user), *arguments])

    def become_viewer(self) -> None:
        """Act as a user who may list the kinds, and read no Secret."""
        rules = [
            {
                "apiGroups": ["", "hypershift.openshift.io", "cluster.x-k8s.io"],
                "resources": [
                    "configmaps", "nodepools", "hostedclusters", "machines", "machinesets",
                    "machinedeployments", "hostedcontrolplanes",
                ],
                "verbs": ["get", "list"],
            }
        ]  # fmt: skip
        group = {"apiGroup": RBAC, "kind": "Group", "name": "viewers"}
        role = {"apiGroup": RBAC, "kind": "ClusterRole", "name": "viewers"}
        for kind, content in (
            ("ClusterRole", {"rules": rules}),
            ("ClusterRoleBinding", {"roleRef": role, "subjects": [group]}),
        ):
            resource = Resource(RBAC, "v1", f"{kind.lower()}s", kind, namespaced=False)
            self.client.create(resource, make_object(resource, "viewers", top=content))
        self.user = self.server.write_kubeconfig("viewer", ["viewers"])


@pytest.fixture(params=["v1beta2"])
def management(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Management]:
    with LabServer(tmp_path / "api") as server, open_client(server.admin_kubeconfig) as client:
        yield Management(client, server, request.param)


def read_document(management: Management, capsys: pytest.CaptureFixture[str]) -> list[Any]:
    capsys.readouterr()
    assert management.run("--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["apiVersion"], document["kind"]) == (
        "cli.treenail.io/v1",
        "HostedPoolStatusList",
    )
    pools: list[Any] = document["pools"]
    return pools


def test_pools_are_shown_with_what_they_wait_for(
    management: Management, capsys: pytest.CaptureFixture[str]
) -> None:
    assert management.run() == 0
    assert capsys.readouterr().out == "no NodePools found\n"
    management.add_replaced_pool()
    broken = hosted.make_node_pool("broken")
    broken["spec"]["management"]["upgradeType"] = "Later\x1b[2J"
    odd = hosted.make_machine("np-odd")
    odd["spec"]["bootstrap"]["dataSecretName"] = {"major": 4}
    management.add((NODEPOOLS, broken), (MACHINES, odd))
    assert management.run() == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].split()[:4] == ["NAMESPACE", "CLUSTER", "POOL", "TYPE"]
    assert f"{OLD} -> {NEW}" in printed
    assert "1 updated, 1 old" in printed
    assert "  next: run: kubectl -n clusters-one delete machine np-0" in lines
    assert (
        f"  next: run: kubectl -n clusters-one delete secret user-data-np-{NEW}-userdata" in printed
    )
    assert "cannot read the NodePool: spec.management.upgradeType: expected Replace" in printed
    assert "not looked at: Machine clusters-one/np-odd: spec.bootstrap.dataSecretName: " in printed
    assert "\x1b" not in printed
    pools = {pool["name"]: pool for pool in read_document(management, capsys)}
    assert [cause["kind"] for cause in pools["np"]["causes"]] == [
        "WaitsForDeletion",
        "StaleUserData",
    ]
    assert (pools["np"]["state"], pools["broken"]["state"]) == ("Blocked", "Unknown")
    for text in (printed, json.dumps(pools)):
        for secret in (OLD_TOKEN, NEW_TOKEN):
            assert secret not in text
            assert hosted.encode(secret) not in text


def test_names_and_a_namespace_choose_pools(
    management: Management, capsys: pytest.CaptureFixture[str]
) -> None:
    management.add_replaced_pool()
    management.client.create(NAMESPACES, make_object(NAMESPACES, "others"))
    other = hosted.make_node_pool("np")
    other["metadata"]["namespace"] = "others"
    management.add((NODEPOOLS, other))
    for arguments, expected in (
        ((), ["np", "np"]),
        (("np",), ["np", "np"]),
        (("others/np",), ["np"]),
        (("-n", "clusters"), ["np"]),
    ):
        assert management.run(*arguments, "-o", "name") == 0
        shown = capsys.readouterr().out.split()
        assert shown == [f"nodepool.hypershift.openshift.io/{name}" for name in expected]
    assert management.run("others/np") == 0
    assert "ClusterMissing: HostedCluster others/one does not exist" in capsys.readouterr().out
    assert management.run("missing") == 64
    assert "cannot find NodePool missing: the cluster has clusters/np" in capsys.readouterr().err
    assert management.run("--watch") == 64
    assert "cannot use --watch with --hosted" in capsys.readouterr().err


def test_conducted_pool_says_what_its_record_says(
    management: Management, capsys: pytest.CaptureFixture[str]
) -> None:
    management.add_replaced_pool()
    policy = {"metadata": {"annotations": {hosted_key.ROLLOUT_POLICY: "careful"}}}
    management.client.patch(NODEPOOLS, "np", policy, namespace="clusters")

    def read_cause(record: str) -> Any:
        data = {"data": {"np": record}}
        management.client.patch(CONFIGMAPS, HOSTED_ROLLOUTS, data, namespace="clusters-one")
        [pool] = read_document(management, capsys)
        return [cause["kind"] for cause in pool["causes"]], json.dumps(pool)

    metadata = {"name": HOSTED_ROLLOUTS, "namespace": "clusters-one"}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    management.client.create(CONFIGMAPS, config_map, namespace="clusters-one")
    halted = {"type": "Degraded", "status": "True", "reason": "RolloutHalted", "message": "m"}
    kinds, text = read_cause(json.dumps({"conditions": [halted]}))
    assert "RolloutStopped" in kinds
    assert "RolloutPolicy careful conducts the rollout: RolloutHalted: m" in text
    kinds, text = read_cause("[no JSON")
    assert "RolloutStopped" not in kinds
    assert f"key np of ConfigMap clusters-one/{HOSTED_ROLLOUTS}" in text


def test_user_without_secrets_reads_what_was_not_looked_at(
    management: Management, capsys: pytest.CaptureFixture[str]
) -> None:
    management.add_replaced_pool()
    management.become_viewer()
    (pool,) = read_document(management, capsys)
    assert [cause["kind"] for cause in pool["causes"]] == ["WaitsForDeletion"]
    assert pool["notRead"][0].startswith("Secrets of namespace clusters-one: GET secrets")


@pytest.mark.parametrize("management", ["v1beta1"], indirect=True)
def test_older_cluster_api_is_read(
    management: Management, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = hosted.make_machine_deployment("np")
    deployment["apiVersion"] = "cluster.x-k8s.io/v1beta1"
    deployment["spec"]["strategy"] = deployment["spec"].pop("rollout")["strategy"]
    deployment["spec"]["strategy"]["type"] = "OnDelete"
    machine = {**hosted.make_machine("np-a"), "apiVersion": "cluster.x-k8s.io/v1beta1"}
    for resource, document in ((MACHINEDEPLOYMENTS, deployment), (MACHINES, machine)):
        old = Resource(resource.group, "v1beta1", resource.plural, resource.kind, namespaced=True)
        management.add((old, document))
    management.add((NODEPOOLS, hosted.make_node_pool("np")))
    (pool,) = read_document(management, capsys)
    assert pool["counts"] == {"old": 1}
    assert [cause["kind"] for cause in pool["causes"]] == ["WaitsForDeletion", "TokenMissing"]


def test_degraded_node_of_a_hosted_cluster_is_shown(
    management: Management, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LabServer(tmp_path / "guest") as guest, open_client(guest.admin_kubeconfig) as client:
        notes = {
            "machineconfiguration.openshift.io/state": "Degraded",
            "machineconfiguration.openshift.io/reason": "no space left",
            "machineconfiguration.openshift.io/desiredConfig": NEW,
        }
        client.create(NODES, make_object(NODES, "ip-a", annotations=notes))
        management.add_pool_in_place(guest.admin_kubeconfig.read_text())
        (pool,) = read_document(management, capsys)
    assert (pool["state"], pool["counts"]) == ("Blocked", {"degraded": 1})
    assert pool["causes"][0]["kind"] == "NodeDegraded"
    assert "no space left" in pool["causes"][0]["message"]
    assert pool["causes"][0]["nextStep"].endswith(
        "annotate node ip-a machineconfiguration.openshift.io/state-"
    )


@pytest.mark.parametrize("kind", ["down", "slow", "file", "malformed"])
def test_hosted_cluster_that_does_not_answer_is_named(management: Management, kind: str) -> None:
    user = {"tokenFile": "/etc/hostname"} if kind == "file" else {"token": "t"}
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if kind == "slow":
            silent.listen()
        kubeconfig: Json = {
            "current-context": "a",
            "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
            "clusters": [{"name": "a", "cluster": {"server": find_address(silent)}}],
            "users": [{"name": "a", "user": user}],
        }
        management.add_pool_in_place("{{{" if kind == "malformed" else json.dumps(kubeconfig))
        management.add_replaced_pool()
        clock = SystemClock()
        found = snapshot.read_pools(management.client, clock, guest_limit_s=0.2)
    pools = {row.name: row for row in rows.build_rows(found, now=clock.now())}
    assert pools["ip"].counts == {"joined": 1}
    (unread,) = pools["ip"].unread
    assert unread.startswith("nodes of the hosted cluster: ")
    assert (kind == "file") is ("names a file" in unread)
    assert pools["np"].counts == {"updated": 1, "old": 1}
    assert pools["np"].unread == ()


def find_address(server: socket.socket) -> str:
    return f"https://127.0.0.1:{server.getsockname()[1]}"


def test_cluster_without_node_pools_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LabServer(tmp_path / "api") as server:
        assert main(["status", "--hosted", "--kubeconfig", str(server.admin_kubeconfig)]) == 1
    printed = capsys.readouterr().err
    assert "the cluster has no NodePools" in printed
    assert "management cluster of HyperShift" in printed


@pytest.fixture
def hypershift_kinds() -> Iterator[Client]:
    """A kube-apiserver with the CustomResourceDefinitions of HyperShift, until the test ends."""
    crds = [*hosted.load_hypershift_crds(TREE.read())]
    with open_client(Path(KUBECONFIG)) as client:
        for document in crds:
            client.create(CUSTOMRESOURCEDEFINITIONS, document)
        wait_until(lambda: hosted.are_kinds_served(client), limit_s=60)
        yield client
        for document in crds:
            client.delete(CUSTOMRESOURCEDEFINITIONS, document["metadata"]["name"])


@pytest.mark.cluster
@pytest.mark.skipif(not KUBECONFIG, reason="TREENAIL_TEST_KUBECONFIG is not set")
def test_pools_are_read_with_the_kinds_of_hypershift(
    hypershift_kinds: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = hosted.build_waiting_pool(OLD_TOKEN, NEW_TOKEN)
    hosted.add_namespaces(hypershift_kinds)
    hosted.add_hosted_cluster(hypershift_kinds, *objects)
    try:
        assert main(["status", "--hosted", "--kubeconfig", KUBECONFIG, "-o", "json"]) == 0
    finally:
        for resource, document in objects:
            name = document["metadata"]["name"]
            hypershift_kinds.delete(resource, name, namespace=document["metadata"]["namespace"])
        for name in ("fips", "ssh"):
            hypershift_kinds.delete(CONFIGMAPS, name, namespace=hosted.CONTROL_PLANE)
    (pool,) = json.loads(capsys.readouterr().out)["pools"]
    assert (pool["counts"], pool["notRead"]) == ({"updated": 1, "old": 1}, [])
    kinds = [cause["kind"] for cause in pool["causes"]]
    assert kinds == ["WaitsForDeletion", "StaleUserData"]
