"""The controller ``hosted`` as a process, on the API servers of two clusters."""

import signal
from base64 import b64encode
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.controllers.hosted.conduct.site import (
    HostedSite,
    ServerApi,
    list_events,
    open_management,
    open_site,
    put_kubeconfig,
)
from tests.controllers.hosted.conduct.world import NEW, POOL
from tests.controllers.installed import account_kubeconfig, apply, denied
from tests.controllers.test_run import running
from tests.fixtures import hosted
from tests.waiting import wait_until
from treenail.kube.api_client import Client
from treenail.kube.resources import HOSTEDCONTROLPLANES, NODES
from treenail.manifests.installation import InstallOptions, build_documents
from treenail_lab.apiserver.serving.faults import DelayFault
from treenail_lab.apiserver.serving.server import LabServer

pytestmark = pytest.mark.integration
ENABLE = ("--enable", "hosted")
LIMIT_S = 30.0
PLANES = ("clusters-one", "other-one")


def install(server: LabServer, *namespaces: str) -> Path:
    """Apply the manifests; return the kubeconfig of the controller's account."""
    planes = dict.fromkeys(namespaces, "one")
    options = InstallOptions(("hosted",), control_planes=planes)
    apply(server, build_documents(options))
    return account_kubeconfig(server)


@pytest.fixture
def management(tmp_path: Path) -> Iterator[tuple[LabServer, Client]]:
    with open_management(tmp_path / "management") as found:
        yield found


def finish(site: HostedSite, target: str = NEW) -> None:
    wait_until(lambda: site.is_done(target), limit_s=LIMIT_S)


@pytest.mark.parametrize("kind", ["InPlace", "Replace"])
def test_process_conducts_with_the_printed_permissions(
    management: tuple[LabServer, Client], kind: str, tmp_path: Path
) -> None:
    server, client = management
    with open_site(client, tmp_path / "guest", kind) as (site, _):
        kubeconfig = install(server, PLANES[0])
        site.set_policy(canary={"nodes": 1}, maxFailures=0)
        site.set_target(NEW)
        with running(kubeconfig, tmp_path / "one.log", *ENABLE) as process:
            finish(site)
            wait_until(lambda: site.find_message("Updated", "All nodes are"), limit_s=LIMIT_S)
            assert process.end() == 0
        log = process.log.read_text()
        assert "Traceback" not in log
        assert denied(server) == frozenset()
        if kind == "InPlace":
            document: Any = client_of(site).get(NODES, "m0")
            managers = [each["manager"] for each in document["metadata"]["managedFields"]]
            assert "treenail-hosted" in managers


def client_of(site: HostedSite) -> Client:
    return site.apis[1].client


def test_killed_process_continues_and_gives_each_node_its_target_once(
    management: tuple[LabServer, Client], tmp_path: Path
) -> None:
    server, client = management
    with open_site(client, tmp_path / "guest", size=5) as (site, _):
        kubeconfig = install(server, PLANES[0])
        site.set_policy()
        site.set_target(NEW)
        for number in range(3):
            log = tmp_path / f"{number}.log"
            with running(kubeconfig, log, *ENABLE, "--no-leader-election") as process:
                wait_until(partial(has_progress, site, number), limit_s=LIMIT_S)
                process.end(signal.SIGKILL)
        with running(kubeconfig, tmp_path / "last.log", *ENABLE, "--no-leader-election"):
            finish(site)
        nodes: Any = client_of(site).list(NODES).items
        for node in nodes:
            entries = [
                each for each in node["metadata"]["managedFields"]
                if each["manager"] == "treenail-hosted"
            ]  # fmt: skip
            assert len(entries) == 1


def has_progress(site: HostedSite, count: int) -> bool:
    return site.is_done() or site.count_at(NEW) > count


