"""Causes of a failing update are reported before the node is cordoned, and retried."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import pytest

from tests.integration.commands import status
from tests.integration.site import LIMIT_S, LOGIN, QUICK, SIZE, Options, Site
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.log import MessageId
from treenail_lab.images import (
    ARCHITECTURE,
    CatalogueLayer,
    Credential,
    Image,
    make_image,
    make_manifest_list,
)

pytestmark = pytest.mark.integration


HUGE = 10**17


@pytest.fixture(scope="module", params=["rpm-ostree", "bootc"])
def options(request: pytest.FixtureRequest) -> Options:
    return Options(agent_settings=QUICK, backend=request.param)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the machine or of the image."""

    policy: object = None
    """The signature policy, if there is one."""
    said: str = ""
    """What the registry says."""
    image: Mapping[str, object] = field(default_factory=dict)
    """What differs of the image."""
    driver: bool = False
    """Another program updates the machine."""


FAULTS: dict[str, Fault] = {
    "SignatureRejected": Fault(policy={"default": [{"type": "reject"}]}),
    "SignaturePolicyUnusable": Fault(policy="not what it should be"),
    "SignatureKeyMissing": Fault(
        policy={"default": [{"type": "sigstoreSigned", "keyPath": "/etc/pki/node.pub"}]}
    ),
    "RegistryTimeout": Fault(said="dial tcp 192.0.2.1:443: i/o timeout"),
    "RegistryUntrusted": Fault(said="x509: certificate signed by unknown authority"),
    "RegistryNameUnknown": Fault(said="dial tcp: lookup registry: no such host"),
    "RegistryUnreachable": Fault(said="dial tcp 192.0.2.1:443: connect: connection refused"),
    "RegistryCertificateExpired": Fault(said="x509: certificate has expired"),
    "ClockBehindCertificate": Fault(
        said="x509: certificate is not yet valid: current time 2026-01-01T00:00:00Z is before 2027"
    ),
    "RegistryUnauthorized": Fault(image={"credential": Credential("another", "password")}),
    "RegistryForbidden": Fault(said="denied: requested access to the resource is denied"),
    "RegistryFailed": Fault(said="received unexpected HTTP status: 500 Internal Server Error"),
    "ImageNotFound": Fault(said="reading manifest: manifest unknown"),
    "ImageNotBootable": Fault(image={"labels": {"containers.bootc": ""}}),
    "WrongArchitecture": Fault(image={"architecture": "arm64"}),
    "ClockBehindImage": Fault(image={"timestamp": 4_000_000_000}),
    "NoSpaceOnSysroot": Fault(image={"layers": (CatalogueLayer("sha256:" + "1" * 64, HUGE),)}),
    "OtherUpdateDriver": Fault(driver=True),
}


@contextmanager
def at_fault(site: Site, fault: Fault) -> Iterator[None]:
    """Within, the machine has the fault."""
    policy = site.machine.root / "etc/containers/policy.json"
    driver = site.machine.root / "run/rpm-ostree/update-driver.gv"
    if fault.policy:
        policy.parent.mkdir(parents=True, exist_ok=True)
        policy.write_text(json.dumps(fault.policy))
    if fault.driver:
        driver.parent.mkdir(parents=True, exist_ok=True)
        driver.write_bytes(b"updater\0chronyd.service\0")
    try:
        yield
    finally:
        policy.unlink(missing_ok=True)
        driver.unlink(missing_ok=True)


# With bootc the probes are the same, except those that read its storage and its credentials.
OF_BACKEND = {"SignatureRejected", "RegistryUnauthorized", "ImageNotBootable", "NoSpaceOnSysroot"}
# tests/host/container/test_registry.py recognizes each of skopeo's sentences.
OF_REGISTRY = {
    "RegistryTimeout",
    "RegistryUntrusted",
    "RegistryNameUnknown",
    "RegistryUnreachable",
    "RegistryCertificateExpired",
    "RegistryForbidden",
    "ClockBehindCertificate",
    "RegistryFailed",
}
# tests/daemon/checks/test_preflight.py finds each on a real file system.
OF_MACHINE = {"SignaturePolicyUnusable", "SignatureKeyMissing"}


