"""What would make an update fail is told before the node is cordoned, and heals by itself."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.site import LAYERS, LIMIT_S, LOGIN, QUICK, SIZE, Options, Site
from tests.waiting import wait_until
from treenail.lab.images import make_image

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def options() -> Options:
    return Options(agent_settings=QUICK)


def policy(root: Path, *, broken: bool = False) -> None:
    path = root / "etc/containers/policy.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{" if broken else json.dumps({"default": [{"type": "reject"}]}))


def no_policy(root: Path) -> None:
    (root / "etc/containers/policy.json").unlink()


def no_fault(_root: Path) -> None:
    """The image is what is wrong."""


FAULTS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None], str]] = {
    "SignatureRejected": (policy, no_policy, ""),
    "SignaturePolicyUnusable": (lambda root: policy(root, broken=True), no_policy, ""),
    "RegistryTimeout": (no_fault, no_fault, "dial tcp 192.0.2.1:443: i/o timeout"),
    "RegistryUntrusted": (no_fault, no_fault, "x509: certificate signed by unknown authority"),
    "RegistryNameUnknown": (no_fault, no_fault, "dial tcp: lookup registry: no such host"),
    "WrongArchitecture": (no_fault, no_fault, "arm64"),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_a_fault_is_told_by_its_reason_and_cordons_nothing(site: Site, reason: str) -> None:
    spoil, mend, said = FAULTS[reason]
    image = make_image("os/node", reason, SIZE, layers=LAYERS, credential=LOGIN)
    bad = replace(image, faults={"inspect": said}) if said else image
    if said == "arm64":
        bad = replace(image, architecture="arm64")
    goal = site.goal(image=bad)
    spoil(site.machine.root)
    site.ask(goal)
    site.wait_degraded(f"the update can't begin: {reason}")
    assert not site.was_cordoned()
    assert site.machine.staged is None
    assert site.transactions("UpdateDeployment") == []
    assert site.booted() == site.current.image.digest
    wait_until(lambda: site.conditions().get("NodeDegraded") == "True", limit_s=LIMIT_S)
    mend(site.machine.root)
    site.lab.add_image(image)
    site.settle(goal)


def test_a_blocked_shutdown_is_waited_for(site: Site) -> None:
    goal = site.goal()
    with site.machine.inhibit_shutdown("backup", "copies"):
        site.ask(goal)
        site.wait_degraded("ShutdownInhibited", "backup")
        assert not site.was_cordoned()
    wait_until(lambda: site.booted() == goal.image.digest, limit_s=LIMIT_S)
    site.settle(goal)
