"""Pruning by the build controller: docker-registry loses only what nothing refers to."""

from pathlib import Path

import pytest

from tests.controllers.image_build.site import (
    CONTAINERFILE,
    BuildSite,
    open_site,
)
from tests.fixtures.objects import make_node
from tests.registry.images import (
    compute_diff_id,
    make_client,
    make_layer,
    push_image,
    push_index,
)
from tests.registry.real_registry import (
    FaultKind,
    RegistryFault,
    RegistryService,
    any_registry,
    lab_registry,
)
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.api.pullspec import parse_pull_spec
from treenail.controllers.image_build.build_objects import (
    MAX_PUSHED,
    PushedImage,
    add_pushed_images,
    encode_pushed_images,
    find_prune_candidates,
    find_pushed_images,
    read_pushed_images,
)
from treenail.controllers.image_build.layer_builder import RepositoryLock, RepositoryLocked
from treenail.controllers.image_build.pruner import read_candidates
from treenail.image.oci import documents as labels
from treenail.image.oci.documents import CONFIG_LAYER, CONTENT_KEY, IMAGE_CONFIG, SYSTEM_LAYER
from treenail.image.oci.prune import plan_pruning
from treenail.kube.resources import MACHINEOSBUILDS, MACHINEOSCONFIGS, NODES
from treenail.registry.client import RegistryClient
from treenail.registry.images import copy_blobs, resolve_image

__all__ = ["any_registry", "lab_registry"]
pytestmark = [pytest.mark.integration]

REPOSITORY = "os/worker"
DIGEST = f"sha256:{'a' * 64}"
BUILD = f"worker-{'b' * 32}"


def build_images(site: BuildSite, first: int, count: int) -> list[str]:
    """Build images of configs that differ in files only, one after the other."""
    found = []
    image = site.image()
    for number in range(first, first + count):
        site.add_config(f"rendered-worker-{number}", f"v{number}")
        site.set_config("worker", f"rendered-worker-{number}")
        image = site.wait_image(but=image)
        found.append(image)
    return found


def start(site: BuildSite) -> None:
    site.add_pool(config="rendered-worker-1")
    site.add_config("rendered-worker-1", "v1")
    site.add_image_config()


def is_present(site: BuildSite, image: str) -> bool:
    client = make_client(site.registry)
    try:
        return (
            client.head_manifest(REPOSITORY, parse_pull_spec(image, where="x").digest) is not None
        )
    finally:
        client.close()


def find_present(site: BuildSite, images: list[str]) -> set[str]:
    return {image for image in images if is_present(site, image)}


def find_built(site: BuildSite) -> set[str]:
    """Return the images of the present builds. Builds of the same second end in any order."""
    builds = [MachineOSBuild.from_json(each) for each in site.client.list(MACHINEOSBUILDS).items]
    return {each.pull_spec for each in builds} - {""}


def wait_pruned(site: BuildSite, images: list[str], *others: str) -> None:
    """Wait until only the images of builds and of others are left."""
    wait_until(
        lambda: (
            len(find_built(site)) == 4
            and find_present(site, images) == find_built(site) | set(others)
        ),
        limit_s=20,
    )


def read_config(site: BuildSite) -> MachineOSConfig:
    return MachineOSConfig.from_json(site.image_config())


def get_candidates(site: BuildSite) -> list[str]:
    """Return the recorded images that no build names any longer."""
    builds = [MachineOSBuild.from_json(each) for each in site.client.list(MACHINEOSBUILDS).items]
    return [each.image for each in find_prune_candidates(read_config(site), builds)]


def add_node(site: BuildSite, image: str) -> None:
    """Add a Node of another pool that runs an image."""
    node = make_node("other-0", role="other")
    node["metadata"]["annotations"] = {key.CURRENT_IMAGE: image, key.DESIRED_IMAGE: image}
    site.client.create(NODES, node)


def test_image_that_a_node_of_another_pool_has_stays(
    tmp_path: Path, any_registry: RegistryService
) -> None:
    with open_site(tmp_path, any_registry) as site:
        client = make_client(any_registry)
        foreign = push_image(client, REPOSITORY, "latest")
        start(site)
        with site.controller():
            images = [site.wait_image(), *build_images(site, 2, 3)]
            add_node(site, images[0])
            images += build_images(site, 6, 3)
            wait_pruned(site, images, images[0])
            wait_until(lambda: get_candidates(site) == [images[0]])
        assert client.head_manifest(REPOSITORY, foreign.digest)
        client.close()


