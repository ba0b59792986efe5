"""Agent and controllers on a real API server, each with its own credentials and permissions."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.controllers.clusters import Place
from tests.fixtures.clusters import REAL
from tests.mco.nodes import LabNodes
from tests.node_access import NodeAccess
from tests.waiting import wait_until
from treenail_lab.images import make_image
from treenail_lab.lifetime.owner import owner

# A kube-controller-manager signs the certificate of the kubelet.
pytestmark = [pytest.mark.integration, pytest.mark.controllers]

LIMIT_S = 180.0


@dataclass(frozen=True, slots=True)
class Site:
    """A pool with one machine of the lab, whose agent has the credentials of its kubelet."""

    place: Place
    nodes: LabNodes
    node: str

    def is_at(self, config: str) -> bool:
        return self.nodes.is_at(self.node, config)


@pytest.fixture(params=[REAL])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    kubeconfig: Path = request.getfixturevalue("real_kubeconfig")
    place = Place(kubeconfig, tmp_path)
    with owner.temporary_directory() as directory:
        access = NodeAccess(kubeconfig, directory)
        node = f"{place.prefix}-n1"
        nodes = LabNodes(directory, access, [make_image("os/node", "1", 20_000_000)], [node])
        try:
            place.install()
            place.config("00")
            place.pool(
                nodeSelector={"matchLabels": {f"node-role.kubernetes.io/{place.prefix}": ""}}
            )
            with place.controllers():
                config = wait_until(place.rendered, limit_s=LIMIT_S)
                nodes.start(place.prefix, config)
                found = Site(place, nodes, node)
                wait_until(lambda: found.is_at(config), limit_s=LIMIT_S)
                yield found
        except BaseException:
            if nodes.machines:
                sys.stdout.write(nodes.read_story())
            raise
        finally:
            nodes.stop()
            for path in (
                "/api/v1/nodes",
                "/apis/machineconfiguration.openshift.io/v1/machineconfignodes",
            ):
                nodes.cluster.delete(f"{path}/{node}")
            place.remove()


def test_agent_follows_the_controllers_with_its_role_only(site: Site) -> None:
    place, machine = site.place, site.nodes.machines[site.node]
    boots, before = machine.boot_count, place.rendered()
    file = {"path": "/etc/treenail-test/a", "contents": {"source": "data:,hello"}, "mode": 0o600}
    ignition = {"ignition": {"version": "3.5.0"}, "storage": {"files": [file]}}
    place.config("50", config=ignition, kernelArguments=["nosmt"])
    wait_until(lambda: place.rendered() != before, limit_s=LIMIT_S)
    wait_until(lambda: site.is_at(place.rendered()), limit_s=LIMIT_S)
    assert (machine.root / "etc/treenail-test/a").read_text() == "hello"
    booted = machine.booted_deployment
    assert "nosmt" in booted.kernel_arguments
    assert machine.boot_count == boots + 1
    wait_until(lambda: place.condition("Updated").get("status") == "True", limit_s=LIMIT_S)
    wait_until(lambda: site.nodes.read_conditions(site.node)["Updated"] == "True", limit_s=LIMIT_S)
    # No request of the agent was refused.
    messages = [str(each["MESSAGE"]) for each in machine.read_journal()]
    assert [text for text in messages if "orbidden" in text] == []
