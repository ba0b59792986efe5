"""A node's credential is for its own Node."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.commands import running, status
from tests.integration.site import NODE, Site
from tests.waiting import wait_until
from treenail.errors import ForbiddenError
from treenail.kube.api_client import Json
from treenail.kube.resources import NODES

pytestmark = pytest.mark.integration

OTHER = "n2"


def test_credential_of_second_node_cannot_change_first_node(site: Site) -> None:
    site.lab.client.create(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": OTHER}})
    second = site.lab.open_client(site.server.write_node_kubeconfig(OTHER))
    wish: Json = {"metadata": {"annotations": {"test": "x"}}}
    second.patch(NODES, OTHER, wish)
    cordon: Json = {"spec": {"unschedulable": True}}
    label: Json = {"metadata": {"labels": {"a": "b"}}}
    for body in (wish, cordon, label):
        with pytest.raises(ForbiddenError, match=OTHER):
            second.patch(NODES, NODE, body)
    with pytest.raises(ForbiddenError):
        second.delete(NODES, NODE)
    assert "test" not in site.notes()
    assert not site.cordoned()


@contextmanager
def agent(site: Site, name: str, kubeconfig: Path | None = None) -> Iterator[None]:
    """Within, an agent runs under this name in place of the right one."""
    arguments = ["run", "--root", str(site.machine.root), "--node-name", name]
    if kubeconfig is not None:
        place = site.machine.root / "etc/kubeconfig"
        place.write_text(kubeconfig.read_text())
        place.chmod(0o600)
        arguments += ["--kubeconfig", "/etc/kubeconfig"]
    site.machine.stop_agent()
    try:
        with running(site, *arguments):
            yield
    finally:
        site.machine.start_agent()


def test_agent_with_wrong_node_name_uses_that_of_its_certificate(site: Site) -> None:
    with agent(site, "n7"):
        note = "n1 by the client certificate, not the setting node_name n7"
        wait_until(lambda: [text for text in site.messages() if note in text])
        screen = " ".join(status(site).stdout.split())
        assert "n1 (by the client certificate, not the setting node_name n7)" in screen


def test_agent_without_node_reports_it_and_starts_when_node_exists(site: Site) -> None:
    with agent(site, "n8", site.server.write_node_kubeconfig("n8")):
        wait_until(lambda: [text for text in site.messages() if "Node n8 does not exist" in text])
        shown = "API server +reachable since .*: Node n8 does not exist"
        wait_until(lambda: re.search(shown, status(site).stdout))
        node: Json = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n8"}}
        site.lab.client.create(NODES, node)
        wait_until(lambda: "does not exist" not in status(site).stdout)
