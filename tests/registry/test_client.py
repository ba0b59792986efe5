"""Contract of the registry client: the same tests on docker-registry and on the small registry."""

import json
import random
from io import BytesIO

import pytest

from tests.fakes.clock import FakeClock
from tests.registry.images import (
    OCI_LAYER,
    describe_blob,
    make_client,
    push_image,
    push_index,
)
from tests.registry.real_registry import PULLER, RegistryService
from treenail.errors import ConfigError
from treenail.oci_content import OCI_MANIFEST
from treenail.registry.client import RegistryClient
from treenail.registry.errors import (
    AnswerInvalid,
    CertificateUnknown,
    Denied,
    DigestMismatch,
    LoginRefused,
    NotFound,
    RegistryError,
)
from treenail.registry.images import copy_blobs, resolve_image
from treenail.registry.names import Descriptor
from treenail.registry.referrers import attach, get_referrers
from treenail.registry.transport import RegistryLimits, TlsSettings
from treenail.registry.uploads import mount_blob, upload_blob, upload_bytes, verify_push_access

SMALL_CHUNKS = RegistryLimits(chunk_bytes=64 * 1024)


def make_content(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def read_blob(service: RegistryService, repository: str, blob: Descriptor) -> bytes:
    found = bytearray()
    make_client(service, PULLER).read_blob(repository, blob, found.extend)
    return bytes(found)


def test_pushed_manifest_is_read_by_tag_and_by_digest(any_registry: RegistryService) -> None:
    client = make_client(any_registry)
    pushed = push_image(client)
    by_tag = client.get_manifest("os/node", "base")
    assert by_tag == client.get_manifest("os/node", pushed.digest)
    assert by_tag.media_type == OCI_MANIFEST
    found = client.head_manifest("os/node", "base")
    assert (found.digest, found.media_type, found.size) == (
        pushed.digest,
        OCI_MANIFEST,
        pushed.size,
    )


def test_missing_content_is_not_found_and_nothing_else(any_registry: RegistryService) -> None:
    client = make_client(any_registry)
    blob = describe_blob(b"never pushed")
    assert client.head_manifest("os/node", "base") is None
    assert not client.has_blob("os/node", blob.digest)
    with pytest.raises(NotFound):
        client.get_manifest("os/node", "base")
    with pytest.raises(NotFound):
        client.read_blob("os/node", blob, lambda _: None)
    with pytest.raises(NotFound):
        client.list_tags("os/none")


@pytest.mark.parametrize("size", [0, 1, 64 * 1024, 300_001])
def test_blob_in_chunks_arrives_complete(any_registry: RegistryService, size: int) -> None:
    client = make_client(any_registry, limits=SMALL_CHUNKS)
    content = make_content(size)
    blob = upload_bytes(client, "os/node", OCI_LAYER, content)
    assert read_blob(any_registry, "os/node", blob) == content
    patches = [method for method, *_ in any_registry.front.requests if method == "PATCH"]
    assert len(patches) == max(size - 1, 0) // (64 * 1024)


def test_blob_that_exists_is_not_uploaded_again(any_registry: RegistryService) -> None:
    client = make_client(any_registry)
    upload_bytes(client, "os/node", OCI_LAYER, b"content")
    before = len(any_registry.front.requests)
    upload_bytes(client, "os/node", OCI_LAYER, b"content")
    assert [method for method, *_ in any_registry.front.requests[before:]] == ["HEAD"]


def test_mounted_blob_is_read_from_the_other_repository(any_registry: RegistryService) -> None:
    client = make_client(any_registry)
    blob = upload_bytes(client, "base/os", OCI_LAYER, b"content of the base")
    assert mount_blob(client, "os/node", blob.digest, "base/os")
    assert read_blob(any_registry, "os/node", blob) == b"content of the base"
    missing = describe_blob(b"not there")
    assert not mount_blob(client, "os/node", missing.digest, "base/os")


def test_push_access_is_verified_by_a_cancelled_upload(any_registry: RegistryService) -> None:
    before = len(any_registry.front.requests)
    verify_push_access(make_client(any_registry), "os/node")
    methods = [method for method, *_ in any_registry.front.requests[before:]]
    assert methods[-2:] == ["POST", "DELETE"]
    with pytest.raises(Denied, match=r"cannot push to .*/os/node"):
        verify_push_access(make_client(any_registry, PULLER), "os/node")


def test_all_tags_are_listed_in_order(any_registry: RegistryService) -> None:
    client = make_client(any_registry)
    push_image(client)
    content = client.get_manifest("os/node", "base").content
    tags = [f"build-{number}" for number in range(7)]
    for tag in tags:
        client.put_manifest("os/node", tag, OCI_MANIFEST, content)
    assert client.list_tags("os/node") == ("base", *tags)


@pytest.mark.process
def test_pages_of_tags_are_followed() -> None:
    with RegistryService(is_real=False) as service:
        client = make_client(service, limits=RegistryLimits(tag_page=3))
        push_image(client)
        content = client.get_manifest("os/node", "base").content
        for number in range(7):
            client.put_manifest("os/node", f"build-{number}", OCI_MANIFEST, content)
        before = len(service.front.requests)
        assert len(client.list_tags("os/node")) == 8
        assert len(service.front.requests) - before == 3


def test_deleted_manifest_is_gone_with_its_tags(any_registry: RegistryService) -> None:
    client = make_client(any_registry)
    pushed = push_image(client)
    content = client.get_manifest("os/node", "base").content
    client.put_manifest("os/node", "again", OCI_MANIFEST, content)
    client.delete_manifest("os/node", pushed.digest)
    assert client.head_manifest("os/node", "base") is None
    assert client.head_manifest("os/node", "again") is None
    with pytest.raises(NotFound):
        client.delete_manifest("os/node", pushed.digest)


def test_login_for_pulls_cannot_push_or_delete(any_registry: RegistryService) -> None:
    pushed = push_image(make_client(any_registry))
    client = make_client(any_registry, PULLER)
    content = client.get_manifest("os/node", "base").content
    with pytest.raises(Denied):
        client.put_manifest("os/node", "mine", OCI_MANIFEST, content)
    with pytest.raises(Denied):
        upload_bytes(client, "os/node", OCI_LAYER, b"mine")
    with pytest.raises(Denied):
        client.delete_manifest("os/node", pushed.digest)


def test_wrong_password_is_a_refused_login_without_the_password(
    any_registry: RegistryService,
) -> None:
    any_registry.passwords[PULLER] = "wrong-password-7"
    with pytest.raises(LoginRefused) as raised:
        make_client(any_registry, PULLER).get_manifest("os/node", "base")
    assert "wrong-password-7" not in f"{raised.value} {raised.value.remedy} {raised.value!r}"
    with pytest.raises(LoginRefused):
        make_client(any_registry, "").get_manifest("os/node", "base")


def test_certificate_of_an_unknown_ca_is_refused(lab_registry: RegistryService) -> None:
    with pytest.raises(CertificateUnknown) as raised:
        make_client(lab_registry, has_ca=False).get_manifest("os/node", "base")
    assert f"openssl s_client -showcerts -connect {lab_registry.host} <" in raised.value.remedy
    assert lab_registry.front.requests == []


def test_comments_of_a_bundle_may_be_in_any_language(lab_registry: RegistryService) -> None:
    bundle = f"# Certificación\n{lab_registry.ca_file.read_text()}\n# 証明書\n"
    client = RegistryClient(lab_registry.host, FakeClock(), tls=TlsSettings(bundle))
    with pytest.raises(LoginRefused):
        client.get_manifest("os/node", "base")


@pytest.mark.parametrize(
    "bundle",
    ["no certificate", "-----BEGIN CERTIFICATE-----\né\n-----END CERTIFICATE-----"],
)
def test_bundle_without_certificates_is_refused(lab_registry: RegistryService, bundle: str) -> None:
    client = RegistryClient(lab_registry.host, FakeClock(), tls=TlsSettings(bundle))
    with pytest.raises(ConfigError, match="CA bundle"):
        client.get_manifest("os/node", "base")


def test_content_of_another_digest_is_not_pushed(any_registry: RegistryService) -> None:
    client = make_client(any_registry)
    blob = describe_blob(b"announced")
    with pytest.raises(DigestMismatch):
        upload_blob(client, "os/node", blob, lambda: BytesIO(b"different"))
    assert not client.has_blob("os/node", blob.digest)


def test_manifest_of_missing_blobs_is_refused(any_registry: RegistryService) -> None:
    client = make_client(any_registry)
    push_image(client)
    content = client.get_manifest("os/node", "base").content
    with pytest.raises(RegistryError) as raised:
        client.put_manifest("os/other", "base", OCI_MANIFEST, content)
    assert raised.value.status in {400, 404}
    assert client.head_manifest("os/other", "base") is None


@pytest.mark.parametrize("is_docker", [False, True])
def test_list_of_manifests_is_resolved_to_the_architecture(
    any_registry: RegistryService, is_docker: bool
) -> None:
    client = make_client(any_registry)
    instances = {
        name: push_image(client, tag=name, architecture=name, is_docker=is_docker)
        for name in ("amd64", "arm64")
    }
    digest = push_index(client, instances, is_docker=is_docker)
    found = resolve_image(client, "os/node", digest, "arm64")
    assert found.index_digest == digest
    assert found.digest == instances["arm64"].digest
    assert json.loads(found.config)["architecture"] == "arm64"
    single = resolve_image(client, "os/node", instances["amd64"].digest, "amd64")
    assert (single.index_digest, single.digest) == ("", instances["amd64"].digest)
    with pytest.raises(NotFound, match=r"no image for linux/s390x; it has: amd64, arm64"):
        resolve_image(client, "os/node", digest, "s390x")
    with pytest.raises(NotFound, match=r"expected an image for linux/arm64, found 'amd64'"):
        resolve_image(client, "os/node", instances["amd64"].digest, "arm64")


def test_copied_image_mounts_blobs_in_one_registry(any_registry: RegistryService) -> None:
    client = make_client(any_registry)
    pushed = push_image(client, "base/os")
    before = len(any_registry.front.requests)
    image = resolve_image(client, "base/os", pushed.digest, "amd64")
    blobs = (image.config_blob, *image.layers)
    assert copy_blobs(blobs, client, "base/os", client, "os/node") == 0
    client.put_manifest("os/node", "copy", image.manifest.media_type, image.manifest.content)
    requests = any_registry.front.requests[before:]
    assert {method for method, *_ in requests} == {"GET", "POST", "PUT"}
    assert not any(
        method == "GET" and image.layers[0].digest in path for method, path, _ in requests
    )
    assert resolve_image(client, "os/node", "copy", "amd64").digest == pushed.digest


def test_copied_image_is_streamed_between_registries(lab_registry: RegistryService) -> None:
    layer = make_content(500_000)
    with RegistryService(is_real=False) as other:
        source = make_client(other)
        blob = upload_bytes(source, "base/os", OCI_LAYER, layer)
        target = make_client(lab_registry, limits=SMALL_CHUNKS)
        assert copy_blobs([blob, blob], source, "base/os", target, "os/node") == len(layer)
        assert copy_blobs([blob], source, "base/os", target, "os/node") == 0
    assert read_blob(lab_registry, "os/node", blob) == layer


def test_attached_artifacts_are_listed_by_type(any_registry: RegistryService) -> None:
    client = make_client(any_registry)
    subject = push_image(client)
    assert get_referrers(client, "os/node", subject.digest) == ()
    for number, kind in enumerate(("application/x.sign", "application/x.note")):
        for _again in range(2):
            attach(
                client,
                "os/node",
                subject,
                artifact_type=kind,
                media_type="application/json",
                content=b"%d" % number,
            )
    found = get_referrers(client, "os/node", subject.digest)
    assert [each.artifact_type for each in found] == ["application/x.sign", "application/x.note"]
    only = get_referrers(client, "os/node", subject.digest, "application/x.note")
    assert only == found[1:]
    manifest = client.get_manifest("os/node", only[0].digest)
    assert json.loads(manifest.content)["subject"]["digest"] == subject.digest


@pytest.mark.process
def test_attached_artifacts_use_the_referrers_api_where_it_exists() -> None:
    with RegistryService(is_real=False, has_referrers=True) as service:
        client = make_client(service)
        subject = push_image(client)
        attach(
            client,
            "os/node",
            subject,
            artifact_type="application/x.sign",
            media_type="application/json",
            content=b"{}",
        )
        found = get_referrers(client, "os/node", subject.digest, "application/x.sign")
        assert len(found) == 1
        assert client.list_tags("os/node") == ("base",)


@pytest.mark.parametrize(
    ("repository", "reference"),
    [
        ("Os/Node", "base"),
        ("os//node", "base"),
        ("../node", "base"),
        ("os/node\r\nHost: x", "base"),
        ("os/node", "sha512:" + "0" * 128),
        ("os/node", "a/b"),
        ("os/node", "a?b"),
        ("os/node", ""),
    ],
)
def test_invalid_name_is_refused_before_any_request(repository: str, reference: str) -> None:
    client = RegistryClient("registry.example.com", FakeClock())
    with pytest.raises(ConfigError):
        client.get_manifest(repository, reference)


def test_answer_beyond_its_limit_is_invalid(any_registry: RegistryService) -> None:
    push_image(make_client(any_registry))
    client = make_client(any_registry, limits=RegistryLimits(manifest_bytes=100))
    with pytest.raises(AnswerInvalid, match="longer than 100 bytes"):
        client.get_manifest("os/node", "base")
