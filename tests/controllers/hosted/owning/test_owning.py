"""The controller ``nodepools`` with a lab API server and an actor in the place of Cluster API."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.controllers.hosted.owning import site as owned_site
from tests.controllers.hosted.owning.site import CapiActor, OwnedSite, settle
from tests.controllers.rollout.world import Killed
from tests.fixtures import hosted
from tests.fixtures.controllers import open_client
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool
from treenail.controllers.hosted.conduct import pool_facts
from treenail.kube.api_client import Client
from treenail.kube.resources import (
    HOSTEDCLUSTERS,
    HOSTEDCONTROLPLANES,
    MACHINEDEPLOYMENTS,
    MACHINEHEALTHCHECKS,
    MACHINES,
    MACHINESETS,
    NODEPOOLS,
    SECRETS,
)
from treenail_lab.apiserver.serving.server import LabServer

pytestmark = pytest.mark.integration
Json = dict[str, Any]
NEXT_RELEASE = "quay.io/example/release:4.22.2"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    with LabServer(tmp_path_factory.mktemp("management")) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: LabServer) -> Iterator[Client]:
    with open_client(server.admin_kubeconfig) as found:
        owned_site.install_kinds(found)
        yield found


class Numbers:
    last = 0


def open_site(client: Client, kind: str = "Replace", **spec: Any) -> OwnedSite:
    Numbers.last += 1
    site = OwnedSite(client, kind, number=Numbers.last)
    site.create_pool(**spec)
    return site


def test_new_pool_gets_machines_and_becomes_ready(client: Client) -> None:
    site = open_site(client, management={"upgradeType": "Replace", "autoRepair": True})
    actor = CapiActor(site)
    site.sync()
    assert site.list(MACHINEHEALTHCHECKS) == []
    assert site.conditions()["Ready"]["status"] == "False"
    settle(site, actor)
    pool, conditions = site.read_pool(), site.conditions()
    assert pool["status"]["version"] == "4.22.1"
    assert pool["status"]["replicas"] == 2
    assert pool["metadata"]["finalizers"] == [hosted_key.FINALIZER]
    states = {name: each["status"] for name, each in conditions.items()}
    for name in ("Ready", "AllMachinesReady", "ValidMachineConfig", "ReachedIgnitionEndpoint"):
        assert states[name] == "True"
    for name in ("UpdatingConfig", "UpdatingVersion", "ConfigUpdatePending"):
        assert states[name] == "False"
    assert len(site.list(MACHINEHEALTHCHECKS)) == 1
    before = len(site.transport.writes)
    site.sync()
    assert site.transport.writes[before:] == []
    site.patch_pool({"spec": {"management": {"autoRepair": False}}})
    site.sync()
    assert site.list(MACHINEHEALTHCHECKS) == []


@pytest.mark.parametrize("change", ["config", "release"])
def test_another_config_replaces_each_machine_once(client: Client, change: str) -> None:
    site = open_site(client, replicas=3)
    actor = CapiActor(site)
    settle(site, actor)
    old = {machine["metadata"]["name"] for machine in site.list(MACHINES)}
    if change == "config":
        site.set_config("b")
    else:
        site.patch_pool({"spec": {"release": {"image": NEXT_RELEASE}}})
    site.sync()
    conditions = site.conditions()
    assert conditions["UpdatingConfig"]["status"] == "True"
    assert conditions["UpdatingVersion"]["status"] == ("True" if change == "release" else "False")
    assert site.read_pool()["status"]["version"] == "4.22.1"
    settle(site, actor)
    assert sorted(actor.replaced) == sorted(old)
    assert actor.least_available >= 3
    assert site.conditions()["UpdatingConfig"]["status"] == "False"
    assert site.read_pool()["status"]["version"] == ("4.22.2" if change == "release" else "4.22.1")
    [hash_now] = {actor.boots[machine["metadata"]["name"]] for machine in site.list(MACHINES)}
    notes = site.read_pool()["metadata"]["annotations"]
    assert notes[hosted_key.CURRENT_CONFIG_VERSION] == hash_now


def test_new_target_during_a_rollout_and_scaling_keep_the_limit(client: Client) -> None:
    rolling = {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    management = {"upgradeType": "Replace", "replace": rolling}
    site = open_site(client, replicas=4, management=management)
    actor = CapiActor(site)
    settle(site, actor)
    site.set_config("b")
    for _ in range(3):
        site.sync()
        actor.step()
    assert actor.replaced
    site.set_config("c")
    site.patch_pool({"spec": {"replicas": 5}})
    settle(site, actor, steps=20)
    assert actor.least_available >= 3
    machines = site.list(MACHINES)
    assert len(machines) == 5
    assert len({actor.boots[machine["metadata"]["name"]] for machine in machines}) == 1
    assert len(actor.replaced) == len({*actor.replaced})


def test_changed_pull_secret_reaches_new_machines_only(client: Client) -> None:
    site = open_site(client)
    actor = CapiActor(site)
    settle(site, actor)
    first = dict(actor.boots)
    site.set_secret("two")
    settle(site, actor)
    assert actor.replaced == []
    assert actor.boots == first
    assert site.conditions()["ConfigUpdatePending"]["status"] == "True"
    assert site.conditions()["ConfigUpdatePending"]["reason"] == "ManagementConfigDrift"
    site.patch_pool({"spec": {"replicas": 3}})
    settle(site, actor)
    assert actor.replaced == []
    [new] = set(actor.boots) - set(first)
    assert actor.boots[new] not in first.values()


def test_change_of_a_cluster_wakes_its_own_pools_only(client: Client) -> None:
    site = open_site(client)
    for kind, mine, other in (
        (HOSTEDCLUSTERS, f"{site.namespace}/one", f"{site.namespace}/two"),
        (HOSTEDCONTROLPLANES, f"{site.plane}/one", f"{site.namespace}-two/two"),
    ):
        wake = site.handlers[kind.plural]
        wake(other, None, {})
        assert site.enqueued == []
        wake(mine, None, {})
        assert site.enqueued == [site.key]
        site.enqueued.clear()


@pytest.mark.parametrize("kind", ["Replace", "InPlace"])
def test_changed_ssh_key_rolls_nothing_and_reaches_new_machines(client: Client, kind: str) -> None:
    site = open_site(client, kind, management={"upgradeType": kind})
    site.set_config("a;ssh=one")
    actor = CapiActor(site)
    settle(site, actor)
    first, before = dict(actor.boots), site.read_owner()
    site.set_config("a;ssh=two")
    settle(site, actor)
    after: Json = site.read_owner() or {}
    assert (actor.replaced, actor.boots) == ([], first)
    assert after["spec"] == (before or {})["spec"]
    notes, hashes = after["metadata"]["annotations"], (before or {})["metadata"]["annotations"]
    assert notes[hosted_key.TARGET_CONFIG] not in first.values()
    assert notes[hosted_key.UPDATED_CONFIG] in first.values()
    assert notes[hosted_key.ROLLOUT_CONFIG] != hashes[hosted_key.ROLLOUT_CONFIG]
    read = clusterapi.MachineSet if kind == "InPlace" else clusterapi.MachineDeployment
    objects = pool_facts.PoolObjects(
        nodepool.NodePool.from_json(site.read_pool()),
        nodepool.HostedCluster.from_json(hosted.make_hosted_cluster()),
        read.from_json(after),
        is_owned=True,
    )
    # Nodes of a Replace pool wait for an annotation.
    assert objects.is_refresh is (kind == "InPlace")
    site.patch_pool({"spec": {"replicas": 3}})
    settle(site, actor)
    [new] = set(actor.boots) - set(first)
    assert actor.boots[new] == notes[hosted_key.TARGET_CONFIG]
    # What needs a drain rolls, together with the key.
    site.set_config("b;ssh=three")
    settle(site, actor, steps=20)
    later: Json = site.read_owner() or {}
    assert later["spec"] != after["spec"]
    if kind == "Replace":
        assert len(actor.replaced) == 3
    assert "ConfigUnknown" not in dict(site.events.found)


def test_computed_default_that_needs_a_drain_waits_for_the_next_rollout(client: Client) -> None:
    """Agents refuse it as a refresh, and it alone is no reason to drain nodes."""
    site = open_site(client, "InPlace", management={"upgradeType": "InPlace"})
    site.set_config("a;ssh=one;proxy=1")
    actor = CapiActor(site)
    settle(site, actor)

    def read_target() -> str:
        owner: Json = site.read_owner() or {}
        return str(owner["metadata"]["annotations"][hosted_key.TARGET_CONFIG])

    first, target = dict(actor.boots), read_target()
    site.set_config("a;ssh=one;proxy=2")
    settle(site, actor)
    assert read_target() == target
    assert site.conditions()["ConfigUpdatePending"]["reason"] == "ManagementConfigDrift"
    site.patch_pool({"spec": {"replicas": 3}})
    settle(site, actor)
    [new] = set(actor.boots) - set(first)
    assert actor.boots[new] != target
    # Its difference from the config of the nodes has the proxy too.
    site.set_config("a;ssh=two;proxy=2")
    settle(site, actor, steps=20)
    assert read_target() not in (target, actor.boots[new])


def test_pool_whose_config_is_unknown_is_rolled_and_says_so(client: Client) -> None:
    site = open_site(client)
    site.set_config("a;ssh=one")
    actor = CapiActor(site)
    settle(site, actor)
    for secret in site.list(SECRETS):
        if secret["metadata"]["name"].startswith("token-"):
            data = {"data": {"config": base64.b64encode(b"damaged").decode()}}
            client.patch(SECRETS, secret["metadata"]["name"], data, namespace=site.plane)
    site.set_config("a;ssh=two")
    settle(site, actor, steps=20)
    assert len(actor.replaced) == 2
    assert "expected gzip in base64" in dict(site.events.found)["ConfigUnknown"]


@pytest.mark.parametrize("kind", ["Replace", "InPlace"])
def test_pool_of_hypershift_is_taken_over_and_given_back_unchanged(
    client: Client, kind: str
) -> None:
    site = open_site(client, kind)
    old = hosted.OLD_HASH
    make = hosted.make_machine_deployment
    resource, document = MACHINEDEPLOYMENTS, make(target=old)
    if kind == "InPlace":
        resource, document = MACHINESETS, hosted.make_machine_set(target=old, current=old)
    document = site_text(site, document)
    hosted.add_object(client, resource, document)
    data = {"value": hosted.encode(old)}
    secret = site_text(site, hosted.make_secret(f"user-data-np-{old}", data=data))
    client.create(SECRETS, secret, namespace=site.plane)
    site.annotate(**{
        hosted_key.MACHINE_TEMPLATE: None, hosted_key.CURRENT_CONFIG: old,
        hosted_key.CURRENT_CONFIG_VERSION: old,
        # Of a HyperShift that divides its hash in two.
        hosted_key.CURRENT_ROLLOUT_CONFIG: old,
    })  # fmt: skip
    actor = CapiActor(site)
    before = site.read_owner()
    assert before is not None
    actor.step()
    actor.step()
    settle(site, actor)
    after = site.read_owner()
    assert after is not None
    assert after["spec"]["template"]["spec"] == before["spec"]["template"]["spec"]
    notes = site.read_pool()["metadata"]["annotations"]
    assert notes[hosted_key.CURRENT_CONFIG] == notes[hosted_key.CURRENT_CONFIG_VERSION] == old
    assert notes[hosted_key.CURRENT_ROLLOUT_CONFIG] not in ("", old)
    assert actor.replaced == []
    client.patch(
        HOSTEDCLUSTERS, "one", {"metadata": {"annotations": {hosted_key.SCOPE: None}}},
        namespace=site.namespace,
    )  # fmt: skip
    site.set_config("b")
    written = len(site.transport.writes)
    assert site.sync() is None
    assert site.transport.writes[written:] == []


def site_text(site: OwnedSite, document: Json) -> Json:
    """The object in the namespaces of the site."""
    found: Json = json.loads(json.dumps(document).replace("clusters", site.namespace))
    return found


def play(site: OwnedSite, actor: CapiActor, kill_after: int | None) -> None:
    """Create and change; the process is killed after a number of writes."""
    site.transport.left = kill_after

    def change() -> None:
        site.set_config("b")
        site.set_secret("two")
        site.patch_pool({"spec": {"replicas": 2}})

    for changes in (False, True):
        if changes:
            change()
        for _ in range(4):
            try:
                site.sync()
            except Killed:
                site.start()
                site.sync()
            actor.step()
        site.sync()


def test_kill_between_any_two_writes_ends_as_undisturbed(client: Client) -> None:
    management = {"upgradeType": "Replace", "autoRepair": True}
    undisturbed = open_site(client, management=management, replicas=1)
    play(undisturbed, CapiActor(undisturbed), None)
    count = len(undisturbed.transport.writes)
    assert count > 12
    for number in range(1, count):
        site = open_site(client, management=management, replicas=1)
        play(site, CapiActor(site), number)
        assert site.snapshot() == undisturbed.snapshot(), number


def test_deleted_pool_goes_after_its_machines_and_secrets(client: Client) -> None:
    site = open_site(client, management={"upgradeType": "Replace", "autoRepair": True})
    actor = CapiActor(site)
    settle(site, actor)
    client.delete(NODEPOOLS, "np", namespace=site.namespace)
    assert site.sync()
    assert site.read_owner() is None
    assert site.list(MACHINEHEALTHCHECKS) == []
    assert site.list(SECRETS)
    assert site.sync()
    for machine in site.list(MACHINES):
        client.delete(MACHINES, machine["metadata"]["name"], namespace=site.plane)
    assert site.sync() is None
    assert site.list(SECRETS) == []
    assert client.find(NODEPOOLS, "np", namespace=site.namespace) is None


def test_deleted_pool_goes_also_without_its_cluster(client: Client) -> None:
    site = open_site(client, replicas=0)
    settle(site, CapiActor(site))
    client.delete(NODEPOOLS, "np", namespace=site.namespace)
    client.delete(HOSTEDCLUSTERS, "one", namespace=site.namespace)
    while client.find(NODEPOOLS, "np", namespace=site.namespace) is not None:
        site.sync()
    assert site.read_owner() is None


BAD = {
    "config": ("ValidMachineConfig", "ConfigMapMissing", {"config": [{"name": "none"}]}),
    "both": ("AutoscalingEnabled", "ReplicasAndAutoscaling", {"autoScaling": {"max": 3}}),
    "limit": (
        "UpdateManagementEnabled", "InvalidMaxUnavailable",
        {"management": {"replace": {"rollingUpdate": {"maxUnavailable": "200%"}}}},
    ),
}  # fmt: skip
BAD_TEMPLATES = {
    "no name": ("AgentMachineTemplate", "InvalidMachineTemplate"),
    "no such": ("AgentMachineTemplate/none", "MachineTemplateMissing"),
    "no such kind": ("OtherTemplate/small", "MachineTemplateMissing"),
    "malformed": ("AgentMachineTemplate/broken", "InvalidMachineTemplate"),
}


@pytest.mark.parametrize("case", [*BAD, *BAD_TEMPLATES])
def test_bad_input_is_one_condition_and_changes_no_machine(client: Client, case: str) -> None:
    site = open_site(client)
    actor = CapiActor(site)
    settle(site, actor)
    before = site.read_owner()
    broken: Json = {"apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1",
              "kind": "AgentMachineTemplate", "metadata": {"name": "broken"}}  # fmt: skip
    client.create(owned_site.TEMPLATES, broken, namespace=site.plane)
    if case in BAD:
        kind, reason, spec = BAD[case]
        site.patch_pool({"spec": spec})
    else:
        kind = "ValidMachineTemplate"
        text, reason = BAD_TEMPLATES[case]
        site.annotate(**{hosted_key.MACHINE_TEMPLATE: text})
    site.set_config("b")
    settle(site, actor, steps=2)
    conditions = site.conditions()
    assert (conditions[kind]["status"], conditions[kind]["reason"]) == ("False", reason)
    assert "; " in conditions[kind]["message"]
    assert (site.read_owner() or {})["spec"] == (before or {})["spec"]
    assert actor.replaced == []


OWN_NOTES = (hosted_key.UPDATED_CONFIG, hosted_key.TARGET_CONFIG, hosted_key.ROLLOUT_CONFIG)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_record_that_a_user_removes_is_no_success(client: Client, count: int) -> None:
    """In the middle of an update in place, of which no node has anything yet."""
    management = {"upgradeType": "InPlace"}
    site = open_site(client, "InPlace", management=management)
    settle(site, CapiActor(site))
    site.patch_pool({"spec": {"release": {"image": NEXT_RELEASE}}})
    site.sync()
    notes = dict.fromkeys(OWN_NOTES[:count])
    body = {"metadata": {"annotations": notes}}
    client.patch(MACHINESETS, "np", body, namespace=site.plane)
    site.sync()
    found = (site.read_owner() or {})["metadata"]["annotations"]
    assert found[hosted_key.TARGET_CONFIG] != found[hosted_key.UPDATED_CONFIG]
    assert site.conditions()["UpdatingVersion"]["status"] == "True"
    assert site.read_pool()["status"]["version"] == "4.22.1"


def test_object_of_another_pool_is_a_condition_with_the_remedy(client: Client) -> None:
    site = open_site(client)
    settle(site, CapiActor(site))
    body = {"metadata": {"annotations": {hosted_key.NODE_POOL: "clusters/other"}}}
    client.patch(MACHINEDEPLOYMENTS, "np", body, namespace=site.plane)
    site.set_config("b")
    site.sync()
    condition = site.conditions()["ValidMachineTemplate"]
    assert (condition["status"], condition["reason"]) == ("False", "OtherNodePool")
    assert "kubectl annotate" in condition["message"]


def test_paused_pool_keeps_its_machines_and_says_so(client: Client) -> None:
    site = open_site(client)
    actor = CapiActor(site)
    settle(site, actor)
    site.patch_pool({"spec": {"pausedUntil": "true", "replicas": 5}})
    site.set_config("b")
    settle(site, actor)
    assert len(site.list(MACHINES)) == 2
    assert actor.replaced == []
    assert site.conditions()["ReconciliationActive"]["status"] == "False"
    site.patch_pool({"spec": {"pausedUntil": None}})
    settle(site, actor, steps=20)
    assert len(site.list(MACHINES)) == 5
    assert len(actor.replaced) == 2


def put_object(server: LabServer, place: tuple[str, str], document: Json) -> None:
    server.call_api(lambda api: api.store.put_object(place, document))


def test_other_manager_of_the_status_stops_treenail(client: Client, server: LabServer) -> None:
    site = open_site(client)
    settle(site, CapiActor(site))
    other = Client(site.transport, field_manager="hypershift-operator")
    status: Json = {"status": {"replicas": 7}}
    other.patch(NODEPOOLS, "np", status, namespace=site.namespace, subresource="status")
    document = site.read_pool()
    for entry in document["metadata"]["managedFields"]:
        if entry["manager"].startswith("treenail"):
            entry["time"] = "2026-01-01T00:00:00Z"
    cluster: Any = client.get(HOSTEDCLUSTERS, "one", namespace=site.namespace)
    for entry in cluster["metadata"]["managedFields"]:
        entry["time"] = "2025-01-01T00:00:00Z"
    for kind, stored in ((NODEPOOLS, document), (HOSTEDCLUSTERS, cluster)):
        place = (kind.group, kind.plural)
        put_object(server, place, stored)
    written = len(site.transport.writes)
    site.set_config("b")
    site.sync()
    assert site.transport.writes[written:] == []
    [(reason, text)] = set(site.events.found)
    assert reason == "ManagedElsewhere"
    assert "hypershift-operator" in text
