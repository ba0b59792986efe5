"""Names, credentials and settings that come after the agent has started, or change later."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.commands import status
from tests.integration.site import NODE, USER, Options, Site
from tests.waiting import wait_until
from treenail.kube.api_client import Json
from treenail.kube.resources import NODES
from treenail.log import MessageId
from treenail_lab.apiserver.access.certificates import render_kubeconfig

pytestmark = pytest.mark.integration

OTHER = "n8"
PEM = "var/lib/kubelet/pki/kubelet-client-current.pem"


@pytest.fixture(scope="module")
def options() -> Options:
    return Options(agent=(sys.executable, "-m", "tests.fakes.unnamed_agent"))


class Names:
    """The sources of the Node's name on the site's machine; each method replaces one."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._kubeconfig = self.place("var/lib/kubelet/kubeconfig")
        self._good = self._kubeconfig.read_text()

    def place(self, path: str) -> Path:
        place = self._site.machine.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def name_host(self, name: str) -> None:
        self.place("proc/sys/kernel/hostname").write_text(f"{name}\n")

    def write_kubeconfig(self, text: str) -> None:
        fresh = self._kubeconfig.with_name("kubeconfig.new")
        fresh.touch(mode=0o600)
        fresh.write_text(text)
        fresh.replace(self._kubeconfig)

    def use_certificate(self) -> None:
        self.write_kubeconfig(self._good)

    def use_no_kubeconfig(self) -> None:
        self._kubeconfig.unlink()

    def use_token(self) -> None:
        server = self._site.server
        self.write_kubeconfig(
            render_kubeconfig(
                server=server.url,
                authority=server.ca_file.read_bytes(),
                user=USER,
                token=server.issue_token(USER, ["system:nodes"]),
            )
        )

    def use_missing_file(self) -> None:
        """Name a certificate that the kubelet has not received yet."""
        document = json.loads(self._good)
        document["users"][0]["user"] = {
            "client-certificate": f"/{PEM}",
            "client-key": f"/{PEM}",
        }
        self.write_kubeconfig(json.dumps(document))

    def use_nothing_else(self) -> None:
        self.name_host("")
        self.use_certificate()


@pytest.fixture
def names(site: Site) -> Names:
    return Names(site)


def waits(site: Site, sentence: str) -> bool:
    found = site.lab.read_live_status(NODE).get("apiServer")
    return isinstance(found, dict) and sentence in found["problem"]


Step = Callable[[Names], None]


# The boot's kubeconfig, the sentence, and what comes after it.
@pytest.mark.parametrize(
    ("at_boot", "sentence", "later", "is_killed"),
    [
        (Names.use_token, "the host name 'localhost' is a placeholder", None, False),
        (Names.use_token, "the host name 'localhost' is a placeholder", None, True),
        (Names.use_no_kubeconfig, "kubeconfig: No such file", Names.use_certificate, True),
        (Names.use_missing_file, f"cannot use /{PEM}", Names.use_certificate, False),
    ],
)
def test_update_survives_a_name_that_comes_after_the_boot(
    site: Site,
    names: Names,
    at_boot: Step,
    sentence: str,
    later: Step | None,
    *,
    is_killed: bool,
) -> None:
    goal = site.goal()

    def boot(_: object) -> None:
        names.name_host("localhost")
        at_boot(names)

    site.machine.on_boot = boot
    site.ask(goal)
    wait_until(lambda: waits(site, sentence), limit_s=20.0)
    site.machine.on_boot = lambda _: None
    if is_killed:
        starts = site.machine.agent.pid
        site.machine.kill_agent()
        wait_until(lambda: site.machine.agent.pid != starts and waits(site, sentence))
    (later or (lambda names: names.name_host(NODE)))(names)
    site.settle(goal, limit_s=20.0)
    assert not site.messages(MESSAGE_ID=MessageId.HEALTH_CHECK_FAILED)
    names.use_nothing_else()
    site.settle(goal)


def test_node_in_service_finds_its_name_after_a_reboot(site: Site, names: Names) -> None:
    names.name_host("localhost")
    names.use_token()
    # The certificate has named the Node, and it is gone: no reason to leave the Node.
    wait_until(lambda: any(text.startswith(f"staying Node {NODE}") for text in site.messages()))
    assert site.lab.read_live_status(NODE)["node"] == NODE
    site.machine.reboot()
    wait_until(lambda: waits(site, "the host name 'localhost' is a placeholder"), limit_s=20.0)
    screen = " ".join(status(site).stdout.split())
    assert "waiting for the name of this Node: the host name 'localhost'" in screen
    names.name_host(NODE)
    site.reach(site.goal())
    names.use_nothing_else()
    site.reach(site.goal())


def test_certificate_of_another_node_moves_the_agent(site: Site, names: Names) -> None:
    node: Json = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": OTHER}}
    site.lab.client.create(NODES, node)
    names.name_host(NODE)
    names.write_kubeconfig(site.server.write_node_kubeconfig(OTHER).read_text())
    wait_until(lambda: site.lab.read_live_status(NODE).get("node") == OTHER)
    note = f"by the client certificate, not the host name {NODE}"
    assert f"{OTHER} ({note})" in " ".join(status(site).stdout.split())
    wait_until(lambda: f"this machine is Node {OTHER} {note}" in site.messages())
    names.use_nothing_else()
    wait_until(lambda: site.lab.read_live_status(NODE).get("node") == NODE)
    site.lab.client.delete(NODES, OTHER)


def test_changed_settings_hold_without_a_restart(site: Site) -> None:
    file = site.machine.root / "etc/treenail/agent.toml"
    before = file.read_text()
    pid = site.machine.agent.pid
    goal = site.goal()
    with site.drains_held():
        site.ask(goal)
        wait_until(lambda: site.phase() == "draining")
        file.write_text("drian = 1\n")
        wait_until(lambda: any("unknown setting drian" in text for text in site.messages()))
        assert (site.phase(), site.machine.agent.pid) == ("draining", pid)
        file.write_text('log_level = "debug"\n' + before)
        wait_until(lambda: any("decided: " in text for text in site.messages()))
        assert (site.phase(), site.machine.agent.pid) == ("draining", pid)
        file.write_text(before)
    site.settle(goal)
