"""A backup of etcd from before a rollout is restored after it, or during it.

The restored Nodes show that all machines are in service, and request earlier targets.
"""

import copy

import pytest

from tests.simulation.rollout import GROUP, POOLS, Rollout, SimulatedCluster
from treenail.controllers.rollout.controller import RESTORED_WAIT_S
from treenail_lab.apiserver.request import ServerRequest

LOST_VERSIONS = 1000
"""Versions after the backup. With fewer, a watch may not see that they are used again."""
SKIPPED = 10**6
"""As after ``etcdutl snapshot restore --bump-revision``."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> SimulatedCluster:
    return SimulatedCluster(tmp_path_factory.mktemp("cluster"))


def restore(run: Rollout, skipped_versions: int) -> None:
    run.restore(run.history[0], skipped_versions=skipped_versions)
    run.cluster.cut_watches()


@pytest.mark.parametrize("skipped_versions", [0, SKIPPED])
def test_nodes_keep_their_targets_after_restore_of_older_requests(
    shared: SimulatedCluster, skipped_versions: int
) -> None:
    with Rollout(shared) as run:
        run.simulation.run_for(20.0)
        run.keep_state()
        run.change_config()
        assert run.settle(), run.describe()
        run.cluster.api.store.version += LOST_VERSIONS
        starts = {name: machine.starts for name, machine in run.machines.items()}
        restore(run, skipped_versions)
        # The backup has the config before, and the rollout returns to it node by node.
        run.wanted = 0
        run.simulation.run_for(30.0)
        assert {name: machine.starts for name, machine in run.machines.items()} == starts
        assert run.settle(), run.describe()
        assert run.broken == []


@pytest.mark.parametrize("skipped_versions", [0, SKIPPED])
def test_nothing_is_assigned_until_machines_that_are_down_show_it(
    shared: SimulatedCluster, skipped_versions: int
) -> None:
    with Rollout(shared) as run:
        run.simulation.run_for(20.0)
        run.cluster.faults.before = lambda _, request: keep_first_state(run, request)
        run.change_config()
        machine = run.machines["n0"]
        assert run.simulation.run_until(lambda: machine.is_down, limit_s=120.0)
        run.cluster.api.store.version += LOST_VERSIONS
        restore(run, skipped_versions)
        # It boots again before the node lifecycle controller would find it.
        run.simulation.run_for(RESTORED_WAIT_S - 10.0)
        assert run.list_assigned() == []
        assert run.settle(), run.describe()
        assert run.broken == []


@pytest.mark.parametrize("skipped_versions", [0, SKIPPED])
def test_restored_request_for_a_drain_ends_in_service(
    shared: SimulatedCluster, skipped_versions: int
) -> None:
    with Rollout(shared) as run:
        run.simulation.run_for(20.0)
        run.change_config()
        assert run.simulation.run_until(lambda: is_cordoned(run, "n0"), limit_s=120.0)
        run.keep_state()
        assert run.settle(), run.describe()
        run.cluster.api.store.version += LOST_VERSIONS
        # The backup shows n0 in the middle of its drain, and its machine has the new config.
        restore(run, skipped_versions)
        assert is_cordoned(run, "n0")
        assert run.settle(), run.describe()
        assert run.broken == []


@pytest.mark.parametrize("skipped_versions", [0, SKIPPED])
def test_machines_stay_as_they_are_until_a_restored_cluster_has_their_pool(
    shared: SimulatedCluster, skipped_versions: int
) -> None:
    with Rollout(shared) as run:
        run.simulation.run_for(20.0)
        pool = copy.deepcopy(run.cluster.objects(GROUP, "machineconfigpools")[0])
        run.keep_state()
        kinds = run.history[0].kinds
        run.history[0].kinds = [each for each in kinds if each[0] != (GROUP, "machineconfigpools")]
        run.change_config()
        assert run.settle(), run.describe()
        run.cluster.api.store.version += LOST_VERSIONS
        starts = {name: machine.starts for name, machine in run.machines.items()}
        restore(run, skipped_versions)
        run.wanted = 0
        run.simulation.run_for(300.0)
        assert {name: machine.starts for name, machine in run.machines.items()} == starts
        # A user creates it again.
        body = {**pool, "metadata": {"name": "worker"}, "status": {}}
        del body["spec"]["configuration"]
        run.cluster.execute("POST", POOLS, body)
        assert run.settle(), run.describe()
        assert run.broken == []


def is_cordoned(run: Rollout, name: str) -> bool:
    node = run.cluster.api.store.find_object(("", "nodes"), ("", name)) or {}
    return bool(node.get("spec", {}).get("unschedulable"))


def keep_first_state(run: Rollout, request: ServerRequest) -> None:
    """Keep the state before the first assignment: the pool has a target, and no node has it."""
    if request.plural == "nodes" and not run.history:
        run.keep_state()
