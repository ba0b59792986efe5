"""The build controller while a cluster is installed, on the lab's API server."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controllers.image_build.site import CONTAINERFILE, BuildSite, MovableClock, open_site
from tests.registry.images import make_client, push_image
from tests.registry.real_registry import RegistryService, lab_registry
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.component_names import NAMESPACE
from treenail.api.machineosconfig import MachineOSConfig
from treenail.clocks import format_rfc3339
from treenail.controllers.handover.controller import InstallationGate
from treenail.controllers.handover.handover_objects import HandoverResult, build_result_configmap
from treenail.controllers.handover.image_mode import CONFIGMAP, ImageMode
from treenail.controllers.handover.image_mode_field import build_settings_configmap
from treenail.errors import AlreadyExistsError
from treenail.kube.api_client import Json
from treenail.kube.resources import (
    CONFIGMAPS,
    EVENTS,
    JOBS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    NAMESPACES,
)

__all__ = ["lab_registry"]
pytestmark = [pytest.mark.integration]


@pytest.fixture
def site(tmp_path: Path, lab_registry: RegistryService) -> Iterator[BuildSite]:
    with open_site(tmp_path, lab_registry) as found:
        yield found


def add_settings(site: BuildSite, settings: ImageMode | None = None) -> None:
    body: Json = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE},
    }
    with contextlib.suppress(AlreadyExistsError):
        site.client.create(NAMESPACES, body)
    document = build_settings_configmap(settings or ImageMode())
    site.client.create(CONFIGMAPS, document, namespace=NAMESPACE)


def list_builds(site: BuildSite) -> list[Json]:
    return list(site.client.list(MACHINEOSBUILDS).items)


def find_reason(site: BuildSite, name: str, kind: str = "ImageReady") -> str:
    found = MachineOSConfig.from_json(site.client.get(MACHINEOSCONFIGS, name))
    return next((each.reason for each in found.conditions if each.type == kind), "")


@pytest.mark.parametrize("pool", ["master", "arbiter"])
def test_first_build_of_the_control_plane_waits_for_the_installation(
    site: BuildSite, pool: str
) -> None:
    add_settings(site)
    site.add_pool(pool)
    site.add_image_config(pool)
    with site.controller():
        wait_until(lambda: find_reason(site, pool) == "WaitingForInstallation", limit_s=20.0)
        assert list_builds(site) == []
        site.client.delete(CONFIGMAPS, CONFIGMAP, namespace=NAMESPACE)
        site.annotate(pool, {"example/touched": "1"})
        assert site.wait_image(pool)


def test_first_build_waits_until_caches_show_the_adopted_build(site: BuildSite) -> None:
    add_settings(site)
    clock = MovableClock()
    completed = format_rfc3339(clock.now())
    result = build_result_configmap(HandoverResult({}, "", completed))
    site.client.create(CONFIGMAPS, result, namespace=NAMESPACE)
    hold = InstallationGate(site.client, clock)
    clock.move(20.0)
    assert "waiting for the image that the bootstrap host built" in hold.find_hold_reason("master")
    assert hold.find_hold_reason("worker") == ""
    clock.move(15.0)
    assert hold.find_hold_reason("master") == ""


def test_missing_secret_degrades_no_pool_that_waits_for_the_installation(site: BuildSite) -> None:
    add_settings(site)
    site.add_pool("master")
    site.add_image_config("master", renderedImagePushSecret={"name": "later"})
    with site.controller():
        wait_until(
            lambda: find_reason(site, "master", "Accepted") not in ("", "Accepted"), limit_s=20.0
        )
        assert find_reason(site, "master") == "WaitingForInstallation"
        assert site.pool_condition("ImageBuildDegraded", "master")[0] != "True"
        assert MachineOSConfig.from_json(site.image_config("master")).problem == ""
    assert [str(each["reason"]) for each in site.client.list(EVENTS).items] == []


@pytest.mark.parametrize("case", ["worker", "handed over", "disabled"])
def test_build_that_the_installation_does_not_make_begins(site: BuildSite, case: str) -> None:
    pool = "worker" if case == "worker" else "master"
    add_settings(site, ImageMode(is_enabled=case != "disabled"))
    if case == "handed over":
        result = build_result_configmap(HandoverResult({}, "", "2026-01-01T00:00:00Z"))
        site.client.create(CONFIGMAPS, result, namespace=NAMESPACE)
    site.add_pool(pool)
    site.add_image_config(pool)
    with site.controller():
        assert site.wait_image(pool)


def test_pre_built_image_is_served_and_the_next_config_is_built(site: BuildSite) -> None:
    client = make_client(site.registry)
    pushed = push_image(client, "user/os", "day1")
    client.close()
    image = f"{site.registry.host}/user/os@{pushed.digest}"
    site.add_pool()
    tagged = image.replace("@", ":day1@")
    site.add_image_config(annotations={key.PRE_BUILT_IMAGE: tagged})
    with site.controller():
        assert site.wait_image() == image
        (build,) = list_builds(site)
        assert build["status"]["digestedImagePushSpec"] == image
        found = MachineOSConfig.from_json(site.client.get(MACHINEOSCONFIGS, "worker"))
        assert key.PUSHED_IMAGES not in found.metadata.annotations
        site.add_config("rendered-worker-2", "y")
        site.set_config("worker", "rendered-worker-2")
        built = site.wait_image(but=image)
        assert built.startswith(f"{site.registry.host}/os/worker@")


@pytest.mark.parametrize("has_worker", [False, True])
def test_job_tolerates_the_control_plane_before_the_first_worker(
    site: BuildSite, has_worker: bool
) -> None:
    site.add_node("node-m", "amd64", pool="master")
    if has_worker:
        site.add_node("node-w", "amd64")
    site.add_pool()
    site.add_image_config(text=CONTAINERFILE)
    with site.controller():
        jobs = wait_until(
            lambda: list(site.client.list(JOBS, namespace=site.namespace).items), limit_s=20.0
        )
    tolerations = jobs[0]["spec"]["template"]["spec"].get("tolerations", [])
    assert {each["key"] for each in tolerations} == (
        set()
        if has_worker
        else {"node-role.kubernetes.io/master", "node-role.kubernetes.io/control-plane"}
    )
