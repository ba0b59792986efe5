"""Pruning on a real registry: tags, lists, attachments, and registries without deletion."""

import pytest

from tests.fakes.clock import FakeClock
from tests.registry.images import (
    compute_diff_id,
    make_client,
    make_layer,
    push_image,
    push_index,
)
from tests.registry.real_registry import (
    PULLER,
    FaultKind,
    RegistryFault,
    RegistryService,
    any_registry,
    lab_registry,
)
from treenail.builder.images.prune import (
    ImageCache,
    delete_images,
    is_lasting,
    read_stored_images,
)
from treenail.controllers.image_build.pruner import make_time_check
from treenail.image.oci.documents import BUILD, CONFIG_LAYER, IMAGE_CONFIG
from treenail.image.oci.prune import PrunePlan, plan_pruning
from treenail.oci_content import OCI_INDEX
from treenail.registry.client import RegistryClient
from treenail.registry.errors import RegistryError, ServerFailure
from treenail.registry.names import Descriptor
from treenail.registry.referrers import attach, get_referrers, make_referrers_tag

__all__ = ["any_registry", "lab_registry"]


def build(client: RegistryClient, name: str, *, architecture: str = "amd64") -> Descriptor:
    layer = make_layer({name: architecture.encode()})
    labels = {BUILD: name, IMAGE_CONFIG: "worker", CONFIG_LAYER: compute_diff_id(layer)}
    return push_image(client, tag=name, architecture=architecture, layers=[layer], labels=labels)


def prune(client: RegistryClient, *references: str) -> tuple[str, ...]:
    images = read_stored_images(client, "os/node", {})
    plan = plan_pruning(images, dict.fromkeys(references, "Node worker-0"), [])
    result = delete_images(client, "os/node", plan)
    assert result.problem is None
    return result.deleted


def test_only_unreferenced_images_are_deleted(any_registry: RegistryService) -> None:
    client = make_client(any_registry)
    first, second = build(client, "build-1"), build(client, "build-2")
    foreign = push_image(client, tag="latest")
    assert prune(client, second.digest) == (first.digest,)
    assert client.list_tags("os/node") == ("build-2", "latest")
    assert client.head_manifest("os/node", foreign.digest)
    assert prune(client, second.digest) == ()


def test_manifest_with_the_tag_of_a_user_stays(any_registry: RegistryService) -> None:
    client = make_client(any_registry)
    first = build(client, "build-1")
    content = client.get_manifest("os/node", "build-1")
    client.put_manifest("os/node", "release", content.media_type, content.content)
    assert prune(client) == ()
    assert client.head_manifest("os/node", first.digest)


def test_image_that_gets_a_tag_after_the_plan_stays(lab_registry: RegistryService) -> None:
    client = make_client(lab_registry)
    build(client, "build-1")
    plan = plan_pruning(read_stored_images(client, "os/node", {}), {}, [])
    assert len(plan.deleted) == 1
    content = client.get_manifest("os/node", "build-1")
    client.put_manifest("os/node", "build-2", content.media_type, content.content)
    assert delete_images(client, "os/node", plan).deleted == ()


def test_list_is_deleted_with_its_instances(any_registry: RegistryService) -> None:
    client = make_client(any_registry)
    names = ("amd64", "arm64")
    instances = {name: build(client, "build-1", architecture=name) for name in names}
    listed = push_index(client, instances, tag="build-1")
    assert prune(client, instances["arm64"].digest) == ()
    assert prune(client) == (listed, *sorted(each.digest for each in instances.values()))
    assert client.list_tags("os/node") == ()


def test_list_of_lists_is_no_image_of_treenail(lab_registry: RegistryService) -> None:
    client = make_client(lab_registry)
    inner = push_index(client, {"amd64": build(client, "build-1")}, tag="inner")
    size = len(client.get_manifest("os/node", inner).content)
    outer = push_index(client, {"amd64": Descriptor(OCI_INDEX, inner, size)}, tag="outer")
    builds = {each.digest: each.build for each in read_stored_images(client, "os/node", {})}
    assert (builds[inner], builds[outer]) == ("build-1", "")


def test_attachments_are_deleted_with_the_image(any_registry: RegistryService) -> None:
    client = make_client(any_registry)
    first, second = build(client, "build-1"), build(client, "build-2")
    kept, gone = (
        attach(
            client,
            "os/node",
            subject,
            artifact_type="application/x.note",
            media_type="application/json",
            content=b"{}",
        )
        for subject in (second, first)
    )
    assert prune(client, second.digest) == (first.digest,)
    assert client.head_manifest("os/node", gone.digest) is None
    assert get_referrers(client, "os/node", second.digest) == (kept,)


