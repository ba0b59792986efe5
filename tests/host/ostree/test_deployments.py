"""Parsing of rpm-ostreed's deployments, and their order."""

import json

import pytest

from treenail.host.ostree.deployments import (
    DeploymentStatus,
    OstreeDeployment,
    parse_deployment,
    parse_digest,
    parse_image,
    parse_labels,
)

DIGEST = "sha256:" + "0f" * 32
IMAGE = f"registry.example:5000/os/node@{DIGEST}"


def some(name: str, *, booted: bool = False, staged: bool = False) -> OstreeDeployment:
    return OstreeDeployment(
        id=name,
        checksum=name,
        version="1",
        image="",
        digest="",
        is_booted=booted,
        is_staged=staged,
        is_locked=False,
        is_pinned=False,
    )


NEW, HERE, OLD, OLDER = some("new", staged=True), some("here", booted=True), some("b"), some("c")


@pytest.mark.parametrize(
    ("reference", "image"),
    [
        (f"ostree-unverified-registry:{IMAGE}", IMAGE),
        (f"ostree-unverified-image:registry:{IMAGE}", IMAGE),
        (f"ostree-unverified-image:docker://{IMAGE}", IMAGE),
        (f"ostree-image-signed:docker://{IMAGE}", IMAGE),
        (f"ostree-image-signed:registry:{IMAGE}", IMAGE),
        (f"ostree-remote-registry:fedora:{IMAGE}", IMAGE),
        (f"ostree-remote-image:fedora:docker://{IMAGE}", IMAGE),
        (f"ostree-remote-image:fedora:registry:{IMAGE}", IMAGE),
        (f"docker://{IMAGE}", IMAGE),
        (IMAGE, IMAGE),
        ("ostree-unverified-registry:registry.example/os:42", "registry.example/os:42"),
        ("ostree-unverified-image:oci:/var/tmp/os", "oci:/var/tmp/os"),
        ("ostree-unverified-image:oci-archive:/os.tar", "oci-archive:/os.tar"),
        ("ostree-unverified-image:containers-storage:os:1", "containers-storage:os:1"),
        ("ostree-remote-image:fedora:oci:/var/tmp/os", "oci:/var/tmp/os"),
    ],
)
def test_parse_image_drops_scheme_and_transport(reference: str, image: str) -> None:
    assert parse_image({"container-image-reference": reference}) == image


@pytest.mark.parametrize(
    ("found", "image", "digest"),
    [
        ({"custom-origin": (f"pivot://{IMAGE}", "Managed")}, IMAGE, DIGEST),
        ({"custom-origin": [f"pivot://{IMAGE}", "Managed"]}, IMAGE, DIGEST),
        ({"custom-origin": ("https://example.org", "by hand")}, "", ""),
        ({"custom-origin": "pivot://odd"}, "", ""),
        ({"origin": "fedora:fedora/x86_64/coreos/stable"}, "", ""),
        ({}, "", ""),
        ({"container-image-reference": f"ostree-unverified-registry:{IMAGE}"}, IMAGE, DIGEST),
        (
            {
                "container-image-reference": "ostree-unverified-registry:registry.example/os:42",
                "container-image-reference-digest": DIGEST,
            },
            "registry.example/os:42",
            DIGEST,
        ),
        (
            {"container-image-reference": "ostree-unverified-registry:registry.example/os:42"},
            "registry.example/os:42",
            "",
        ),
    ],
)
def test_parse_deployment_takes_digest_from_key_or_reference_only(
    found: dict[str, object], image: str, digest: str
) -> None:
    seen = parse_deployment(found)
    assert (seen.image, seen.digest) == (image, digest)


@pytest.mark.parametrize("text", ["", "os@sha256:12", "os:42", f"{IMAGE}0", f"os@md5:{'0f' * 32}"])
def test_parse_digest_without_complete_digest_is_empty(text: str) -> None:
    assert parse_digest(text) == ""


def test_parse_deployment_of_status_json_returns_all_fields() -> None:
    document = json.loads(f"""{{
        "id": "fedora-coreos-abc.0", "osname": "fedora-coreos", "checksum": "abc", "serial": 0,
        "version": "42.1", "booted": false, "staged": true, "finalization-locked": true,
        "pinned": false, "unlocked": "none",
        "container-image-reference": "ostree-unverified-registry:{IMAGE}",
        "container-image-reference-digest": "{DIGEST}"}}""")
    assert parse_deployment(document) == OstreeDeployment(
        id="fedora-coreos-abc.0",
        checksum="abc",
        version="42.1",
        image=IMAGE,
        digest=DIGEST,
        is_booted=False,
        is_staged=True,
        is_locked=True,
        is_pinned=False,
        origin=f"ostree-unverified-registry:{IMAGE}",
        base_checksum="abc",
    )


def test_parse_deployment_returns_requested_packages_only() -> None:
    found = {
        "packages": ["usbguard", "audit"],
        "requested-packages": ["usbguard"],
        "requested-base-removals": ["kernel-core"],
        "base-removals": [],
        "origin": "fedora:fedora/x86_64/coreos/stable",
    }
    seen = parse_deployment(found)
    assert (seen.requested_packages, seen.requested_base_removals) == (
        ("usbguard",),
        ("kernel-core",),
    )
    assert seen.origin == "fedora:fedora/x86_64/coreos/stable"


@pytest.mark.parametrize("text", ["[" * 50_000, "{", "null", '{"config": {"Labels": [1]}}'])
def test_image_configuration_without_readable_labels_has_none(text: str) -> None:
    # The author of the image wrote it: it must not end the agent.
    assert parse_labels({"base-commit-meta": {"ostree.container.image-config": text}}) == {}


def test_parse_deployment_removes_credentials_from_image() -> None:
    found = {"container-image-reference": f"ostree-unverified-registry:me:secret@{IMAGE}"}
    assert parse_deployment(found).image == IMAGE


@pytest.mark.parametrize(
    ("order", "booted", "staged", "pending", "rollback"),
    [
        ((NEW, HERE, OLD, OLDER), HERE, NEW, NEW, OLD),
        ((HERE, OLD), HERE, None, None, OLD),
        ((OLD, HERE), HERE, None, OLD, None),
        ((HERE,), HERE, None, None, None),
        ((OLD, OLDER), None, None, None, None),
        ((), None, None, None, None),
    ],
)
def test_deployment_status_finds_each_role_in_boot_order(
    order: tuple[OstreeDeployment, ...],
    booted: OstreeDeployment | None,
    staged: OstreeDeployment | None,
    pending: OstreeDeployment | None,
    rollback: OstreeDeployment | None,
) -> None:
    found = DeploymentStatus(order)
    assert (found.booted, found.staged, found.pending, found.rollback) == (
        booted,
        staged,
        pending,
        rollback,
    )
