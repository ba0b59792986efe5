"""A backup of etcd from before a rollout is restored after it, or during it.

The restored Nodes show that all machines are in service, and request earlier targets.
"""

import copy
from collections.abc import Iterator

import pytest

from tests.simulation.rollout import GROUP, POOLS, Rollout, SimulatedCluster
from treenail.controllers.runtime.informer_set import RESTORED_WAIT_S
from treenail_lab.apiserver.request import ServerRequest

LOST_VERSIONS = 1000
"""Versions after the backup. With fewer, a watch may not see that they are used again."""
SKIPPED = 10**6
"""As after ``etcdutl snapshot restore --bump-revision``."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> SimulatedCluster:
    return SimulatedCluster(tmp_path_factory.mktemp("cluster"))


class RestoredRollout(Rollout):
    """A rollout that begins after 20 seconds, and whose etcd is restored."""

    def __init__(self, shared: SimulatedCluster, skipped_versions: int) -> None:
        super().__init__(shared)
        self._skipped_versions = skipped_versions

    def restore_backup(self) -> None:
        self.restore(self.history[0], skipped_versions=self._skipped_versions)
        self.cluster.cut_watches()

    def lose_versions(self) -> None:
        self.cluster.api.store.version += LOST_VERSIONS

    def count_starts(self) -> dict[str, int]:
        return {name: machine.starts for name, machine in self.machines.items()}

    def check_settled(self) -> None:
        assert self.settle(), self.describe()


@pytest.fixture(params=[0, SKIPPED])
def run(shared: SimulatedCluster, request: pytest.FixtureRequest) -> Iterator[RestoredRollout]:
    with RestoredRollout(shared, request.param) as found:
        found.simulation.run_for(20.0)
        yield found
        found.check_settled()
        assert found.broken == []


def test_nodes_keep_their_targets_after_restore_of_older_requests(run: RestoredRollout) -> None:
    run.keep_state()
    run.change_config()
    run.check_settled()
    run.lose_versions()
    starts = run.count_starts()
    run.restore_backup()
    # The backup has the config before, and the rollout returns to it node by node.
    run.wanted = 0
    run.simulation.run_for(30.0)
    assert run.count_starts() == starts


def test_nothing_is_assigned_until_machines_that_are_down_show_it(run: RestoredRollout) -> None:
    run.cluster.faults.before = lambda _, request: keep_first_state(run, request)
    run.change_config()
    machine = run.machines["n0"]
    assert run.simulation.run_until(lambda: machine.is_down, limit_s=120.0)
    run.lose_versions()
    run.restore_backup()
    # It boots again before the node lifecycle controller would find it.
    run.simulation.run_for(RESTORED_WAIT_S - 10.0)
    assert run.list_assigned() == []


def test_restored_request_for_a_drain_ends_in_service(run: RestoredRollout) -> None:
    run.change_config()
    assert run.simulation.run_until(lambda: is_cordoned(run, "n0"), limit_s=120.0)
    run.keep_state()
    run.check_settled()
    run.lose_versions()
    # The backup shows n0 in the middle of its drain, and its machine has the new config.
    run.restore_backup()
    assert is_cordoned(run, "n0")


def test_machines_stay_as_they_are_until_a_restored_cluster_has_their_pool(
    run: RestoredRollout,
) -> None:
    pool = copy.deepcopy(run.cluster.objects(GROUP, "machineconfigpools")[0])
    run.keep_state()
    kinds = run.history[0].kinds
    run.history[0].kinds = [each for each in kinds if each[0] != (GROUP, "machineconfigpools")]
    run.change_config()
    run.check_settled()
    run.lose_versions()
    starts = run.count_starts()
    run.restore_backup()
    run.wanted = 0
    run.simulation.run_for(300.0)
    assert run.count_starts() == starts
    # A user creates it again.
    body = {**pool, "metadata": {"name": "worker"}, "status": {}}
    del body["spec"]["configuration"]
    run.cluster.execute("POST", POOLS, body)


def is_cordoned(run: Rollout, name: str) -> bool:
    node = run.cluster.api.store.find_object(("", "nodes"), ("", name)) or {}
    return bool(node.get("spec", {}).get("unschedulable"))


def keep_first_state(run: Rollout, request: ServerRequest) -> None:
    """Keep the state before the first assignment: the pool has a target, and no node has it."""
    if request.plural == "nodes" and not run.history:
        run.keep_state()