@pytest.mark.parametrize("suffix", ["", ".sig"])
def test_manifest_that_only_a_tag_attaches_stays(
    lab_registry: RegistryService, suffix: str
) -> None:
    client = make_client(lab_registry)
    image, victim = build(client, "build-1"), push_image(client, tag="latest")
    tag = f"{make_referrers_tag(image.digest)}{suffix}"
    if suffix:
        content = client.get_manifest("os/node", victim.digest)
        client.put_manifest("os/node", tag, content.media_type, content.content)
    else:
        push_index(client, {"amd64": victim}, tag=tag)
    assert prune(client) == (image.digest,)
    assert client.head_manifest("os/node", victim.digest)
    assert client.head_manifest("os/node", tag)


def test_content_is_read_once(lab_registry: RegistryService) -> None:
    client = make_client(lab_registry)
    build(client, "build-1")
    cache: ImageCache = {}
    first = read_stored_images(client, "os/node", cache)
    before = len(lab_registry.front.requests)
    assert read_stored_images(client, "os/node", cache) == first
    methods = [method for method, *_ in lab_registry.front.requests[before:]]
    assert methods == ["GET", "HEAD"]


def test_empty_repository_has_no_images(lab_registry: RegistryService) -> None:
    assert read_stored_images(make_client(lab_registry), "os/none", {}) == ()


@pytest.mark.parametrize(("status", "user"), [(405, ""), (403, ""), (0, PULLER)])
def test_registry_without_deletion_is_a_lasting_problem(
    lab_registry: RegistryService, status: int, user: str
) -> None:
    owner = make_client(lab_registry)
    build(owner, "build-1")
    build(owner, "build-2")
    client = make_client(lab_registry, user) if user else owner
    if status:
        lab_registry.faults.add(
            RegistryFault(FaultKind.STATUS, method="DELETE", status=status, times=0)
        )
    plan = plan_pruning(read_stored_images(client, "os/node", {}), {}, [])
    before = len(lab_registry.front.requests)
    result = delete_images(client, "os/node", plan)
    assert result.deleted == ()
    assert is_lasting(result.problem)
    methods = [method for method, *_ in lab_registry.front.requests[before:]]
    assert methods.count("DELETE") == 1


def test_outage_in_the_middle_is_no_lasting_problem(lab_registry: RegistryService) -> None:
    client = make_client(lab_registry)
    images = [build(client, f"build-{number}") for number in range(3)]
    plan = plan_pruning(read_stored_images(client, "os/node", {}), {}, [])
    last: PrunePlan = plan
    lab_registry.faults.add(
        RegistryFault(
            FaultKind.STATUS, method="DELETE", path=last.deleted[1].digest, status=503, times=0
        )
    )
    result = delete_images(client, "os/node", plan)
    assert isinstance(result.problem, ServerFailure)
    assert not is_lasting(result.problem)
    assert result.deleted == (plan.deleted[0].digest,)
    lab_registry.faults.clear()
    assert len(prune(client)) == len(images) - 1


def test_repository_with_too_many_tags_is_not_pruned(lab_registry: RegistryService) -> None:
    client = make_client(lab_registry)
    first = build(client, "build-1")
    plan = plan_pruning(read_stored_images(client, "os/node", {}), {}, [])
    content = client.get_manifest("os/node", "build-1")
    # The tag of a user, which the first tags do not contain.
    client.put_manifest("os/node", "zz-release", content.media_type, content.content)
    with pytest.raises(RegistryError, match="has 2 tags, and at most 1"):
        read_stored_images(client, "os/node", {}, limit=1)
    result = delete_images(client, "os/node", plan, limit=1)
    assert result.deleted == ()
    assert "has 2 tags" in str(result.problem)
    assert client.head_manifest("os/node", first.digest)


def test_pass_without_time_left_deletes_nothing(lab_registry: RegistryService) -> None:
    client = make_client(lab_registry)
    first = build(client, "build-1")
    plan = plan_pruning(read_stored_images(client, "os/node", {}), {}, [])
    clock = FakeClock()
    check_time = make_time_check(clock, 240)
    check_time()
    clock.move(241)
    with pytest.raises(RegistryError, match="within 240 s"):
        read_stored_images(client, "os/node", {}, check_time)
    result = delete_images(client, "os/node", plan, check_time)
    assert (result.deleted, "within 240 s" in str(result.problem)) == ((), True)
    assert client.head_manifest("os/node", first.digest)