@pytest.mark.parametrize("problem", ["down", "slow", "another CA", "no role"])
def test_cluster_that_does_not_answer_delays_no_other(
    management: tuple[LabServer, Client], problem: str, tmp_path: Path
) -> None:
    """Both clusters have a pool of the same name, in two namespaces."""
    server, client = management
    with (
        open_site(client, tmp_path / "bad") as (bad, bad_guest),
        open_site(client, tmp_path / "good", namespace="other", size=4) as (good, _),
    ):
        kubeconfig = install(server, *PLANES[problem == "no role" :])
        good.set_policy()
        match problem:
            case "down":
                bad_guest.stop()
            case "slow":
                bad_guest.inject_fault(DelayFault(60.0))
            case "another CA":
                text = bad_guest.admin_kubeconfig.read_text()
                put_kubeconfig(bad.apis[0], swap_authority(text, tmp_path / "good"))
            case _:
                pass
        bad.set_target(NEW)
        good.set_target(NEW)
        with running(kubeconfig, tmp_path / "one.log", *ENABLE) as process:
            finish(good)
            if problem == "no role":
                [(reason, text)] = set(wait_until(lambda: list_events(client), limit_s=LIMIT_S))
                assert reason == "CannotConduct"
                assert "treenail-controller manifests --only hosted" in text
            elif problem != "slow":
                message = wait_until(
                    lambda: bad.find_message("Updating", "hosted cluster"), limit_s=LIMIT_S
                )
                assert message
            assert process.get("/readyz") == "ok\n"
            if problem == "down":
                bad_guest.start()
                finish(bad)


def swap_authority(kubeconfig: str, directory: Path) -> str:
    """The kubeconfig with the certificate authority of another server."""
    document = yaml.safe_load(kubeconfig)
    encoded = b64encode((directory / "ca.crt").read_bytes()).decode()
    document["clusters"][0]["cluster"]["certificate-authority-data"] = encoded
    return str(yaml.safe_dump(document))


def test_kubeconfig_of_cluster_api_is_the_second_choice(
    management: tuple[LabServer, Client], tmp_path: Path
) -> None:
    server, client = management
    with open_site(client, tmp_path / "guest") as (site, guest):
        kubeconfig = install(server, PLANES[0])
        api: ServerApi = site.apis[0]
        client.patch(
            HOSTEDCONTROLPLANES, hosted.CLUSTER, {"status": {"kubeConfig": None}},
            namespace=api.namespace, subresource="status",
        )  # fmt: skip
        put_kubeconfig(api, guest.admin_kubeconfig.read_text(), "one-kubeconfig", "value")
        put_kubeconfig(api, "unused")
        site.set_policy()
        site.set_target(NEW)
        with running(kubeconfig, tmp_path / "one.log", *ENABLE):
            finish(site)


def test_cluster_api_of_v1beta1_alone_is_read(tmp_path: Path) -> None:
    with (
        open_management(tmp_path / "management", "v1beta1") as (server, client),
        open_site(client, tmp_path / "guest", "Replace", version="v1beta1") as (site, _),
    ):
        kubeconfig = install(server, PLANES[0])
        site.set_policy()
        site.set_target(NEW)
        with running(kubeconfig, tmp_path / "one.log", *ENABLE):
            finish(site)


def test_pool_without_the_annotation_is_left_alone(
    management: tuple[LabServer, Client], tmp_path: Path
) -> None:
    server, client = management
    with open_site(client, tmp_path / "guest") as (site, guest):
        kubeconfig = install(server, PLANES[0])
        note = {"metadata": {"annotations": {"treenail.io/rollout-policy": None}}}
        site.management.change("nodepools", POOL, note)
        site.set_target(NEW)
        before = guest.count_requests()
        with running(kubeconfig, tmp_path / "one.log", *ENABLE) as process:
            wait_until(lambda: process.get("/readyz") == "ok\n", limit_s=LIMIT_S)
            assert guest.count_requests() == before
        assert "treenail-rollouts" not in str(site.management.list("configmaps"))
