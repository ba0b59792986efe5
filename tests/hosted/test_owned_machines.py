"""treenail owns a Replace pool: the real manager of Cluster API replaces its machines once."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.controllers.hosted.owning import site as owned_site
from tests.fixtures import hosted
from tests.fixtures.controllers import CLOCK, run_controllers
from tests.fixtures.objects import Json, make_object
from tests.hosted import capi, programs
from tests.hosted.clusters import HostedClusters
from tests.waiting import wait_until
from treenail.api.hosted import annotations as hosted_key
from treenail.controllers.hosted.owning.controller import OwningController, OwningSettings
from treenail.kube.api_client import Client
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.resources import CONFIGMAPS, HOSTEDCLUSTERS, MACHINES, NODEPOOLS

# In the lab CAPI gets no further than the deletion of the first Machine.
pytestmark = [pytest.mark.integration, pytest.mark.parametrize("servers", ["real"], indirect=True)]
LIMIT_S = 120.0
REPLICAS = 3


@pytest.fixture
def provider(servers: HostedClusters, tmp_path: Path) -> Iterator[capi.MachineProvider]:
    """The actor beside CAPI's manager, with a Cluster without pools."""
    programs.CAPI_MANAGER.read()
    programs.TREE.read()
    capi.install_kinds(servers)
    capi.create_cluster(servers)
    with capi.run_manager(servers, tmp_path) as manager, capi.MachineProvider(servers) as found:
        yield found
        sys.stdout.write(manager.read_log()[-20_000:])  # shown if the test failed
        assert manager.is_running


def create_pool(client: Client, rolling: Json) -> None:
    template: Json = {"template": {"metadata": {}, "spec": {}}}
    client.create(
        capi.TEST_TEMPLATES,
        make_object(capi.TEST_TEMPLATES, "small", template, namespace=hosted.CONTROL_PLANE),
        namespace=hosted.CONTROL_PLANE,
    )
    cluster = hosted.make_hosted_cluster()
    cluster["metadata"]["annotations"] = {hosted_key.SCOPE: owned_site.SCOPE}
    hosted.add_object(client, HOSTEDCLUSTERS, cluster)
    set_config(client, "a")
    pool = hosted.make_node_pool(
        management={"upgradeType": "Replace", "replace": {"rollingUpdate": rolling}},
        replicas=REPLICAS,
        config=[{"name": "sysctl"}],
    )
    notes = {hosted_key.MACHINE_TEMPLATE: f"{capi.TEST_TEMPLATES.kind}/small"}
    pool["metadata"]["annotations"] = notes
    pool.pop("status")
    client.create(NODEPOOLS, pool, namespace=hosted.NAMESPACE)


def set_config(client: Client, text: str) -> None:
    body = make_object(CONFIGMAPS, "sysctl", top={"data": {"config": text}})
    if client.find(CONFIGMAPS, "sysctl", namespace=hosted.NAMESPACE) is None:
        client.create(CONFIGMAPS, body, namespace=hosted.NAMESPACE)
    else:
        change: Json = {"data": body["data"]}
        client.patch(CONFIGMAPS, "sysctl", change, namespace=hosted.NAMESPACE)
        # Contents are read again after minutes, a change of the NodePool is seen at once.
        note: Json = {"metadata": {"annotations": {"example.com/config": text}}}
        client.patch(NODEPOOLS, "np", note, namespace=hosted.NAMESPACE)


def read_states(client: Client) -> dict[str, str]:
    pool: Any = client.get(NODEPOOLS, "np", namespace=hosted.NAMESPACE)
    conditions = pool.get("status", {}).get("conditions", [])
    return {condition["type"]: condition["status"] for condition in conditions}


def list_machines(client: Client) -> dict[str, Json]:
    items: Any = client.list(MACHINES, namespace=hosted.CONTROL_PLANE).items
    return {machine["metadata"]["name"]: machine for machine in items}


def test_rollout_replaces_each_machine_once_within_the_limit(
    servers: HostedClusters, provider: capi.MachineProvider
) -> None:
    client = servers.management
    create_pool(client, {"maxSurge": 0, "maxUnavailable": 1})
    controller = OwningController(
        Client(client._transport, field_manager="treenail-nodepools"),
        CLOCK,
        EventRecorder(client, "test", "test", CLOCK),
        OwningSettings(
            owned_site.SCOPE, owned_site.URL, generate=owned_site.generate_config,
            plan_secrets=owned_site.plan_secrets,
        ),
    )  # fmt: skip

    def is_updated() -> bool:
        states = read_states(client)
        return (states.get("Ready"), states.get("UpdatingConfig")) == ("True", "False")

    with run_controllers(client, controller):
        wait_until(is_updated, limit_s=LIMIT_S)
        before = list_machines(client)
        assert len(before) == REPLICAS
        set_config(client, "b")
        wait_until(lambda: read_states(client).get("UpdatingConfig") == "True", limit_s=LIMIT_S)
        least, now = REPLICAS, before
        while not is_updated():
            now = list_machines(client)
            joined = sum(bool(each.get("status", {}).get("nodeRef")) for each in now.values())
            least = min(least, joined)
        now = list_machines(client)
    assert least >= REPLICAS - 1
    assert not now.keys() & before.keys()
    assert sorted(provider.deleted) == sorted(before)
    assert sorted(provider.created) == sorted({*before, *now})
    secrets = {machine["spec"]["bootstrap"]["dataSecretName"] for machine in now.values()}
    assert len(secrets) == 1
