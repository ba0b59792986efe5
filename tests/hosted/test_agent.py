"""HyperShift's in-place upgrader and drainer update a node whose agent is treenail's."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fixtures import hosted
from tests.fixtures.controllers import open_client
from tests.hosted import programs
from tests.hosted.clusters import HostedClusters, InPlacePool, run_upgrader
from tests.integration.hosted_site import NAMESPACE, HostedSite, make_config, make_payload
from tests.integration.site import NODE
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.object_meta import read_metadata
from treenail.kube.resources import NODES, PODS
from treenail_lab.apiserver.controllers.pods import BUILDER_LABEL
from treenail_lab.apiserver.serving.server import LabServer

pytestmark = [pytest.mark.integration]

APP, GONE, FREE = "/etc/app.conf", "/etc/gone.conf", "/etc/nmstate/openshift/net.yml"
OLD, NEW, NEXT = hosted.OLD_HASH, hosted.NEW_HASH, "2c2c2c2c"
POOL = "np"
LIMIT_S = 25.0


class UpgradedNode:
    """A lab machine in a pool of HyperShift's upgrader."""

    def __init__(self, site: HostedSite, clusters: HostedClusters) -> None:
        self.site = site
        self.pool = InPlacePool(clusters, POOL, [])
        self.pool.create(limit="1")
        notes, labels = self.pool.describe_node(NODE)
        # The lab's scheduler binds pods to Nodes with this label.
        metadata = {"annotations": notes, "labels": {**labels, BUILDER_LABEL: ""}}
        clusters.guest.patch(NODES, NODE, {"metadata": metadata})
        self.pool.add_machine(NODE, OLD)

    def set_target(self, value: str, files: dict[str, str]) -> None:
        payload = make_payload(make_config("rendered-master-2", files))
        self.pool.set_target(value, limit="1", payload=payload.encode())

    def wait_complete(self, value: str) -> None:
        wait_until(lambda: self.pool.read_machine_set().current_hash == value, limit_s=LIMIT_S)
        self.site.wait_done(value)
        # The upgrader deletes the pod. The kubelet of the lab's node does not run any.
        for pod in self.site.lab.client.list(PODS, namespace=NAMESPACE).items:
            metadata = read_metadata(pod)
            assert metadata.is_deleting
            self.site.lab.client.delete(PODS, metadata.name, namespace=NAMESPACE, grace_s=0)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[UpgradedNode]:
    programs.find_program("inplace")
    with ExitStack() as exits:
        management = exits.enter_context(LabServer(tmp_path / "management"))
        served = {APP: "0", GONE: "0"}
        site = HostedSite(served, is_allowed=False, has_drainer=False)
        exits.callback(site.stop)
        exits.callback(lambda: print(site.story()))  # noqa: T201  # shown if the test failed
        clusters = HostedClusters(
            management,
            management.admin_kubeconfig,
            site.server.admin_kubeconfig,
            exits.enter_context(open_client(management.admin_kubeconfig)),
            site.lab.client,
        )
        clusters.create_control_plane()
        upgrader = exits.enter_context(run_upgrader(clusters, tmp_path))
        exits.callback(lambda: print(upgrader.read_log()[-20_000:]))  # noqa: T201  # as above
        yield UpgradedNode(site, clusters)


def test_upgrader_of_hypershift_drives_the_agent(node: UpgradedNode) -> None:
    site = node.site
    node.set_target(NEW, {APP: "1"})
    node.wait_complete(NEW)
    assert (site.text(APP), site.text(GONE)) == ("1", None)
    assert site.machine.boot_count == site.boots + 1
    assert site.list_values(key.DESIRED_DRAIN) == ["", f"drain-{NEW}", f"uncordon-{NEW}"]
    before, after = site.find_sight(NEW)
    assert before.drained
    assert {"state", "currentConfig", "desiredDrain"} <= after.changes(before)
    # Without a disruption there is no drain: the uncordon of before is still the last request.
    node.set_target(NEXT, {APP: "1", FREE: "2"})
    node.wait_complete(NEXT)
    assert site.text(FREE) == "2"
    assert site.machine.boot_count == site.boots + 1
    assert not site.was(key.NodeState.DEGRADED)
