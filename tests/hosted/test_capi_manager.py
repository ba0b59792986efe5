"""The real manager of Cluster API replaces the machines that another program deletes.

With the strategy OnDelete it replaces no other machine.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures import hosted
from tests.hosted import capi, programs
from tests.hosted.clusters import HostedClusters
from tests.waiting import wait_until
from treenail.kube.resources import MACHINES, NODES

# In the lab CAPI gets no further than the deletion of the first Machine.
pytestmark = [pytest.mark.integration, pytest.mark.parametrize("servers", ["real"], indirect=True)]

LIMIT_S = 120.0
OLD, NEW = hosted.OLD_HASH, hosted.NEW_HASH
REPLICAS = 3


@pytest.fixture(autouse=True)
def find_manager() -> None:
    programs.CAPI_MANAGER.read()
    programs.TREE.read()


@pytest.fixture
def provider(servers: HostedClusters, tmp_path: Path) -> Iterator[capi.MachineProvider]:
    """The actor beside CAPI's manager, with a Cluster without pools."""
    capi.install_kinds(servers)
    capi.create_cluster(servers)
    with capi.run_manager(servers, tmp_path) as manager, capi.MachineProvider(servers) as found:
        yield found
        sys.stdout.write(manager.read_log()[-20_000:])  # shown if the test failed
        assert manager.is_running


@pytest.fixture
def pool(servers: HostedClusters, provider: capi.MachineProvider) -> capi.ReplacePool:
    found = capi.ReplacePool(servers, "np", REPLICAS)
    found.create()
    wait_until(lambda: count_available(found) == REPLICAS, limit_s=LIMIT_S)
    return found


def count_available(pool: capi.ReplacePool) -> int:
    status = pool.read_deployment().get("status") or {}
    return int(status.get("availableReplicas") or 0)


def wait_observed(pool: capi.ReplacePool) -> None:
    """Wait until the old MachineSet may no longer replace its machines."""

    def is_observed() -> bool:
        notes = [each["metadata"].get("annotations", {}) for each in pool.read_machine_sets()]
        values = sorted(each.get("cluster.x-k8s.io/disable-machine-create", "") for each in notes)
        return values == ["false", "true"]

    wait_until(is_observed, limit_s=LIMIT_S)


def test_only_deleted_machines_are_replaced(
    servers: HostedClusters, provider: capi.MachineProvider, pool: capi.ReplacePool
) -> None:
    before = sorted(pool.read_machines())
    pool.set_target(NEW)
    wait_observed(pool)
    assert sorted(pool.read_machines()) == before
    for number, name in enumerate(before, start=1):
        servers.management.delete(MACHINES, name, namespace=hosted.CONTROL_PLANE)

        def is_replaced(name: str = name, number: int = number) -> bool:
            machines = pool.read_machines()
            updated = [each for each in machines if each not in before]
            joined = [
                each for each in updated if (machines[each].get("status") or {}).get("nodeRef")
            ]
            return name not in machines and len(joined) == number and len(machines) == REPLICAS

        wait_until(is_replaced, limit_s=LIMIT_S)
        assert [each for each in pool.read_machines() if each in before] == before[number:]
        assert provider.deleted == before[:number]
    wait_until(lambda: count_available(pool) == REPLICAS, limit_s=LIMIT_S)
    secrets = {
        each["spec"]["bootstrap"]["dataSecretName"] for each in pool.read_machines().values()
    }
    assert secrets == {f"user-data-np-{NEW}"}
    nodes = {node["metadata"]["name"] for node in servers.guest.list(NODES).items}
    assert len(nodes) == REPLICAS
    assert not nodes & set(before)
