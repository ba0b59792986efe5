"""Behaviour that the agent relies on with every rpm-ostreed: the lab's, and a real host's.

For the latter set TREENAIL_TEST_OS_IMAGE to the pull spec, by digest, of an image that the host
may stage. It is staged, locked, and dropped again; nothing reboots.
"""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract.os_machines import go_on
from treenail.clocks import SystemClock
from treenail.deployment_change import DeploymentChange, split_arguments
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.ostree.backend_settings import TransactionLimits
from treenail.host.ostree.deployments import OstreeDeployment
from treenail.host.rpmostree.backend import RpmOstreeBackend
from treenail.host.rpmostree.client import RpmOstreeClient
from treenail.host.systemd.system_bus import SystemBus
from treenail_lab.images import make_image
from treenail_lab.machine.node.daemons import RpmOstreeHost

IMAGE = os.environ.get("TREENAIL_TEST_OS_IMAGE", "")
A = make_image("os/node", "1.0", 1_000_000)
B = make_image("os/node", "2.0", 1_000_000)
ARGUMENTS = ("treenail.test=1", "treenail.test=2", 'treenail.quoted="a b"')


@dataclass(frozen=True, slots=True)
class Host:
    """An rpm-ostreed on a bus, with nothing pending, and an image for it to stage."""

    root: Path
    bus: SystemBus
    image: str

    def os(self) -> RpmOstreeBackend:
        return RpmOstreeBackend(Machine(Root(self.root), clock=SystemClock(), bus=self.bus))

    def staged(self) -> OstreeDeployment:
        found = self.os().read_deployments().staged
        assert found is not None
        return found

    def arguments(self, *, pending: bool) -> tuple[str, ...]:
        daemon = RpmOstreeClient(
            self.bus, SystemClock(), TransactionLimits(), heartbeat=lambda: None
        )
        found = split_arguments(daemon.read_kernel_options(is_pending=pending))
        # The ostree= argument is unknown until the staged deployment is finalized.
        return tuple(each for each in found if not each.startswith("ostree="))


@pytest.fixture(
    params=[
        pytest.param("lab", marks=pytest.mark.integration),
        pytest.param(
            "host",
            marks=pytest.mark.skipif(not IMAGE, reason="TREENAIL_TEST_OS_IMAGE is not set"),
        ),
    ]
)
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    if request.param == "host":
        yield from _emptied(Host(Path("/"), SystemBus(), IMAGE))
        return
    with (
        tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder,
        RpmOstreeHost(Path(folder), booted=A, images=(B,)) as lab,
    ):
        yield from _emptied(Host(lab.root, SystemBus(lab.address), B.pull_spec))


def _emptied(host: Host) -> Iterator[Host]:
    before = host.os().read_deployments()
    assert before.booted is not None
    assert (before.pending, before.transaction) == (None, None), "something is pending already"
    yield host
    after = host.os().read_deployments()
    if after.staged is not None:
        host.os().drop_staged(after.staged.id)
    assert host.os().read_deployments() == before
    host.os().release_daemon()
    host.bus.close_connection()


def test_stage_of_image_is_locked_and_idempotent(host: Host) -> None:
    host.os().stage_deployment(DeploymentChange(image=host.image), watch=go_on)
    first = host.staged()
    host.os().stage_deployment(DeploymentChange(image=host.image), watch=go_on)
    assert host.staged() == first
    assert (first.digest, first.is_locked) == (host.image.partition("@")[2], True)


def test_stage_of_kernel_arguments_is_locked_and_reversible(host: Host) -> None:
    before = host.arguments(pending=False)
    host.os().stage_deployment(DeploymentChange(append_kargs=ARGUMENTS), watch=go_on)
    first = host.staged()
    host.os().stage_deployment(DeploymentChange(append_kargs=ARGUMENTS), watch=go_on)
    assert host.staged() == first
    assert first.is_locked
    assert host.arguments(pending=True) == (*before, *ARGUMENTS)
    assert host.arguments(pending=False) == before


def test_arguments_of_the_machine_keep_their_place(host: Host) -> None:
    before = host.arguments(pending=False)
    config = (before[0], *ARGUMENTS, before[0])
    added = DeploymentChange(append_kargs=config, keep_kargs=before[:1])
    host.os().stage_deployment(added, watch=go_on)
    assert host.arguments(pending=True) == (*before, *config)
    removed = DeploymentChange(delete_kargs=config, keep_kargs=before[:1])
    host.os().stage_deployment(removed, watch=go_on)
    assert host.arguments(pending=True) == before
    first = host.staged()
    host.os().stage_deployment(removed, watch=go_on)
    assert host.staged() == first


def test_image_and_kernel_arguments_are_one_deployment(host: Host) -> None:
    host.os().stage_deployment(
        DeploymentChange(image=host.image, append_kargs=ARGUMENTS[:1]), watch=go_on
    )
    staged = host.staged()
    assert (staged.digest, staged.is_locked) == (host.image.partition("@")[2], True)
    assert host.arguments(pending=True)[-1] == ARGUMENTS[0]


def test_drop_removes_staged_deployment(host: Host) -> None:
    host.os().stage_deployment(DeploymentChange(append_kargs=ARGUMENTS), watch=go_on)
    staged = host.staged()
    for _ in range(2):
        host.os().drop_staged(staged.id)
        assert host.os().read_deployments().staged is None
