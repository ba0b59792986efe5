"""bootc's status of format version 1, parsed."""

import json
from typing import Any

import pytest

from treenail.errors import HostError
from treenail.host.bootc.status import is_composefs, parse_status
from treenail.host.ostree.deployments import DeploymentStatus, OstreeDeployment

DIGEST = "sha256:" + "0f" * 32
Json = dict[str, Any]


def entry(number: int, *, transport: str = "registry", **more: object) -> Json:
    return {
        "image": {
            "image": {"image": f"quay.io/os/node:{number}", "transport": transport},
            "version": f"{number}.0",
            "timestamp": None,
            "imageDigest": f"sha256:{number:064}",
            "architecture": "amd64",
        },
        "cachedUpdate": None,
        "incompatible": False,
        "pinned": False,
        "store": "ostreeContainer",
        "ostree": {"stateroot": "default", "checksum": f"{number:x}" * 64, "deploySerial": 0},
    } | more


def status(**found: object) -> bytes:
    empty = {"staged": None, "booted": None, "rollback": None, "rollbackQueued": False}
    return json.dumps(
        {
            "apiVersion": "org.containers.bootc/v1",
            "kind": "BootcHost",
            "metadata": {"name": "host"},
            "spec": {"image": None, "bootOrder": "default"},
            "status": empty | found,
        }
    ).encode()


def test_parse_status_returns_boot_order() -> None:
    found = parse_status(
        status(staged=entry(3), booted=entry(2), rollback=entry(1), otherDeployments=[entry(4)])
    )
    deployments = DeploymentStatus(found.in_boot_order)
    assert [each.version for each in deployments.in_boot_order] == ["3.0", "2.0", "1.0", "4.0"]
    assert deployments.booted is found.booted
    assert deployments.staged is deployments.pending is found.staged
    assert deployments.rollback is found.rollback


def test_deployment_of_manifest_list_has_both_digests() -> None:
    listed = entry(1)
    listed["image"]["image"]["image"] = f"quay.io/os/node@{DIGEST}"
    deployment = parse_status(status(booted=listed)).booted
    assert (deployment.id, deployment.digest) == (DIGEST, f"sha256:{1:064}")
    assert deployment.list_digest == DIGEST
    assert [deployment.has_image(each) for each in (DIGEST, f"sha256:{1:064}", "")] == [
        True,
        True,
        False,
    ]


def test_parse_status_puts_queued_rollback_first() -> None:
    found = parse_status(status(booted=entry(2), rollback=entry(1), rollbackQueued=True))
    deployments = DeploymentStatus(found.in_boot_order)
    assert [each.version for each in deployments.in_boot_order] == ["1.0", "2.0"]
    assert deployments.pending is found.rollback


def test_parse_status_reads_all_fields() -> None:
    booted = entry(1, pinned=True, softRebootCapable=True, incompatible=True)
    found = parse_status(status(booted=booted))
    digest, checksum = booted["image"]["imageDigest"], "1" * 64
    assert found.booted == OstreeDeployment(
        id=digest,
        checksum=checksum,
        version="1.0",
        image="quay.io/os/node:1",
        digest=digest,
        is_booted=True,
        is_staged=False,
        is_locked=False,
        is_pinned=True,
        origin="quay.io/os/node:1",
        base_checksum=checksum,
        can_soft_reboot=True,
    )
    assert found.is_incompatible
    assert found.origin_path == f"/ostree/deploy/default/deploy/{checksum}.0.origin"


@pytest.mark.parametrize(
    ("transport", "image"),
    [
        ("registry", "quay.io/os/node:1"),
        ("containers-storage", "quay.io/os/node:1"),
        ("oci", "oci:quay.io/os/node:1"),
    ],
)
def test_parse_status_keeps_transport_other_than_registry(transport: str, image: str) -> None:
    assert parse_status(status(booted=entry(1, transport=transport))).booted.image == image


def test_downloaded_only_entry_is_locked() -> None:
    for only in (True, False):
        found = parse_status(status(booted=entry(1), staged=entry(2, downloadOnly=only)))
        assert found.staged.is_locked is only


def test_host_with_composefs_is_rejected() -> None:
    composefs = {"verity": "ab" * 32, "bootType": "Uki", "bootloader": "Systemd"}
    content = status(booted=entry(1, ostree=None, composefs=composefs))
    assert is_composefs(content)
    with pytest.raises(
        HostError, match="cannot manage this host: bootc uses its composefs back end"
    ):
        parse_status(content)
    for other in (status(booted=entry(1)), status(), b"no JSON"):
        assert not is_composefs(other)


def test_entry_without_image_has_id_of_its_commit() -> None:
    found = parse_status(status(booted=entry(1, image=None)))
    assert (found.booted.id, found.booted.image, found.booted.digest) == ("1" * 64, "", "")


def test_host_without_bootc_deployments_is_rejected() -> None:
    with pytest.raises(HostError, match="cannot manage this host with bootc") as caught:
        parse_status(status())
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is no JSON"),
        (b"\xff", "it is no JSON"),
        (b"[]", "apiVersion is None"),
        (b'{"apiVersion": "org.containers.bootc/v2"}', "apiVersion is 'org.containers.bootc/v2'"),
    ],
)
def test_invalid_status_is_rejected(content: bytes, message: str) -> None:
    with pytest.raises(HostError, match=message):
        parse_status(content)