def test_image_and_system_part_of_deleted_builds_are_deleted(site: BuildSite) -> None:
    kubelet = site.start_pool(CONTAINERFILE)
    image = ""
    systems, images = [], []
    with site.controller():
        for number in range(5):
            if number:
                files = [{"containerfileArch": "NoArch", "content": f"{CONTAINERFILE}#{number}\n"}]
                site.client.patch(MACHINEOSCONFIGS, "worker", {"spec": {"containerFile": files}})
            digest = kubelet.succeed(kubelet.wait_pod())
            systems.append(f"{site.registry.host}/{REPOSITORY}@{digest}")
            image = site.wait_image(but=image)
            images.append(image)
        wait_pruned(site, images)
        wait_until(lambda: len(find_present(site, systems)) == 4, limit_s=20)


def test_registry_that_refuses_deletion_is_reported_once(site: BuildSite) -> None:
    site.registry.faults.add(RegistryFault(FaultKind.STATUS, method="DELETE", status=405, times=0))
    start(site)
    with site.controller():
        images = [site.wait_image(), *build_images(site, 2, 4)]
        wait_until(lambda: site.find_events("ImagesNotPruned"), limit_s=20)
        images += build_images(site, 7, 2)
        wait_until(lambda: len(get_candidates(site)) == 3)
        status, reason, shown = site.condition("ImagesPruned")
    assert find_present(site, images) == set(images)
    (event,) = site.find_events("ImagesNotPruned")
    message = event["message"]
    assert message.startswith(f"cannot delete images of {REPOSITORY}: ")
    assert "@sha256:" not in message
    assert (status, reason) == ("False", "DeletionRefused")
    assert shown.startswith(f"{message}; permit the push login to delete")
    tried = [each for each in site.registry.front.requests if each[0] == "DELETE"]
    assert len(tried) == 1


def test_refusal_ends_when_the_registry_deletes_images(site: BuildSite) -> None:
    refused = RegistryFault(FaultKind.STATUS, method="DELETE", status=405, times=1)
    site.registry.faults.add(refused)
    start(site)
    with site.controller():
        images = [site.wait_image(), *build_images(site, 2, 4)]
        wait_until(lambda: site.condition("ImagesPruned")[0] == "False", limit_s=20)
        assert find_present(site, images) == set(images)
    with site.controller():
        wait_pruned(site, images)
        wait_until(lambda: site.condition("ImagesPruned")[:2] == ("True", "AsExpected"), limit_s=20)


def test_image_of_a_build_that_a_user_deleted_is_deleted(site: BuildSite) -> None:
    start(site)
    with site.controller():
        images = [site.wait_image(), *build_images(site, 2, 2)]
        # Not the newest ones: the image of the pool and the one before it stay.
        wait_until(lambda: len(read_pushed_images(read_config(site))) == 3)
        deleted = next(
            each["metadata"]["name"]
            for each in site.builds()
            if each["status"]["digestedImagePushSpec"] == images[0]
        )
        site.client.delete(MACHINEOSBUILDS, deleted)
        wait_until(lambda: get_candidates(site) == [images[0]])
        images += build_images(site, 5, 1)
        wait_until(lambda: find_present(site, images) == set(images[1:]), limit_s=20)
        wait_until(lambda: get_candidates(site) == [])


def test_unreadable_references_delete_nothing(
    site: BuildSite, caplog: pytest.LogCaptureFixture
) -> None:
    start(site)

    with site.controller(hidden="/machineconfignodes"):
        images = [site.wait_image(), *build_images(site, 2, 4)]
        wait_until(lambda: "cannot prune the images of worker" in caplog.text, limit_s=20)
    assert find_present(site, images) == set(images)
    with site.controller():
        wait_pruned(site, images)


