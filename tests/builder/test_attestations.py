"""Signatures and provenance of images on a real registry."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tests.registry.images import make_client, push_image
from tests.registry.real_registry import RegistryService, any_registry, lab_registry
from treenail.builder.images.attachments import (
    SignatureMissing,
    SigningKey,
    attach_packages,
    attach_provenance,
    copy_packages,
    load_signing_key,
    read_documents,
    sign_image,
    verify_image,
)
from treenail.errors import ConfigError
from treenail.image.oci.attachments import (
    SPDX_TYPE,
    STATEMENT_TYPE,
    BuildProvenance,
    find_payload_problem,
    make_payload,
    make_policy,
    make_registry_settings,
    make_signature_tag,
    read_signatures,
)
from treenail.oci_content import OCI_MANIFEST
from treenail.registry.errors import DigestMismatch
from treenail.registry.names import Descriptor

__all__ = ["any_registry", "lab_registry"]

DIGEST = f"sha256:{'a' * 64}"


def encode_key(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, password: bytes = b"") -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption(),
    )


def make_key() -> SigningKey:
    return load_signing_key(encode_key(ec.generate_private_key(ec.SECP256R1())))


def test_signed_image_is_verified_with_its_key_only(any_registry: RegistryService) -> None:
    client = make_client(any_registry)
    image = push_image(client)
    key, other = make_key(), make_key()
    with pytest.raises(SignatureMissing, match="it has no signature"):
        verify_image(client, "os/node", image.digest, key.public_key)
    tag = sign_image(client, "os/node", image.digest, key)
    assert tag == make_signature_tag(image.digest)
    verify_image(client, "os/node", image.digest, key.public_key)
    with pytest.raises(SignatureMissing, match="of another key"):
        verify_image(client, "os/node", image.digest, other.public_key)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_verifies_the_signature(lab_registry: RegistryService, tmp_path: Path) -> None:
    client = make_client(lab_registry)
    image = push_image(client)
    key = make_key()
    tag = sign_image(client, "os/node", image.digest, key)
    (stored,) = read_signatures(client.get_manifest("os/node", tag).content)
    blob = Descriptor("x", stored.payload_digest, stored.payload_size)
    contents = {
        "payload": client.read_small_blob("os/node", blob),
        "signature": stored.signature,
        "key.pem": key.public_key.to_pem(),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    words = ["openssl", "dgst", "-sha256", "-verify", "key.pem", "-signature", "signature"]
    done = subprocess.run(
        [*words, "payload"], cwd=tmp_path, capture_output=True, check=False, timeout=30
    )
    assert done.stdout == b"Verified OK\n", done.stderr


def test_second_key_adds_a_signature_and_the_first_none(any_registry: RegistryService) -> None:
    client = make_client(any_registry)
    image = push_image(client)
    first, second = make_key(), make_key()
    for key in (first, first, second, first):
        tag = sign_image(client, "os/node", image.digest, key)
    manifest = client.get_manifest("os/node", tag).content
    assert len(list(read_signatures(manifest))) == 2
    for key in (first, second):
        verify_image(client, "os/node", image.digest, key.public_key)


def test_signature_of_another_image_does_not_count(lab_registry: RegistryService) -> None:
    client = make_client(lab_registry)
    image = push_image(client)
    other = push_image(client, tag="other", architecture="arm64")
    key = make_key()
    tag = sign_image(client, "os/node", other.digest, key)
    manifest = client.get_manifest("os/node", tag).content
    client.put_manifest("os/node", make_signature_tag(image.digest), OCI_MANIFEST, manifest)
    with pytest.raises(SignatureMissing, match="it is of another image"):
        verify_image(client, "os/node", image.digest, key.public_key)


def test_payload_states_repository_and_digest() -> None:
    payload = make_payload("quay.io/os/node", DIGEST)
    assert find_payload_problem(payload, "quay.io/os/node", DIGEST) == ""
    assert (
        find_payload_problem(payload, "quay.io/os/other", DIGEST) == "it is of another repository"
    )
    assert find_payload_problem(b"[]", "quay.io/os/node", DIGEST)
    assert find_payload_problem(b"\xff", "quay.io/os/node", DIGEST) == "its payload is no JSON"


@pytest.mark.parametrize(
    "manifest",
    [
        b"no json",
        b"[]",
        b'{"layers": 5}',
        b'{"layers": [1, {"mediaType": "x"}]}',
        json.dumps(
            {
                "layers": [
                    {
                        "mediaType": "application/vnd.dev.cosign.simplesigning.v1+json",
                        "digest": DIGEST,
                        "size": size,
                        "annotations": {"dev.cosignproject.cosign/signature": text},
                    }
                    for size, text in ((10**9, "AAAA"), (5, "no base64!"), (5, 7), (True, None))
                ]
            }
        ).encode(),
    ],
)
def test_invalid_manifest_has_no_signatures(manifest: bytes) -> None:
    assert list(read_signatures(manifest)) == []


@pytest.mark.parametrize(
    "pem",
    [
        b"no key",
        encode_key(ec.generate_private_key(ec.SECP384R1())),
        encode_key(rsa.generate_private_key(65537, 2048)),
        encode_key(ec.generate_private_key(ec.SECP256R1()), b"password"),
    ],
)
def test_unusable_key_is_refused_without_its_text(pem: bytes) -> None:
    with pytest.raises(ConfigError, match="cannot use the signing key") as raised:
        load_signing_key(pem)
    assert "openssl genpkey" in raised.value.remedy
    assert pem.decode().splitlines()[-1] not in str(raised.value)


def test_policy_of_nodes_requires_the_signature() -> None:
    policy = make_policy("quay.io/os/node", "/etc/pki/treenail.pub")
    assert json.dumps(policy).count("sigstoreSigned") == 1
    assert "use-sigstore-attachments: true" in make_registry_settings("quay.io/os/node")
    assert make_key().public_key.to_pem().startswith(b"-----BEGIN PUBLIC KEY-----")


def make_provenance(digest: str) -> BuildProvenance:
    return BuildProvenance(
        name="quay.io/os/node",
        digest=digest,
        materials=(f"quay.io/os/base@{DIGEST}",),
        machine_config="rendered-worker-a",
        pool="worker",
        build="build-1",
        content_key="0123456789abcdef",
        containerfile_digest="",
        version="0.1.0",
        started="2026-01-01T00:00:00Z",
        finished="2026-01-01T00:00:01Z",
    )


def test_provenance_is_attached_once_and_read(any_registry: RegistryService) -> None:
    client = make_client(any_registry)
    image = push_image(client)
    provenance = make_provenance(image.digest)
    attach_provenance(client, "os/node", provenance)
    attach_provenance(client, "os/node", replace(provenance, finished="2026-01-02T00:00:00Z"))
    (content,) = read_documents(client, "os/node", image.digest, STATEMENT_TYPE)
    statement = json.loads(content)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert statement["subject"][0]["digest"] == {"sha256": image.digest.partition(":")[2]}
    definition = statement["predicate"]["buildDefinition"]
    assert definition["resolvedDependencies"] == [
        {"uri": "docker://quay.io/os/base", "digest": {"sha256": "a" * 64}}
    ]


def test_packages_of_the_system_part_are_attached_to_the_image(
    any_registry: RegistryService,
) -> None:
    client = make_client(any_registry)
    system, image = (
        push_image(client, tag="system"),
        push_image(client, tag="image", labels={"a": "b"}),
    )
    assert not copy_packages(client, "os/node", system.digest, image.digest)
    attach_packages(client, "os/node", system.digest, b"{}")
    for _ in range(2):
        assert copy_packages(client, "os/node", system.digest, image.digest)
    assert read_documents(client, "os/node", image.digest, SPDX_TYPE) == (b"{}",)


def test_provenance_needs_the_image_and_digests(lab_registry: RegistryService) -> None:
    client = make_client(lab_registry)
    image = push_image(client)
    with pytest.raises(ConfigError, match="does not have the image"):
        attach_provenance(client, "os/node", make_provenance(DIGEST))
    tagged = replace(make_provenance(image.digest), materials=("quay.io/os/base:latest",))
    with pytest.raises(ConfigError, match="names a tag"):
        attach_provenance(client, "os/node", tagged)
    assert read_documents(client, "os/node", image.digest, STATEMENT_TYPE) == ()
    with pytest.raises(DigestMismatch):
        client.put_manifest("os/node", DIGEST, OCI_MANIFEST, b"{}")
