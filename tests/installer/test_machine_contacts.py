"""Machines that have not joined, as the bootstrap host describes them."""

from pathlib import Path

import pytest

from treenail.installer.bootstrap.host_services import MachineContacts
from treenail.provisioning.machines.logged_requests import RequestOutcome, RequestRow

REGISTRY = "bootstrap.example:22625"
DIGEST = "sha256:" + "ab" * 32
LINE = '{} - - [23/Nov/2026:16:01:37 +0000] "{} /v2/os/node/{} HTTP/1.1" {} 557 "" "podman"\n'


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "registry-pull.log"


def make_row(
    address: str, outcome: RequestOutcome, reason: str = "", status: int = 200
) -> RequestRow:
    return RequestRow(
        0.0, address, "master", "", "", "3.4.0", outcome, "", status, 1, 0.1, "", reason
    )


def test_machine_without_a_request_is_described(log: Path) -> None:
    assert (
        MachineContacts(log).describe(REGISTRY)
        == "no machine has requested a config from this process"
    )


def test_machine_that_got_no_config_is_named_with_the_reason(log: Path) -> None:
    contacts = MachineContacts(log)
    contacts.record(make_row("192.0.2.1", RequestOutcome.FAILED, "a long text", 503))
    text = contacts.describe(REGISTRY)
    assert text == "192.0.2.1 requested the config before it was ready"
    contacts.record(make_row("192.0.2.1", RequestOutcome.INVALID, "the pool is missing", 404))
    text = contacts.describe(REGISTRY)
    assert text == "192.0.2.1 requested the config, and got none: the pool is missing"
    contacts.record(make_row("192.0.2.1", RequestOutcome.SERVED))
    assert contacts.describe("") == "192.0.2.1 got the config"


def test_machine_that_cannot_reach_the_registry_is_named_until_it_pulls(log: Path) -> None:
    contacts = MachineContacts(log)
    contacts.record(make_row("192.0.2.1", RequestOutcome.SERVED))
    # Neither a lookup, an unknown image, nor a half-written line is a pull.
    log.write_text(
        LINE.format("192.0.2.1", "HEAD", f"manifests/{DIGEST}", 200)
        + LINE.format("192.0.2.1", "GET", f"manifests/{DIGEST}", 401)
        + LINE.format("192.0.2.1", "GET", f"blobs/{DIGEST}", 200)
    )
    expected = f"192.0.2.1 got the config, and no machine has pulled its image from {REGISTRY}"
    assert contacts.describe(REGISTRY).startswith(expected)
    pull = LINE.format("192.0.2.1", "GET", f"manifests/{DIGEST}", 200)
    with log.open("a") as file:
        file.write(pull[:40])
    assert contacts.describe(REGISTRY).startswith(expected)
    with log.open("a") as file:
        file.write(pull[40:])
    pulled = f"192.0.2.1 pulled the image from {REGISTRY}, and must boot it"
    assert contacts.describe(REGISTRY) == pulled
    # A rotated log.
    log.write_text(LINE.format("192.0.2.2", "GET", f"manifests/{DIGEST}", 200))
    assert "192.0.2.1, 192.0.2.2 pulled" in contacts.describe(REGISTRY)
