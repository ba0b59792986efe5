"""The hand-over on the lab's API server, between two registries with TLS and logins."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builder.base_image import needs_busybox
from tests.builder.sandboxing import needs_buildah
from tests.controllers.handover.handover_site import HandoverSite, open_handover
from tests.controllers.image_build.site import MovableClock
from tests.installer.registries import needs_skopeo, open_client, run_skopeo
from tests.registry.images import make_client
from tests.registry.real_registry import (
    PULLER,
    PUSHER,
    FaultKind,
    RegistryFault,
    RegistryService,
    lab_registry,
    needs_docker_registry,
)
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.builder.images.copies import ImageCopier, Place
from treenail.controllers.handover.handover_objects import HANDOVER_SECRET
from treenail.kube.resources import (
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    SECRETS,
    get_object,
)
from treenail.oci_content import compute_digest

__all__ = ["lab_registry"]
pytestmark = [pytest.mark.integration, needs_docker_registry]
TEXT = "FROM configs AS final\nRUN echo built > /usr/lib/built\n"


@pytest.fixture
def site(tmp_path: Path, lab_registry: RegistryService) -> Iterator[HandoverSite]:
    with open_handover(tmp_path, lab_registry) as found:
        yield found


def has_image(site: HandoverSite) -> bool:
    client = make_client(site.cluster.registry, PULLER)
    try:
        return client.head_manifest("os/node", site.image.digest) is not None
    finally:
        client.close()


@needs_skopeo
def test_image_is_handed_over_and_nodes_drop_the_bootstrap_registry(
    site: HandoverSite, tmp_path: Path
) -> None:
    site.add_master("master-0")
    with site.controller() as wire:
        site.publish()
        result = site.wait_result()
        assert result.digests == {"master": site.image.digest}
        assert result.registry == site.registry.address
        wait_until(lambda: not site.has_secret(), limit_s=20.0)
        assert site.find_condition()[:2] == ("True", "HandedOver")
        assert site.notes("master-0")[key.REMOVE_BOOTSTRAP_REGISTRY] == site.registry.address
        # A machine that joins late is asked, too.
        site.add_master("master-1")
        wait_until(lambda: key.REMOVE_BOOTSTRAP_REGISTRY in site.notes("master-1"), limit_s=20.0)
        assert [each for each in wire.writes if each.startswith("PATCH /api/v1/nodes")] == [
            "PATCH /api/v1/nodes/master-0",
            "PATCH /api/v1/nodes/master-1",
        ]
    (build,) = site.cluster.builds()
    assert build["metadata"]["name"] == site.image.build_name
    assert site.cluster.build_state()[:2] == ("Succeeded", "BuiltAtInstall")
    assert site.cluster.image("master") == site.image.pull_spec
    registry = site.cluster.registry
    (tmp_path / "auth.json").write_bytes(registry.make_auth_json(PULLER))
    raw = run_skopeo(
        "inspect", "--raw", f"--authfile={tmp_path / 'auth.json'}",
        f"--cert-dir={registry.ca_file.parent}", f"docker://{site.image.pull_spec}",
    )  # fmt: skip
    assert compute_digest(raw.stdout.encode()) == site.image.digest, raw.stderr


def test_build_controller_builds_and_writes_nothing_after_the_adoption(site: HandoverSite) -> None:
    with site.controller(), site.cluster.controller() as wire:
        site.publish()
        site.wait_result()
        # A change that concerns no image makes the build controller look at the pool.
        site.cluster.annotate("master", {"example/touched": "1"})
        site.cluster.add_node("master-9", "amd64", pool="master")
    assert site.cluster.jobs() == []
    (build,) = site.cluster.builds()
    assert build["metadata"]["name"] == site.image.build_name
    # It may annotate the MachineOSConfig first, with the same values.
    assert not [each for each in wire.writes if "machineosbuilds" in each or "/jobs" in each]


@needs_buildah
@needs_busybox
@pytest.mark.parametrize(
    "has_build", [True, pytest.param(False, marks=pytest.mark.long)], ids=["build", "deleted"]
)
def test_first_change_of_the_config_alone_starts_no_job(
    tmp_path: Path, lab_registry: RegistryService, has_build: bool
) -> None:
    with open_handover(tmp_path, lab_registry, text=TEXT) as site:
        with site.controller():
            site.publish()
            site.wait_result()
        if not has_build:
            site.client.delete(MACHINEOSBUILDS, site.image.build_name)
        # The secret that the next pull of the base needs is there, as after prepare.
        site.cluster.put_secret("pull")
        with site.cluster.controller():
            changed = change_rendered_config(site)
            image = site.cluster.wait_image("master", but=site.image.pull_spec, limit_s=60.0)
        assert site.cluster.jobs() == []
        assert image.startswith(f"{lab_registry.host}/os/node@")
        (build,) = [
            each
            for each in site.cluster.builds()
            if each["spec"]["machineConfig"]["name"] == changed
        ]
        (system,) = site.image.system_images
        assert build["metadata"]["annotations"][key.SYSTEM_IMAGE] == system


def change_rendered_config(site: HandoverSite) -> str:
    """Give the pool a rendered config with another file; return its name."""
    pool: Any = site.client.get(MACHINECONFIGPOOLS, "master")
    before: Any = site.client.get(MACHINECONFIGS, pool["spec"]["configuration"]["name"])
    files = before["spec"]["config"]["storage"]["files"]
    files[0]["contents"]["source"] = "data:,changed"
    name = "rendered-master-" + "c" * 32
    metadata = {"name": name, "annotations": before["metadata"].get("annotations", {})}
    site.client.create(MACHINECONFIGS, {**before, "metadata": metadata})
    site.cluster.set_config("master", name)
    return name


def test_present_objects_of_users_are_not_replaced(site: HandoverSite) -> None:
    site.cluster.add_image_config(
        "master", annotations={"example/own": "1"}, baseImagePullSecret={"name": "own"}
    )
    before = site.image_config()["spec"]
    with site.controller():
        site.publish()
        site.wait_result()
    found = site.cluster.image_config("master")
    assert found["spec"] == before
    assert found["metadata"]["annotations"]["example/own"] == "1"


def test_refused_push_is_reported_until_the_login_is_corrected(site: HandoverSite) -> None:
    site.cluster.put_secret("push", PULLER)
    with site.controller(clock=MovableClock()) as _:
        site.publish()
        message = site.wait_condition("PushDenied")
        assert "renderedImagePushSecret" in message
        assert site.cluster.registry.passwords[PULLER] not in message
        assert site.find_result() is None
        assert not has_image(site)
        site.cluster.put_secret("push")
        site.wait_result()
    assert has_image(site)


def test_login_that_is_corrected_in_the_install_directory_reaches_the_cluster(
    site: HandoverSite,
) -> None:
    site.client.delete(SECRETS, "push", namespace=site.cluster.namespace)
    site.install.pusher = PULLER
    site.install.write()
    with site.controller():
        site.publish()
        site.wait_condition("PushDenied")
        site.install.pusher = PUSHER
        site.install.write()
        site.client.delete(SECRETS, HANDOVER_SECRET, namespace=site.namespace)
        site.publish()
        site.wait_result()
    assert has_image(site)


def test_image_that_nodes_cannot_pull_is_reported(site: HandoverSite) -> None:
    site.cluster.put_secret("global-pull-secret-copy", PULLER, host="elsewhere.example")
    with site.controller():
        site.publish()
        message = site.wait_condition("PullLoginRefused")
        assert site.image.pull_spec in message
        assert site.find_result() is None
        site.cluster.put_secret("global-pull-secret-copy", PULLER)
        site.wait_result()


def test_pool_without_a_rendered_config_is_named_until_it_has_one(site: HandoverSite) -> None:
    configuration = get_object(site.client.get(MACHINECONFIGPOOLS, "master"), "spec")[
        "configuration"
    ]
    with site.controller():
        site.client.patch(MACHINECONFIGPOOLS, "master", {"spec": {"configuration": None}})
        site.publish()
        message = site.wait_condition("ClusterUnreadable")
        assert message.startswith("pool master has no rendered config yet")
        body: Json = {"spec": {"configuration": configuration}}
        site.client.patch(MACHINECONFIGPOOLS, "master", body)
        site.wait_result()


def test_bootstrap_registry_that_is_gone_is_reported(site: HandoverSite) -> None:
    with site.controller():
        site.publish(address="127.0.0.1:9")
        message = site.wait_condition("BootstrapRegistryUnreachable")
        assert "skopeo copy --all --preserve-digests" in message
        assert site.find_result() is None


def test_image_that_was_copied_before_the_bootstrap_host_went_says_what_is_unverified(
    site: HandoverSite,
) -> None:
    # Another process copied it, and was killed before it recorded that.
    with open_client(site.registry, is_push=False) as source:
        target = make_client(site.cluster.registry)
        copier = ImageCopier(Place(source, "os/node"), Place(target, "os/node"))
        copier.copy_image(site.image.digest)
        target.close()
    with site.controller():
        site.publish(address="127.0.0.1:9")
        site.wait_result()
        assert "packages were not verified: " in site.wait_condition("HandedOver")


def test_final_registry_without_answer_is_retried_by_the_next_process(site: HandoverSite) -> None:
    site.cluster.registry.faults.add(RegistryFault(FaultKind.STATUS, method="PUT|PATCH", times=0))
    with site.controller():
        site.publish()
        wait_until(lambda: site.find_condition()[1].startswith("Registry"), limit_s=90.0)
    site.cluster.registry.faults.clear()
    with site.controller():
        site.wait_result()


def test_deadline_is_reported_and_the_hand_over_goes_on(site: HandoverSite) -> None:
    site.cluster.put_secret("push", PULLER)
    clock = MovableClock()
    with site.controller(clock=clock, deadline_s=60.0):
        site.publish()
        site.wait_condition("PushDenied")
        clock.move(120.0)
        site.cluster.annotate("master", {"example/touched": "1"})
        message = site.wait_condition("DeadlineExceeded")
        assert "--handover-deadline" in message
        assert "renderedImagePushSecret" in message
        assert 'image_handover_overdue{pool="master"} 1.0' in site.metrics.render_text()
        site.cluster.put_secret("push")
        clock.move(300.0)
        site.wait_result()
        assert 'image_handover_overdue{pool="master"} 0.0' in site.metrics.render_text()


def test_external_registry_is_only_looked_up(site: HandoverSite) -> None:
    with site.controller():
        site.publish(has_registry=False)
        site.wait_condition("ImageMissing")
        assert site.find_result() is None


def test_failed_build_of_the_cluster_is_replaced(site: HandoverSite) -> None:
    site.cluster.add_image_config("master")
    failed = site.install.read_object()
    metadata = failed["metadata"]
    assert isinstance(metadata, dict)
    document = {name: each for name, each in failed.items() if name != "status"}
    site.client.create(MACHINEOSBUILDS, document)
    status = {"conditions": [{
        "type": "Failed", "status": "True", "reason": "Failed", "message": "x",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]}  # fmt: skip
    site.client.patch(MACHINEOSBUILDS, metadata["name"], {"status": status}, subresource="status")
    with site.controller():
        site.publish()
        site.wait_result()
    assert site.cluster.build_state()[:2] == ("Succeeded", "BuiltAtInstall")


@pytest.mark.parametrize("dies_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("die_on", ["nodes/master-0", "/configmaps", HANDOVER_SECRET])
def test_kill_at_the_end_of_the_hand_over_loses_nothing(
    site: HandoverSite, die_on: str, dies_before: bool
) -> None:
    site.add_master("master-0")
    site.publish()
    with site.controller(die_on=die_on, dies_before=dies_before) as wire:
        wait_until(lambda: wire.is_dead, limit_s=60.0)
        # The host may stop once the result exists: by then the nodes must know.
        assert not site.find_result() or key.REMOVE_BOOTSTRAP_REGISTRY in site.notes("master-0")
        assert site.find_result() or site.has_secret()
    with site.controller():
        site.wait_result()
        wait_until(lambda: not site.has_secret(), limit_s=20.0)
    assert site.notes("master-0")[key.REMOVE_BOOTSTRAP_REGISTRY] == site.registry.address


@pytest.mark.parametrize("dies_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    "die_at", [0, 2, 4, 6, pytest.param(1, marks=pytest.mark.long),
               pytest.param(3, marks=pytest.mark.long), pytest.param(5, marks=pytest.mark.long)]
)  # fmt: skip
def test_kill_at_any_write_leads_to_the_same_cluster(
    site: HandoverSite, die_at: int, dies_before: bool
) -> None:
    site.add_master("master-0")
    site.publish()
    with site.controller(die_at=die_at, dies_before=dies_before) as wire:
        wait_until(lambda: wire.is_dead or not site.has_secret(), limit_s=60.0)
    with site.controller():
        site.wait_result()
        wait_until(lambda: not site.has_secret(), limit_s=20.0)
    assert site.find_condition()[:2] == ("True", "HandedOver")
    assert site.notes("master-0")[key.REMOVE_BOOTSTRAP_REGISTRY] == site.registry.address
    (build,) = site.cluster.builds()
    assert build["status"]["digestedImagePushSpec"] == site.image.pull_spec
    config = site.client.get(MACHINEOSCONFIGS, "master")
    assert isinstance(config["metadata"], dict)
    assert config["metadata"]["annotations"][key.CURRENT_BUILD] == site.image.build_name
    assert has_image(site)
