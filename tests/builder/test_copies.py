"""Copies between two registries: docker-registry where it is installed, and the small registry."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.registry.images import make_client, make_layer, push_image, push_index
from tests.registry.real_registry import FaultKind, RegistryFault, needs_docker_registry
from treenail.builder.images.copies import CopiedImage, CopyStopped, ImageCopier, Place
from treenail.oci_content import compute_digest
from treenail.registry.client import RegistryClient
from treenail.registry.errors import NotFound, RegistryError
from treenail.registry.names import Descriptor
from treenail.registry.referrers import attach, get_referrers
from treenail_lab.registry.service import PULLER, RegistryService

pytestmark = pytest.mark.process

SOURCE, TARGET = "example/os", "final/os"


class Registries:
    """A registry with images, and an empty one."""

    def __init__(self, source: RegistryService, target: RegistryService) -> None:
        self.source, self.target = source, target
        self.pusher = make_client(source)
        self.final = make_client(target)

    def copy(self, digest: str, stop_after: int = 1000) -> CopiedImage:
        calls = iter(range(stop_after))
        copier = ImageCopier(
            Place(make_client(self.source, PULLER), SOURCE),
            Place(make_client(self.target), TARGET),
            should_stop=lambda: next(calls, None) is None,
        )
        return copier.copy_image(digest)

    def push_list(self, tag: str = "master-1") -> str:
        instances = {
            name: push_image(
                self.pusher,
                SOURCE,
                f"{tag}-{name}",
                architecture=name,
                layers=[make_layer({f"usr/{name}-{part}": bytes(1000)}) for part in range(6)],
            )
            for name in ("amd64", "arm64")
        }
        return push_index(self.pusher, instances, SOURCE, tag)


@pytest.fixture(
    params=[
        pytest.param((True, True), id="docker-registry", marks=needs_docker_registry),
        pytest.param((True, False), id="to-api", marks=needs_docker_registry),
        pytest.param((False, False), id="small-registry"),
    ]
)
def registries(request: pytest.FixtureRequest) -> Iterator[Registries]:
    """Two registries; the second one of ``to-api`` has the API for referrers."""
    is_real, is_target_real = request.param
    with (
        RegistryService(is_real=is_real) as source,
        RegistryService(is_real=is_target_real, has_referrers=is_real) as target,
    ):
        yield Registries(source, target)


def attach_note(client: RegistryClient, repository: str, digest: str, text: bytes) -> Descriptor:
    subject = client.head_manifest(repository, digest)
    assert subject is not None
    return attach(
        client, repository, subject, artifact_type="example/note", media_type="text/plain",
        content=text, annotations={"written-by": "the test"},
    )  # fmt: skip


def list_images(client: RegistryClient, repository: str, digest: str) -> list[bytes]:
    """The manifests of a list and of its instances."""
    manifest = client.get_manifest(repository, digest)
    entries = json.loads(manifest.content).get("manifests", [])
    return [
        manifest.content,
        *(client.get_manifest(repository, each["digest"]).content for each in entries),
    ]


def test_list_of_manifests_is_copied_with_all_architectures(registries: Registries) -> None:
    digest = registries.push_list()
    copied = registries.copy(digest)
    assert copied.manifests == 3
    assert copied.moved_bytes > 0
    assert set(copied.tags) == {"master-1", "master-1-amd64", "master-1-arm64"}
    assert list_images(registries.final, TARGET, digest) == list_images(
        registries.pusher, SOURCE, digest
    )
    found = registries.final.head_manifest(TARGET, "master-1")
    assert found.digest == digest


def test_docker_manifest_keeps_its_digest(registries: Registries) -> None:
    pushed = push_image(registries.pusher, SOURCE, "old", is_docker=True)
    registries.copy(pushed.digest)
    found = registries.final.get_manifest(TARGET, pushed.digest)
    assert compute_digest(found.content) == pushed.digest
    assert found.media_type == pushed.media_type


def test_present_image_is_not_moved_again(registries: Registries) -> None:
    digest = registries.push_list()
    attach_note(registries.pusher, SOURCE, digest, b"one")
    registries.copy(digest)
    again = registries.copy(digest)
    assert (again.manifests, again.moved_bytes) == (0, 0)


def test_attachments_of_every_manifest_are_copied(registries: Registries) -> None:
    digest = registries.push_list()
    instance = json.loads(registries.pusher.get_manifest(SOURCE, digest).content)["manifests"][0]
    note = attach_note(registries.pusher, SOURCE, digest, b"of the list")
    attach_note(registries.pusher, SOURCE, instance["digest"], b"of an instance")
    attach_note(registries.pusher, SOURCE, note.digest, b"of the note")
    attach_note(registries.pusher, SOURCE, digest, b"another one of the list")
    assert registries.copy(digest).attachments == 4
    for subject in (digest, instance["digest"], note.digest):
        expected = get_referrers(registries.pusher, SOURCE, subject)
        found = get_referrers(registries.final, TARGET, subject)
        assert {each.digest: each for each in found} == {each.digest: each for each in expected}
        for each in found:
            assert registries.final.get_manifest(TARGET, each.digest)


def test_attachment_under_a_tag_is_copied(registries: Registries) -> None:
    digest = registries.push_list()
    tag = f"{digest.replace(':', '-')}.sig"
    signature = push_image(registries.pusher, SOURCE, tag)
    push_image(
        registries.pusher, SOURCE, f"sha256-{64 * '0'}.sig", layers=[make_layer({"a": b"b"})]
    )
    copied = registries.copy(digest)
    found = registries.final.head_manifest(TARGET, tag)
    assert found.digest == signature.digest
    assert f"sha256-{64 * '0'}.sig" not in copied.tags


def test_other_images_and_tags_stay(registries: Registries) -> None:
    other = push_image(registries.pusher, SOURCE, "other", layers=[make_layer({"a": b"b"})])
    kept = push_image(registries.final, TARGET, "kept")
    registries.copy(registries.push_list())
    assert registries.final.head_manifest(TARGET, other.digest) is None
    found = registries.final.head_manifest(TARGET, "kept")
    assert found.digest == kept.digest


@pytest.mark.parametrize("calls", [0, 7, 12])
def test_stopped_copy_continues_without_moving_blobs_again(
    registries: Registries, calls: int
) -> None:
    digest = registries.push_list()
    total = sum(
        each["size"]
        for content in list_images(registries.pusher, SOURCE, digest)[1:]
        for each in (json.loads(content)["config"], *json.loads(content)["layers"])
    )
    with pytest.raises(CopyStopped):
        registries.copy(digest, stop_after=calls)
    assert registries.final.head_manifest(TARGET, "master-1") is None
    copied = registries.copy(digest)
    assert copied.moved_bytes <= total
    assert list_images(registries.final, TARGET, digest) == list_images(
        registries.pusher, SOURCE, digest
    )


def test_missing_image_is_not_found(registries: Registries) -> None:
    registries.push_list()
    with pytest.raises(NotFound):
        registries.copy(f"sha256:{64 * '0'}")


def test_broken_connections_are_retried(registries: Registries) -> None:
    digest = registries.push_list()
    for kind in (FaultKind.DROP, FaultKind.LOSE, FaultKind.STATUS):
        registries.target.faults.add(RegistryFault(kind, method="PUT"))
    registries.source.faults.add(RegistryFault(FaultKind.TRUNCATE, path="/blobs/", after_bytes=5))
    registries.copy(digest)
    assert registries.final.head_manifest(TARGET, digest) is not None


def test_refused_push_is_an_error_without_the_login(registries: Registries) -> None:
    digest = registries.push_list()
    copier = ImageCopier(
        Place(make_client(registries.source, PULLER), SOURCE),
        Place(make_client(registries.target, PULLER), TARGET),
    )
    with pytest.raises(RegistryError) as error:
        copier.copy_image(digest)
    assert registries.target.passwords[PULLER] not in str(error.value)


@needs_docker_registry
def test_copied_list_is_complete_for_skopeo(tmp_path: Path) -> None:
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is not installed")
    with RegistryService(is_real=True) as source, RegistryService(is_real=True) as target:
        registries = Registries(source, target)
        digest = registries.push_list()
        registries.copy(digest)
        (tmp_path / "auth.json").write_bytes(target.make_auth_json(PULLER))
        subprocess.run(
            ["skopeo", "copy", "--quiet", "--all", "--preserve-digests",
             "--src-authfile", str(tmp_path / "auth.json"),
             "--src-cert-dir", str(target.ca_file.parent),
             f"docker://{target.host}/{TARGET}@{digest}", f"dir:{tmp_path / 'out'}"],
            check=True, timeout=60, capture_output=True,
        )  # fmt: skip
        content = (tmp_path / "out/manifest.json").read_bytes()
        assert compute_digest(content) == digest