@pytest.mark.parametrize("is_before", [True, pytest.param(False, marks=pytest.mark.long)])
def test_kill_between_marks_loses_no_image(site: BuildSite, is_before: bool) -> None:
    start(site)
    with site.controller():
        images = [site.wait_image(), *build_images(site, 2, 3)]
    # The writes of a build with the mark, the deletion of the oldest build and the end of the mark.
    for number in (5, 6, 7):
        config = f"rendered-worker-{10 + number}"
        site.add_config(config, config)
        before = site.image()
        with site.controller(die_at=number, dies_before=is_before) as wire:
            site.set_config("worker", config)
            wait_until(lambda wire=wire: wire.is_dead, limit_s=20)  # type: ignore[misc]
            assert_builds_have_images(site)
        with site.controller():
            wait_until(lambda before=before: site.image() != before, limit_s=20)  # type: ignore[misc]
            images.append(site.image())
            wait_pruned(site, images)
            wait_until(lambda: get_candidates(site) == [])
        assert_builds_have_images(site)


def assert_builds_have_images(site: BuildSite) -> None:
    builds = [MachineOSBuild.from_json(each) for each in site.client.list(MACHINEOSBUILDS).items]
    for each in builds:
        assert not each.pull_spec or is_present(site, each.pull_spec), each.name
    assert is_present(site, site.image())


def test_list_of_architectures_takes_its_instances_along(lab_registry: RegistryService) -> None:
    client = make_client(lab_registry)
    instances = {}
    for name in ("amd64", "arm64"):
        layer = make_layer({name: b"x"})
        labels = make_labels("worker", layer)
        instances[name] = push_image(
            client, "os/other", name, architecture=name, layers=[layer], labels=labels
        )
        found = resolve_image(client, "os/other", name, name)
        copy_blobs((found.config_blob, *found.layers), client, "os/other", client, REPOSITORY)
        # By its digest, without a tag.
        kind, content = found.manifest.media_type, found.manifest.content
        client.put_manifest(REPOSITORY, found.digest, kind, content)
    digest = push_index(client, instances, REPOSITORY, BUILD)
    pushed = PushedImage(f"{lab_registry.host}/{REPOSITORY}@{digest}", BUILD)
    amd, arm = (each.digest for each in instances.values())
    assert find_deletions(client, pushed, {}) == {digest, amd, arm}
    assert find_deletions(client, pushed, {arm: "Node worker-0"}) == set()
    # content and kind are those of the last architecture.
    client.put_manifest(REPOSITORY, "release", kind, content)
    assert find_deletions(client, pushed, {}) == {digest, amd}
    client.close()


def find_deletions(
    client: RegistryClient, image: PushedImage, references: dict[str, str]
) -> set[str]:
    """Return the digests that pruning would delete for the MachineOSConfig worker."""
    stored = read_candidates(client, REPOSITORY, "worker", [image.spec.digest], {})
    return {each.digest for each in plan_pruning(stored, references, []).deleted}


def make_labels(owner: str, layer: bytes) -> dict[str, str]:
    """Return the labels of an image that ends with this config layer."""
    return {IMAGE_CONFIG: owner, labels.BUILD: BUILD, CONFIG_LAYER: compute_diff_id(layer)}


def test_annotation_of_an_editor_deletes_no_image_of_others(
    site: BuildSite, lab_registry: RegistryService
) -> None:
    client = make_client(site.registry)
    layer, above = make_layer({"etc/config": b"x"}), make_layer({"etc/above": b"x"})
    own = make_labels("worker", layer)
    images = {
        "own": push_image(client, REPOSITORY, BUILD, layers=[layer], labels=own),
        "without labels": push_image(client, REPOSITORY, "x1", layers=[above]),
        "of another config": push_image(
            client, REPOSITORY, "x2", layers=[layer], labels=make_labels("other", layer)
        ),
        "that a user built on an own one": push_image(
            client, REPOSITORY, "x3", layers=[layer, above], labels=own
        ),
        "in another repository": push_image(client, "os/other", BUILD, layers=[layer], labels=own),
    }
    # Without their tags: nothing but the labels protects them.
    for name in ("x1", "x2", "x3"):
        moved = push_image(client, REPOSITORY, "latest", layers=[make_layer({name: b""})])
        content = client.get_manifest(REPOSITORY, moved.digest)
        client.put_manifest(REPOSITORY, name, content.media_type, content.content)
    hints = tuple(
        PushedImage(
            f"{site.registry.host}/{'os/other' if 'another r' in name else REPOSITORY}"
            f"@{image.digest}",
            BUILD,
        )
        for name, image in images.items()
    )
    site.add_pool()
    site.add_image_config(annotations={key.PUSHED_IMAGES: encode_pushed_images(hints)})
    with site.controller():
        site.wait_image()
        build_images(site, 2, 1)
        wait_until(lambda: get_candidates(site) == [], limit_s=20)
        left = {
            name
            for name, image in images.items()
            if client.head_manifest("os/other" if "another r" in name else REPOSITORY, image.digest)
        }
    client.close()
    assert images.keys() - left == {"own"}


