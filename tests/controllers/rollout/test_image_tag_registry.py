"""A pool whose image is a tag of a real registry: watches, logins, CAs and agents of the lab."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.controllers.image_build.site import BuildSite, open_site
from tests.controllers.rollout.agents import Agents, add_nodes
from tests.fixtures.controllers import CLOCK, open_client, run_controllers
from tests.fixtures.objects import add_pool
from tests.registry.real_registry import RegistryService
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.cli.controller.run.rollout import make_tag_source
from treenail.controllers.rollout.controller import RolloutController
from treenail.controllers.rollout.external_gates import GateClient
from treenail.controllers.rollout.reconcile import RolloutSettings
from treenail.controllers.runtime.web import WebClient
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.resources import EVENTS, MACHINECONFIGPOOLS, NODES

pytestmark = [pytest.mark.integration]
LIMIT_S = 30


@pytest.fixture
def site(tmp_path: Path, lab_registry: RegistryService) -> Iterator[BuildSite]:
    with open_site(tmp_path, lab_registry) as found:
        yield found


@contextmanager
def rollout(site: BuildSite) -> Iterator[None]:
    """Run the rollout controller as the command does."""
    with open_client(site.kubeconfig) as client:
        controller = RolloutController(
            client,
            CLOCK,
            GateClient(WebClient()),
            EventRecorder(client, "treenail-rollout", "here", CLOCK),
            RolloutSettings(),
            tags=make_tag_source(client, CLOCK, lambda: site.namespace),
        )
        with run_controllers(client, controller):
            yield


def booted(site: BuildSite) -> set[str]:
    """The images that the nodes report."""
    found: list[Any] = list(site.client.list(NODES).items)
    return {each["metadata"]["annotations"].get(key.CURRENT_OS_IMAGE, "") for each in found}


def events(site: BuildSite) -> set[str]:
    return {str(each.get("reason")) for each in site.client.list(EVENTS, namespace="default").items}


def test_nodes_boot_the_digest_of_the_tag_and_follow_it(site: BuildSite) -> None:
    first = site.move_tag("stable", "1", "os/node")
    tag = f"{site.registry.host}/os/node:stable"
    add_nodes(site.client, ["n0", "n1", "n2"], "rendered-worker-0")
    spec = {"name": tag, "follow": True}
    add_pool(site.client, "worker", "rendered-worker-0", maxUnavailable=3, osImageTag=spec)
    with Agents(site.client):
        with rollout(site):
            wait_until(lambda: booted(site) == {first}, limit_s=LIMIT_S)
            wait_until(
                lambda: site.pool_condition("Updated")[0] == "True",
                limit_s=LIMIT_S,
            )
        assert site.pool_condition("OSImageResolved")[:2] == ("True", "Resolved")
        second = site.move_tag("stable", "2", "os/node")
        # A controller that starts asks once, then every quarter of an hour.
        with rollout(site):
            wait_until(lambda: booted(site) == {second}, limit_s=LIMIT_S)
            wait_until(lambda: "ImageTagMoved" in events(site), limit_s=LIMIT_S)
        site.move_tag("stable", "1", "os/node")
        with rollout(site):
            wait_until(
                lambda: site.pool_condition("OSImageResolved")[1] == "TagMovedBack",
                limit_s=LIMIT_S,
            )
            assert booted(site) == {second}
            assert site.pool_condition("Updated")[0] == "True"
    found: Any = site.client.get(MACHINECONFIGPOOLS, "worker")
    status = found["status"]["osImageTag"]
    assert (status["tag"], status["image"], status["earlier"]) == (tag, second, [first])
