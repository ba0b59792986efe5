"""A node whose control plane runs in another cluster; the test plays the in-place upgrader."""

import json
import os

import pytest

from test_power import cut_repeatedly
from tests.fixtures.objects import make_object
from tests.integration.hosted_site import MODE, NAMESPACE, allow_read, write_target
from tests.records import write_record
from treenail.api import annotations as key
from treenail.api.hosted.node_mode import PATH
from treenail.config import node_paths
from treenail.kube.api_client import Json
from treenail.kube.resources import NAMESPACES
from treenail.update.state.ledger_record import Phase
from treenail_lab.cluster import build_rendered_config
from vmlab.configs import with_files
from vmlab.site import NODE, Goal, Site

APP = "/etc/treenail-vm.conf"
MORE_CUTS = int(os.environ.get("TREENAIL_VM_CUTS", "4"))


class HostedSite(Site):
    """A hosted node. The name of a goal's config is its hash; the file APP has the same text."""

    _configs: dict[str, Json]

    def join(self) -> None:
        self._configs = {}
        self.lab.client.create(NAMESPACES, make_object(NAMESPACES, NAMESPACE))
        allow_read(self.lab.client, f"system:node:{NODE}")
        self.first = self.make_goal("0" * 16, self._built.pull_spec)
        annotations = {
            key.CURRENT_CONFIG: self.first.config,
            key.DESIRED_CONFIG: self.first.config,
            key.STATE: key.NodeState.DONE,
        }
        served = json.dumps(self._configs[self.first.config])
        for path, text in (
            (APP, self.first.config),
            (PATH, json.dumps(MODE.to_json())),
            (node_paths.SERVED_CONFIG, served),
            (node_paths.FIRST_BOOT_ANNOTATIONS, json.dumps(annotations)),
        ):
            self.machine.sh(f"mkdir -p $(dirname {path}); cat > {path}", stdin=text)
        self.machine.sh("sync; systemctl restart kubelet; systemctl restart --no-block treenail")
        self.settle(self.first)

    def make_goal(self, value: str, pull_spec: str) -> Goal:
        """Return the goal of a hash, with this image."""
        spec = {"osImageURL": pull_spec, **with_files({APP: value})}
        self._configs[value] = build_rendered_config(f"rendered-{value}", spec)
        self.story.images[value] = pull_spec.partition("@")[2]
        return Goal(value, pull_spec, image_mode=False)

    def ask(self, goal: Goal) -> None:
        write_target(self.lab.client, goal.config, self._configs[goal.config])
        self.patch({"metadata": {"annotations": {key.DESIRED_CONFIG: goal.config}}})

    def cut_power(self) -> str:
        """Also check that the files are those of a config."""
        phase = super().cut_power()
        found = self.machine.sh(f"cat {APP}")
        assert found in self._configs, found
        return phase

    def is_at(self, goal: Goal) -> bool:
        return super().is_at(goal) and self.machine.sh(f"cat {APP}") == goal.config


@pytest.fixture
def kind() -> type[Site]:
    return HostedSite


@pytest.mark.limit(3600)
def test_hosted_node_survives_power_cuts(site: HostedSite, request: pytest.FixtureRequest) -> None:
    cuts = request.node.user_properties
    new = site.make_goal("1" * 16, site.image("2"))
    try:
        site.hold_back_writes()
        # The deployment is staged, and the drain is requested.
        site.drains.stop()
        site.ask(new)
        site.wait(lambda: site.notes().get(key.DESIRED_DRAIN), "a drain is requested", 300.0)
        cuts.append(("cut", site.cut_power()))
        assert cuts == [("cut", Phase.DRAINING)]
        assert (site.story.digest, site.notes()[key.CURRENT_CONFIG]) == (
            site.first.digest,
            site.first.config,
        )
        site.start_drains()
        site.settle(new)
        assert [boot.digest for boot in site.story.boots] == [site.first.digest, new.digest]
        cut_repeatedly(site, MORE_CUTS, request.node, (new, site.first))
    finally:
        write_record(
            "machines",
            what="power cuts in updates of a hosted node in a virtual machine, the first one "
            "between staging and the reboot",
            count=len(cuts),
            result="the old or the new config each time, and the Node says which"
            if len(cuts) == 1 + MORE_CUTS and site.story.violations == []
            else "not finished",
            command="make vm-test ARGS='-k hosted_node_survives'",
        )
