"""Owned pools on the API servers of two clusters, with ``hosted`` as a process that drains."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from tests.controllers.hosted.conduct.site import (
    _KINDS,
    ServerApi,
    list_events,
    open_management,
    put_kubeconfig,
)
from tests.controllers.hosted.conduct.test_controller_lab import LIMIT_S, install
from tests.controllers.hosted.conduct.world import OLD, POOL, Api
from tests.controllers.hosted.in_place.world import HASHES, NAMESPACE, OwnWorld
from tests.controllers.test_run import running
from tests.fixtures import hosted
from tests.fixtures.controllers import open_client
from tests.fixtures.objects import make_object
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.hosted import annotations as hosted_key
from treenail.controllers.drain import decide
from treenail.controllers.hosted.conduct.controller import _HYPERSHIFT_KEYS
from treenail.errors import ConflictError, NotFoundError
from treenail.kube.api_client import Client
from treenail.kube.resources import (
    HOSTEDCONTROLPLANES,
    NAMESPACES,
    PODDISRUPTIONBUDGETS,
    PODS,
)
from treenail_lab.apiserver.serving.server import LabServer

pytestmark = pytest.mark.integration
A, B = HASHES[:2]
ENABLE = ("--enable", "hosted", "--no-leader-election", "--agent-image", "quay.io/example/agent:1")
_KINDS.setdefault("pods", PODS)
Json = dict[str, Any]


class OwnSite(OwnWorld):
    """The actors of `OwnWorld` on two API servers; the process drains."""

    def __init__(self, management: ServerApi, guest: ServerApi, size: int) -> None:
        self.apis = (management, guest)
        super().__init__(size)
        scope = {"metadata": {"annotations": {hosted_key.SCOPE: "treenail"}}}
        management.change("hostedclusters", hosted.CLUSTER, scope)

    def make_apis(self) -> tuple[Api, Api]:
        return cast("tuple[Api, Api]", self.apis)

    def start(self) -> None:
        """The controller is a process of its own."""

    def _run_drainer(self, name: str) -> None:
        """The process does it."""

    def is_finished(self, target: str = A) -> bool:
        """Let the agents act once; return whether the pool has the target and nothing is left."""
        try:
            self.act()
        except (ConflictError, NotFoundError):
            return False
        return self.is_updated(target) and self.is_namespace_gone()

    def is_namespace_gone(self) -> bool:
        return self.apis[1].client.find(NAMESPACES, NAMESPACE) is None

    def add_pod(self, node: str, name: str, *, kept: bool = False) -> None:
        client = self.apis[1].client
        containers = [{"name": "c", "image": "i"}]
        spec: Json = {"nodeName": node, "containers": containers}
        pod = make_object(
            PODS, name, spec, namespace="default", labels={"app": name},
            annotations={"lab.treenail/stop-seconds": "0"},
        )  # fmt: skip
        client.create(PODS, pod, namespace="default")
        if kept:
            budget: Json = {"minAvailable": 1, "selector": {"matchLabels": {"app": name}}}
            document = make_object(PODDISRUPTIONBUDGETS, name, budget, namespace="default")
            client.create(PODDISRUPTIONBUDGETS, document, namespace="default")

    def list_pods(self) -> list[str]:
        found: Any = self.apis[1].client.list(PODS, namespace="default").items
        return sorted(pod["metadata"]["name"] for pod in found)


@pytest.fixture
def management(tmp_path: Path) -> Iterator[tuple[LabServer, Client]]:
    with open_management(tmp_path / "management") as found:
        install(found[0], "clusters-one")
        yield found


@contextmanager
def open_own_site(
    client: Client, directory: Path, size: int = 3, *, namespace: str = hosted.NAMESPACE,
    has_control_plane: bool = True,
) -> Iterator[tuple[OwnSite, LabServer]]:  # fmt: skip
    with ExitStack() as stack:
        server = stack.enter_context(LabServer(directory))
        guest = ServerApi(stack.enter_context(open_client(server.admin_kubeconfig)), namespace)
        guest.namespace = NAMESPACE
        api = ServerApi(client, namespace)
        for name in (namespace, api.namespace):
            if client.find(NAMESPACES, name) is None:
                client.create(NAMESPACES, make_object(NAMESPACES, name))
        text = server.admin_kubeconfig.read_text()
        if has_control_plane:
            api.put(HOSTEDCONTROLPLANES, hosted.make_control_plane())
            put_kubeconfig(api, text)
        else:
            put_kubeconfig(api, text, "one-kubeconfig", "value")
        site = OwnSite(api, guest, size)
        site.drain_keys = _HYPERSHIFT_KEYS if has_control_plane else decide.USUAL_KEYS
        yield site, server


def finish(site: OwnSite, target: str = A) -> None:
    wait_until(partial(site.is_finished, target), limit_s=LIMIT_S)
    assert {node.current_config for node in site.nodes().values()} == {target}


@pytest.mark.parametrize("has_control_plane", [True, False])
def test_process_updates_and_drains_nodes(
    management: tuple[LabServer, Client], tmp_path: Path, *, has_control_plane: bool
) -> None:
    server, client = management
    with open_own_site(client, tmp_path / "guest", has_control_plane=has_control_plane) as (
        site,
        _,
    ):
        for name in ("m0", "m1", "m2"):
            site.add_pod(name, f"web-{name}")
        before = {key.DESIRED_DRAIN: f"uncordon-{OLD}", key.LAST_APPLIED_DRAIN: f"uncordon-{OLD}"}
        site._annotate("m0", before)
        site.set_config(A)
        with running(server.admin_kubeconfig, tmp_path / "one.log", *ENABLE) as process:
            finish(site)
            # HyperShift's drainer would act on its own annotations.
            notes = site.notes("m0")
            kept = {name: notes[name] for name in before}
            assert (kept == before) is has_control_plane
            assert site.list_pods() == []
            assert not any(node.unschedulable for node in site.nodes().values())
            site.set_config(B)
            finish(site, B)
            assert process.end() == 0
        assert "Traceback" not in process.log.read_text()


def test_killed_process_continues(management: tuple[LabServer, Client], tmp_path: Path) -> None:
    server, client = management
    with open_own_site(client, tmp_path / "guest", 4) as (site, _):
        site.services = {"m1"}
        for name in ("m0", "m2", "m3"):
            site.set_service(name, None)
        site.set_config(A)

        def has_progress(count: int) -> bool:
            return site.is_finished(A) or len(site.timeline) > count

        for number in range(3):
            log = tmp_path / f"{number}.log"
            with running(server.admin_kubeconfig, log, *ENABLE) as process:
                wait_until(partial(has_progress, number), limit_s=LIMIT_S)
                process.end(signal.SIGKILL)
        with running(server.admin_kubeconfig, tmp_path / "last.log", *ENABLE):
            finish(site)
        assert sorted(site.timeline) == [(f"m{number}", A) for number in range(4)]


def test_drain_ends_after_the_timeout_and_names_the_pods_left(
    management: tuple[LabServer, Client], tmp_path: Path
) -> None:
    server, client = management
    with open_own_site(client, tmp_path / "guest", 1) as (site, _):
        site.add_pod("m0", "kept", kept=True)
        timeout = {"spec": {"nodeDrainTimeout": "3s"}}
        site.management.change("nodepools", POOL, timeout)
        site.set_config(A)
        with running(server.admin_kubeconfig, tmp_path / "one.log", *ENABLE):
            finish(site)
            events = wait_until(lambda: list_events(client), limit_s=LIMIT_S)
        [text] = [text for reason, text in events if reason == "DrainTimedOut"]
        assert "node m0: the drain ended after 3 s" in text
        assert text.endswith("default/kept")
        record = site.management.objects["configmaps", "treenail-rollouts"]["data"][POOL]
        assert "DrainTimedOut" in record
        assert site.list_pods() == ["kept"]


def test_hosted_cluster_that_is_down_delays_no_other_update(
    management: tuple[LabServer, Client], tmp_path: Path
) -> None:
    server, client = management
    with (
        open_own_site(client, tmp_path / "bad") as (bad, bad_guest),
        open_own_site(client, tmp_path / "good", namespace="other") as (good, _),
    ):
        bad_guest.stop()
        bad.set_config(A)
        good.set_config(A)
        with running(server.admin_kubeconfig, tmp_path / "one.log", *ENABLE):
            finish(good)
            assert not bad.is_updated(A)
            bad_guest.start()
            finish(bad)


def test_deleted_pool_leaves_nothing_in_the_hosted_cluster(
    management: tuple[LabServer, Client], tmp_path: Path
) -> None:
    server, client = management
    with open_own_site(client, tmp_path / "guest") as (site, _):
        site.is_stuck = {"m0", "m1", "m2"}
        site.set_config(A)
        with running(server.admin_kubeconfig, tmp_path / "one.log", *ENABLE):
            wait_until(lambda: not site.is_namespace_gone(), limit_s=LIMIT_S)
            del site.management.objects["nodepools", POOL]
            wait_until(site.is_namespace_gone, limit_s=LIMIT_S)


def test_cluster_of_another_scope_is_left_alone(
    management: tuple[LabServer, Client], tmp_path: Path
) -> None:
    server, client = management
    with (
        open_own_site(client, tmp_path / "guest") as (site, guest),
        open_own_site(client, tmp_path / "good", 1, namespace="other") as (good, _),
    ):
        scope = {"metadata": {"annotations": {hosted_key.SCOPE: "hypershift"}}}
        site.management.change("hostedclusters", hosted.CLUSTER, scope)
        site.set_config(A)
        good.set_config(A)
        before = guest.count_requests()
        with running(server.admin_kubeconfig, tmp_path / "one.log", *ENABLE):
            finish(good)
        assert guest.count_requests() == before