def choose_marks(reason: str) -> Sequence[pytest.MarkDecorator]:
    if reason in OF_REGISTRY | OF_MACHINE:
        return [pytest.mark.long]
    return [] if reason in OF_BACKEND else [pytest.mark.long("bootc")]


REASONS = [pytest.param(each, marks=choose_marks(each)) for each in FAULTS]


@pytest.mark.parametrize("reason", REASONS)
def test_preflight_failure_is_reported_and_cordons_nothing(site: Site, reason: str) -> None:
    fault = FAULTS[reason]
    image = make_image("os/node", reason, SIZE, credential=LOGIN)
    bad = replace(image, **fault.image, faults={"inspect": fault.said} if fault.said else {})
    former, goal = site.current, site.goal(image=bad)
    with at_fault(site, fault):
        site.ask(goal)
        site.wait_degraded(f"cannot start the update: {reason}")
        assert not site.was_cordoned()
        assert site.machine.staged_deployment is None
        assert site.transactions("UpdateDeployment") == []
        stored = site.machine.root / "var/lib/containers/storage/images.json"
        assert not stored.exists() or image.pull_spec not in stored.read_text()
        assert site.booted() == site.current.image.digest
        wait_until(lambda: site.conditions().get("NodeDegraded") == "True", limit_s=LIMIT_S)
    if site.backend == "bootc":
        # Its programs start slowly; the same retry finds that the cause is fixed.
        site.reach(former)
        return
    site.lab.add_image(image)
    site.settle(goal)


def make_listed_images(version: str, *architectures: str) -> tuple[Image, ...]:
    images = (
        make_image("os/node", version, SIZE, layers=1, architecture=each, credential=LOGIN)
        for each in architectures
    )
    return make_manifest_list(*images)


@pytest.mark.long("bootc")
def test_manifest_list_leads_to_the_manifest_of_this_platform(site: Site) -> None:
    here, elsewhere = make_listed_images("listed", ARCHITECTURE, "s390x")
    site.lab.add_image(elsewhere)
    goal = site.goal(image=here)
    site.reach(goal)
    assert site.booted() == here.digest
    assert site.notes()[key.CURRENT_OS_IMAGE] == here.list_pull_spec
    assert site.notes()[key.BOOTED_DIGEST] == here.digest
    assert f"of manifest list {here.list_digest}" in status(site).stdout
    assert site.machine.boot_count == site.boots + 1


def test_manifest_list_without_this_platform_is_refused_in_service(site: Site) -> None:
    former = site.current
    (elsewhere,) = make_listed_images("foreign", "s390x")
    site.ask(site.goal(image=elsewhere))
    reason = site.wait_degraded("WrongArchitecture")
    expected = f"is a manifest list without linux/{ARCHITECTURE}, the platform of this machine"
    assert f"{elsewhere.list_pull_spec} {expected}; it has linux/s390x" in reason
    assert not site.was_cordoned()
    site.reach(former)


@pytest.mark.long("bootc")
def test_agent_waits_for_blocked_shutdown(site: Site) -> None:
    goal = site.goal()
    with site.machine.inhibit_shutdown("backup", "copies"):
        site.ask(goal)
        site.wait_degraded("ShutdownInhibited", "backup")
        assert not site.was_cordoned()
    wait_until(lambda: site.booted() == goal.image.digest, limit_s=LIMIT_S)
    site.settle(goal)


def test_failure_during_pull_cordons_nothing(site: Site) -> None:
    goal = site.goal()
    with ExitStack() as locks:
        with site.slow_pull():
            site.ask(goal)
            site.wait_progress()
            locks.enter_context(site.machine.inhibit_shutdown("backup", "copies"))
        site.wait_degraded("ShutdownInhibited", "backup")
        assert not site.was_cordoned()
        assert site.phase() == "staging"
        assert site.messages(MESSAGE_ID=MessageId.STAGED)
    site.settle(goal)
