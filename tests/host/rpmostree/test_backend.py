"""rpm-ostree's D-Bus interface, spoken to a stand-in that behaves as rpm-ostreed does."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gi.repository import GLib

from tests.fakes.bus_service import BusService
from tests.fakes.clock import FakeClock
from tests.fakes.login1 import Login1
from treenail.clocks import SystemClock
from treenail.deployment_change import DeploymentChange
from treenail.errors import BusError, BusyError, CancelledError, HostError, TransactionError
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.ostree.backend_settings import TransactionLimits
from treenail.host.ostree.deployments import (
    DeploymentStatus,
    OstreeDeployment,
    TransactionProgress,
    TransactionVerdict,
)
from treenail.host.rpmostree.backend import RpmOstreeBackend
from treenail.host.rpmostree.client import TRANSACTION_INTERFACE
from treenail.host.systemd.system_bus import BusInterface, BusPeer, SystemBus, make_options
from treenail_lab.images import Credential, Image, make_image
from treenail_lab.machine.node.daemons import RpmOstreeHost
from treenail_lab.machine.settings import MachineSettings

pytestmark = pytest.mark.process

A = make_image("os/node", "1.0", 1_000_000)
B = make_image("os/node", "2.0", 1_000_000)
BROKEN = make_image(
    "os/node", "2.1", 1_000_000, faults={"pull": "GET https://me:secret@cdn.example/b: 500"}
)
SECRET = make_image(
    "os/secret", "1", 1000, registry="private.example", credential=Credential("me", "pw")
)
# So slow that no layer ends, and no progress arrives, within a test.
SLOW = MachineSettings(pull_bytes_per_s=1000)
BUS = BusInterface("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")
OS = BusInterface(
    "org.projectatomic.rpmostree1",
    "/org/projectatomic/rpmostree1/fedora_coreos",
    "org.projectatomic.rpmostree1.OS",
)


@pytest.fixture
def host() -> Iterator[RpmOstreeHost]:
    with (
        tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder,
        RpmOstreeHost(Path(folder), booted=A, images=(B, BROKEN, SECRET)) as host,
    ):
        yield host
    assert not GLib.MainContext.default().pending()


@pytest.fixture
def bus(host: RpmOstreeHost) -> Iterator[SystemBus]:
    bus = SystemBus(host.address)
    yield bus
    bus.close_connection()


@pytest.fixture
def machine(host: RpmOstreeHost, bus: SystemBus) -> Machine:
    return Machine(Root(host.root), clock=SystemClock(), bus=bus)


@pytest.fixture
def rpmostree(machine: Machine) -> RpmOstreeBackend:
    return RpmOstreeBackend(machine)


@pytest.fixture
def other(host: RpmOstreeHost) -> Iterator["Other"]:
    other = Other(host)
    yield other
    other.leave()


class Other:
    """Another client of rpm-ostree, which begins transactions and does not wait for them."""

    def __init__(self, host: RpmOstreeHost) -> None:
        self._root = Root(host.root)
        self._bus = SystemBus(host.address)
        self._peers: list[BusPeer] = []

    def begin(self, method: str, *arguments: object) -> None:
        address = self._bus.call_method(OS, method, *arguments, timeout_s=10)
        self._peers.append(BusPeer(str(address), TRANSACTION_INTERFACE, timeout_s=10))
        self._peers[-1].call_method("Start", timeout_s=10)

    def stage(self, image: Image) -> None:
        """As a person would, unlocked, and to its end."""
        refspec = f"ostree-unverified-registry:{image.pull_spec}"
        self.begin("Rebase", make_options({}), refspec, [])
        self.leave()
        own = RpmOstreeBackend(Machine(self._root, clock=SystemClock(), bus=self._bus))
        own.wait_for_other_transaction(watch=go_on)

    def leave(self) -> None:
        while self._peers:
            self._peers.pop().close_connection()
        self._bus.close_connection()


def go_on(_: TransactionProgress) -> TransactionVerdict:
    return TransactionVerdict.CONTINUE


def after_first_layer(
    verdict: TransactionVerdict,
) -> Callable[[TransactionProgress], TransactionVerdict]:
    return lambda progress: verdict if "Fetching" in progress.text else TransactionVerdict.CONTINUE


def of(image: Image, **changes: bool) -> OstreeDeployment:
    deployment = OstreeDeployment(
        id=f"fedora-coreos-{image.commit}.0",
        checksum=image.commit,
        version=image.version,
        image=image.pull_spec,
        digest=image.digest,
        is_booted=False,
        is_staged=False,
        is_locked=False,
        is_pinned=False,
        origin=f"ostree-unverified-registry:{image.pull_spec}",
        base_checksum=image.commit,
        labels={"org.opencontainers.image.version": image.version, "containers.bootc": "1"},
    )
    return replace(deployment, **changes)


TO_B = DeploymentChange(image=B.pull_spec)
HERE = of(A, is_booted=True)
STAGED = of(B, is_staged=True, is_locked=True)


def daemon_pid(bus: SystemBus) -> int:
    pid = bus.call_method(BUS, "GetConnectionUnixProcessID", OS.service, timeout_s=10)
    assert isinstance(pid, int)
    return pid


def test_new_machine_has_booted_deployment_and_no_transaction(
    rpmostree: RpmOstreeBackend,
) -> None:
    assert rpmostree.read_deployments() == DeploymentStatus((HERE,))


def test_stage_makes_locked_deployment_with_rising_progress(
    rpmostree: RpmOstreeBackend,
) -> None:
    seen: list[TransactionProgress] = []

    def watch(progress: TransactionProgress) -> TransactionVerdict:
        seen.append(progress)
        return TransactionVerdict.CONTINUE

    rpmostree.stage_deployment(TO_B, watch=watch)
    percents = [progress.percent for progress in seen if progress.percent is not None]
    assert rpmostree.read_deployments() == DeploymentStatus((STAGED, HERE))
    assert (percents, percents[-2:]) == (sorted(percents), [99, 100])
    assert {0, 25, 50, 75} <= set(percents)
    assert any(progress.text.startswith("[2/4] Fetching ostree chunk") for progress in seen)


def test_read_deployments_shows_end_of_transaction_at_once(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend
) -> None:
    """Finished comes before PropertiesChanged: without Reload, the old state would be seen."""
    host.change_settings(MachineSettings(properties_lag_s=600))
    rpmostree.stage_deployment(TO_B, watch=go_on)
    assert rpmostree.read_deployments().staged == STAGED


def test_transaction_has_ended_for_others_when_stage_returns(rpmostree: RpmOstreeBackend) -> None:
    """A peer that is not closed would keep the daemon busy for half a minute."""
    rpmostree.stage_deployment(TO_B, watch=go_on)
    rpmostree.drop_staged(STAGED.id)
    rpmostree.stage_deployment(TO_B, watch=go_on)
    assert rpmostree.read_deployments() == DeploymentStatus((STAGED, HERE))


def test_stage_of_staged_image_stages_nothing(rpmostree: RpmOstreeBackend) -> None:
    rpmostree.stage_deployment(TO_B, watch=go_on)
    seen: list[TransactionProgress] = []
    rpmostree.stage_deployment(
        TO_B, watch=lambda progress: seen.append(progress) or TransactionVerdict.CONTINUE
    )
    assert seen == []


def test_stage_of_image_that_needs_signature_verifies_it(machine: Machine) -> None:
    asked: list[str] = []
    rpmostree = RpmOstreeBackend(
        machine, needs_signature=lambda image: not asked.append(image) and True
    )
    rpmostree.stage_deployment(TO_B, watch=go_on)
    staged = rpmostree.read_deployments().staged
    assert staged.origin == f"ostree-image-signed:docker://{B.pull_spec}"
    assert (staged.image, asked) == (B.pull_spec, [B.pull_spec])


@pytest.mark.parametrize(
    ("image", "text", "remedy"),
    [
        (
            f"{A.registry}/os/node@sha256:{'0' * 64}",
            "reading manifest sha256:0+ in registry.lab.example/os/node: manifest unknown",
            "check that the registry has the image by this digest",
        ),
        (
            SECRET.pull_spec,
            "unauthorized: authentication required",
            "check the pull secret for the image's registry",
        ),
        (BROKEN.pull_spec, "GET https://cdn.example/b: 500", "see: journalctl -u rpm-ostreed"),
    ],
)
def test_failed_stage_has_cause_and_remedy(
    rpmostree: RpmOstreeBackend, image: str, text: str, remedy: str
) -> None:
    with pytest.raises(TransactionError, match=f"cannot stage {image}: .*{text}$") as caught:
        rpmostree.stage_deployment(DeploymentChange(image=image), watch=go_on)
    assert caught.value.remedy == remedy
    assert rpmostree.read_deployments() == DeploymentStatus((HERE,))


def test_stage_during_other_transaction_is_busy_and_names_it(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend, other: Other
) -> None:
    host.change_settings(MachineSettings(refresh_md_s=600))
    other.begin("RefreshMd", {})
    with pytest.raises(BusyError, match=rf"busy with RefreshMd, called by process {os.getpid()} "):
        rpmostree.stage_deployment(TO_B, watch=go_on)


def test_busy_error_names_transaction_whose_caller_left(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend, other: Other
) -> None:
    host.change_settings(MachineSettings(refresh_md_s=600))
    other.begin("RefreshMd", {})
    other.leave()
    with pytest.raises(
        BusyError, match=r"busy with RefreshMd, called by :1\.\d+, which left the bus"
    ):
        rpmostree.stage_deployment(TO_B, watch=go_on)


def test_wait_for_other_transaction_returns_at_its_end(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend, other: Other
) -> None:
    host.change_settings(MachineSettings(refresh_md_s=0.3))
    other.begin("RefreshMd", {})
    other.leave()
    seen: list[str] = []
    assert rpmostree.wait_for_other_transaction(
        watch=lambda said: seen.append(said.text) or TransactionVerdict.CONTINUE
    )
    assert rpmostree.read_deployments().transaction is None
    assert seen


def test_wait_without_transaction_returns_false_at_once(rpmostree: RpmOstreeBackend) -> None:
    assert not rpmostree.wait_for_other_transaction(watch=go_on)
    assert rpmostree.read_deployments() == DeploymentStatus((HERE,))


@pytest.mark.parametrize("verdict", [TransactionVerdict.CANCEL, TransactionVerdict.DETACH])
def test_other_transaction_is_never_cancelled(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend, other: Other, verdict: TransactionVerdict
) -> None:
    host.change_settings(MachineSettings(refresh_md_s=600))
    other.begin("RefreshMd", {})
    before = rpmostree.read_deployments().transaction
    rpmostree.wait_for_other_transaction(watch=lambda _: verdict)
    assert before
    assert rpmostree.read_deployments().transaction == before


def test_other_transaction_beyond_limits_is_busy_and_continues(
    host: RpmOstreeHost, bus: SystemBus, other: Other
) -> None:
    clock = FakeClock()
    rpmostree = RpmOstreeBackend(
        Machine(Root(host.root), clock=clock, bus=bus, limits=TransactionLimits(transaction_s=60))
    )
    host.change_settings(MachineSettings(refresh_md_s=600))
    other.begin("RefreshMd", {})
    before = rpmostree.read_deployments().transaction
    with pytest.raises(BusyError, match=r"RefreshMd.*: no end within 60 s"):
        rpmostree.wait_for_other_transaction(
            watch=lambda _: clock.move(61) or TransactionVerdict.CONTINUE
        )
    assert rpmostree.read_deployments().transaction == before


def test_cancelled_stage_leaves_nothing(host: RpmOstreeHost, rpmostree: RpmOstreeBackend) -> None:
    host.change_settings(SLOW)
    with pytest.raises(CancelledError, match=r"did not stage .* it was cancelled"):
        rpmostree.stage_deployment(TO_B, watch=after_first_layer(TransactionVerdict.CANCEL))
    assert rpmostree.read_deployments() == DeploymentStatus((HERE,))


def test_stage_cancelled_by_another_client_is_cancelled(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend, bus: SystemBus
) -> None:
    host.change_settings(SLOW)
    cancelled: list[object] = []

    def watch(progress: TransactionProgress) -> TransactionVerdict:
        if "Fetching" in progress.text and not cancelled:
            address = f"unix:path={host.root}/run/rpm-ostree-transaction.sock"
            with BusPeer(address, TRANSACTION_INTERFACE, timeout_s=10) as peer:
                cancelled.append(peer.call_method("Cancel", timeout_s=10))
        return TransactionVerdict.CONTINUE

    with pytest.raises(CancelledError):
        rpmostree.stage_deployment(TO_B, watch=watch)


def test_detached_stage_continues_and_is_joined(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend
) -> None:
    host.change_settings(MachineSettings(pull_bytes_per_s=1_000_000))
    with pytest.raises(
        CancelledError, match=f"stopped waiting for rpm-ostree to stage {B.pull_spec}"
    ):
        rpmostree.stage_deployment(TO_B, watch=after_first_layer(TransactionVerdict.DETACH))
    left = rpmostree.read_deployments().transaction
    rpmostree.stage_deployment(TO_B, watch=go_on)
    assert (left.method, rpmostree.read_deployments()) == (
        "UpdateDeployment",
        DeploymentStatus((STAGED, HERE)),
    )


def test_stage_of_killed_program_is_joined(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend
) -> None:
    host.change_settings(MachineSettings(pull_bytes_per_s=700_000))
    program = f"""