def test_system_part_of_an_annotation_is_used_with_its_label_only(site: BuildSite) -> None:
    kubelet = site.start_pool(CONTAINERFILE)
    with site.controller():
        pod = kubelet.wait_pod()
    (build,) = site.builds()
    content_key = build["metadata"]["annotations"][key.CONTENT_KEY]
    client = make_client(site.registry)
    layer = make_layer({"etc/foreign": b"x"})
    wrong = {CONTENT_KEY: "0" * 16, SYSTEM_LAYER: compute_diff_id(layer)}
    foreign = push_image(client, REPOSITORY, "x", layers=[layer], labels=wrong)
    client.close()
    image = PushedImage(
        f"{site.registry.host}/{REPOSITORY}@{foreign.digest}", f"system-{content_key}"
    )
    site.client.delete(MACHINEOSBUILDS, build["metadata"]["name"])
    site.annotate("worker", {key.PUSHED_IMAGES: encode_pushed_images([image])})
    with site.controller():
        wait_until(
            lambda: kubelet.find_pods() and kubelet.find_pods()[0]["metadata"] != pod["metadata"],
            limit_s=20,
        )
        kubelet.succeed(kubelet.wait_pod())
        used = site.resolve(site.wait_image())
    assert compute_diff_id(layer) not in used.config.decode()


def test_marks_are_bounded_and_keep_their_order() -> None:
    known = tuple(
        PushedImage(f"quay.io/os/node@sha256:{number:064x}", BUILD) for number in range(MAX_PUSHED)
    )
    new = PushedImage(f"quay.io/os/node@{DIGEST}", BUILD)
    found = add_pushed_images(known, [new])
    assert found == (*known[1:], new)
    assert add_pushed_images(found, [new]) == found
    notes = {key.PUSHED_IMAGES: encode_pushed_images(found)}
    document = {"metadata": {"name": "worker", "annotations": notes}}
    assert read_pushed_images(MachineOSConfig.from_json(document)) == found


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"quay.io/os/node:latest":"x"}', f'{{"quay.io/os/node@{DIGEST}":"release"}}'],
)
def test_mark_that_no_build_can_have_made_is_ignored(text: str) -> None:
    document = {"metadata": {"name": "worker", "annotations": {key.PUSHED_IMAGES: text}}}
    assert read_pushed_images(MachineOSConfig.from_json(document)) == ()


def test_system_part_of_another_repository_is_not_marked() -> None:
    document = {
        "metadata": {
            "name": BUILD,
            "annotations": {
                key.SYSTEM_IMAGE: f"quay.io/os/base@{DIGEST}",
                key.CONTENT_KEY: "0" * 16,
            },
        },
        "spec": {"renderedImagePushSpec": f"quay.io/os/node:{BUILD}"},
        "status": {"digestedImagePushSpec": f"quay.io/os/node@{DIGEST}"},
    }
    expected = (PushedImage(f"quay.io/os/node@{DIGEST}", BUILD),)
    assert find_pushed_images(MachineOSBuild.from_json(document)) == expected


def test_push_waits_for_the_end_of_pruning_and_prune_for_that_of_pushes() -> None:
    repository_lock = RepositoryLock(wait_s=0.01)
    with repository_lock.lock_for_push("a"), repository_lock.try_lock_for_prune("a") as is_free:
        assert not is_free
    with repository_lock.try_lock_for_prune("a") as is_free:
        assert is_free
        with repository_lock.lock_for_push("b"):
            pass
        with pytest.raises(RepositoryLocked), repository_lock.lock_for_push("a"):
            pass
    with repository_lock.lock_for_push("a"):
        pass