from treenail.clocks import SystemClock
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.ostree.deployments import TransactionVerdict
from treenail.deployment_change import DeploymentChange
from treenail.host.rpmostree.backend import RpmOstreeBackend
def watch(progress):
    print(progress.text, flush=True)
    return TransactionVerdict.CONTINUE
machine = Machine(Root("{host.root}"), clock=SystemClock())
RpmOstreeBackend(machine).stage_deployment(DeploymentChange("{B.pull_spec}"), watch=watch)
"""
    environment = {**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": host.address}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any("Fetching" in line for line in process.stdout)
        process.kill()
    orphaned = rpmostree.read_deployments()
    seen: list[str] = []
    rpmostree.stage_deployment(
        TO_B, watch=lambda said: seen.append(said.text) or TransactionVerdict.CONTINUE
    )
    assert orphaned.transaction is not None
    assert not any("Pulling manifest" in text for text in seen)
    assert rpmostree.read_deployments() == DeploymentStatus((STAGED, HERE))


def test_daemon_killed_during_stage_is_a_bus_error(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend, bus: SystemBus
) -> None:
    host.change_settings(SLOW)

    def watch(progress: TransactionProgress) -> TransactionVerdict:
        if "Fetching" in progress.text:
            os.kill(daemon_pid(bus), signal.SIGKILL)
        return TransactionVerdict.CONTINUE

    with pytest.raises(BusError, match=r"cannot stage .*: rpm-ostreed exited"):
        rpmostree.stage_deployment(TO_B, watch=watch)
    assert rpmostree.read_deployments() == DeploymentStatus((HERE,))


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (TransactionLimits(transaction_s=50), "no end within 50 s"),
        (TransactionLimits(stall_s=50), "no progress for 50 s"),
    ],
)
def test_stage_beyond_limits_is_cancelled(
    host: RpmOstreeHost, bus: SystemBus, limits: TransactionLimits, why: str
) -> None:
    clock = FakeClock()
    rpmostree = RpmOstreeBackend(Machine(Root(host.root), clock=clock, bus=bus, limits=limits))
    host.change_settings(SLOW)

    def watch(progress: TransactionProgress) -> TransactionVerdict:
        clock.move(51 if "Fetching" in progress.text else 0)
        return TransactionVerdict.CONTINUE

    with pytest.raises(TransactionError, match=f"cannot stage .*: {why}$"):
        rpmostree.stage_deployment(TO_B, watch=watch)
    assert rpmostree.read_deployments() == DeploymentStatus((HERE,))


def test_stage_with_pending_deployment_of_another_is_refused(
    rpmostree: RpmOstreeBackend, other: Other
) -> None:
    other.stage(B)
    with pytest.raises(HostError, match=f"{B.pull_spec} is pending; it is staged and not locked"):
        rpmostree.stage_deployment(TO_B, watch=go_on)
    rpmostree.drop_staged(STAGED.id)
    rpmostree.stage_deployment(TO_B, watch=go_on)
    assert rpmostree.read_deployments() == DeploymentStatus((STAGED, HERE))


def test_drop_keeps_deployment_of_another(rpmostree: RpmOstreeBackend, other: Other) -> None:
    other.stage(B)
    rpmostree.drop_staged(HERE.id)
    staged = rpmostree.read_deployments().staged
    assert staged.digest == B.digest


def test_drop_of_nothing_does_nothing(rpmostree: RpmOstreeBackend) -> None:
    rpmostree.drop_staged(STAGED.id)
    assert rpmostree.read_deployments() == DeploymentStatus((HERE,))


def test_drop_cancels_own_transaction_first(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend
) -> None:
    host.change_settings(SLOW)
    with pytest.raises(
        CancelledError, match=f"stopped waiting for rpm-ostree to stage {B.pull_spec}"
    ):
        rpmostree.stage_deployment(TO_B, watch=after_first_layer(TransactionVerdict.DETACH))
    rpmostree.drop_staged(STAGED.id)
    assert rpmostree.read_deployments() == DeploymentStatus((HERE,))


def test_finalize_unlocks_and_reboots_and_is_idempotent(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend, bus: SystemBus
) -> None:
    login1 = Login1()
    objects = {"/org/freedesktop/login1": login1}
    rpmostree.stage_deployment(TO_B, watch=go_on)
    with BusService(host.address, "org.freedesktop.login1", objects):
        rpmostree.finalize_staged(STAGED.id)
        unlocked = rpmostree.read_deployments()
        # As after a kill of rpm-ostreed between the unlock and the reboot.
        os.kill(daemon_pid(bus), signal.SIGKILL)
        rpmostree.finalize_staged(STAGED.id)
        rpmostree.read_deployments()
    assert unlocked.staged == replace(STAGED, is_locked=False)
    assert login1.reboots == 2


def test_finalize_of_other_deployment_is_refused(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend
) -> None:
    rpmostree.stage_deployment(TO_B, watch=go_on)
    login1 = Login1()
    with (
        BusService(host.address, "org.freedesktop.login1", {"/org/freedesktop/login1": login1}),
        pytest.raises(HostError, match=f"cannot reboot into {HERE.id}: {STAGED.id} is staged"),
    ):
        rpmostree.finalize_staged(HERE.id)
    assert (login1.reboots, rpmostree.read_deployments().staged) == (0, STAGED)


def test_finalize_under_block_inhibitor_is_refused(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend
) -> None:
    rpmostree.stage_deployment(TO_B, watch=go_on)
    login1 = Login1(("shutdown", "backup", "running", "block", 0, 1))
    with (
        BusService(host.address, "org.freedesktop.login1", {"/org/freedesktop/login1": login1}),
        pytest.raises(TransactionError, match="Held by: backup") as caught,
    ):
        rpmostree.finalize_staged(STAGED.id)
    assert caught.value.remedy == "see who holds it with: systemd-inhibit --list"
    assert (login1.reboots, rpmostree.read_deployments().staged) == (0, STAGED)


def test_released_daemon_exits_and_is_activated_again(
    host: RpmOstreeHost, bus: SystemBus, rpmostree: RpmOstreeBackend
) -> None:
    host.change_settings(MachineSettings(idle_exit_s=0.2))
    rpmostree.read_deployments()
    first = daemon_pid(bus)
    with bus.receive_signals(BUS) as signals:
        rpmostree.release_daemon()
        signals.run_until(
            lambda said: said is not None and said.values == (OS.service, said.values[1], "")
        )
    rpmostree.release_daemon()
    assert not bus.call_method(BUS, "NameHasOwner", OS.service, timeout_s=10)
    assert rpmostree.read_deployments() == DeploymentStatus((HERE,))
    assert daemon_pid(bus) != first
