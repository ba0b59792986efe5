"""Image, kernel arguments and packages, staged together in one locked deployment."""

import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.bus_service import BusService
from tests.fakes.login1 import NAME, PATH, Login1
from treenail.clocks import SystemClock
from treenail.deployment_change import DeploymentChange, split_arguments
from treenail.errors import BusError, BusyError, HostError, TransactionError
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.ostree.deployments import TransactionProgress, TransactionVerdict
from treenail.host.rpmostree.backend import RpmOstreeBackend
from treenail.host.systemd.system_bus import BusInterface, SystemBus
from treenail_lab.images import make_image
from treenail_lab.machine.node.daemons import RpmOstreeHost
from treenail_lab.machine.ostree.sysroot import SysrootDeployment
from treenail_lab.machine.settings import MachineSettings

pytestmark = pytest.mark.process

A = make_image("os/node", "1.0", 1_000_000)
B = make_image("os/node", "2.0", 1_000_000, labels={"machineconfig": "rendered-worker-2"})
REALTIME = DeploymentChange(
    install_packages=("kernel-rt-core", "kernel-rt-modules"),
    override_remove=("kernel", "kernel-core"),
)
ALL = DeploymentChange(
    image=B.pull_spec,
    append_kargs=("nosmt", "hugepagesz=2M", "hugepages=4"),
    delete_kargs=("console=ttyS0", "gone"),
    install_packages=("usbguard", *REALTIME.install_packages),
    override_remove=REALTIME.override_remove,
)
QUICK = MachineSettings(staging_s=0.02)
_NAME = "org.projectatomic.rpmostree1"
BUS = BusInterface("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")


@pytest.fixture
def host() -> Iterator[RpmOstreeHost]:
    with (
        tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder,
        RpmOstreeHost(Path(folder), booted=A, images=(B,), settings=QUICK) as host,
    ):
        yield host


@pytest.fixture
def bus(host: RpmOstreeHost) -> Iterator[SystemBus]:
    bus = SystemBus(host.address)
    yield bus
    bus.close_connection()


@pytest.fixture
def rpmostree(host: RpmOstreeHost, bus: SystemBus) -> RpmOstreeBackend:
    return RpmOstreeBackend(Machine(Root(host.root), clock=SystemClock(), bus=bus))


def go_on(_: TransactionProgress) -> TransactionVerdict:
    return TransactionVerdict.CONTINUE


def staged(host: RpmOstreeHost) -> SysrootDeployment:
    found = host.sysroot.read_staged()
    assert found is not None
    assert host.sysroot.is_staged_locked()
    return found


def booted_with(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend, change: DeploymentChange
) -> SysrootDeployment:
    """Stage the change and boot into it; returns what is booted."""
    rpmostree.stage_deployment(change, watch=go_on)
    host.sysroot.unlock_staged()
    host.reboot()
    found = host.sysroot.find_booted()
    assert found is not None
    return found


def refuse_the_second(host: RpmOstreeHost) -> MachineSettings:
    """Settings under which rpm-ostreed cannot stage."""
    settings = replace(QUICK, staging_error="No space left on device")
    host.change_settings(settings)
    return settings


def test_result_of_failed_sanity_check_is_dropped(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend
) -> None:
    host.change_settings(replace(QUICK, sanity_error="bwrap(/usr/bin/true): exit code 1"))
    for _ in range(2):
        with pytest.raises(TransactionError, match="Sanity-checking final rootfs"):
            rpmostree.stage_deployment(ALL, watch=go_on)
        assert host.sysroot.read_staged() is None


def test_stage_of_all_changes_makes_one_deployment(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend
) -> None:
    rpmostree.stage_deployment(ALL, watch=go_on)
    found = staged(host)
    assert (found.digest, found.base) == (B.digest, B.commit)
    assert found.packages == ALL.install_packages
    assert found.removals == ALL.override_remove
    assert found.kernel_arguments == (
        "root=LABEL=root", "rw", "ignition.platform.id=lab", *ALL.append_kargs,
    )  # fmt: skip
    assert [each.is_booted for each in rpmostree.read_deployments().in_boot_order] == [False, True]


def test_reboot_boots_all_changes_at_once(host: RpmOstreeHost, rpmostree: RpmOstreeBackend) -> None:
    booted_with(host, rpmostree, ALL)
    found = rpmostree.read_deployments().booted
    assert (found.digest, found.requested_packages, found.requested_base_removals) == (
        B.digest,
        ALL.install_packages,
        ALL.override_remove,
    )
    command_line = split_arguments((host.root / "proc/cmdline").read_text())
    assert command_line[-4:-1] == ALL.append_kargs
    assert "console=ttyS0" not in command_line


def test_stage_of_booted_change_stages_nothing(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend
) -> None:
    booted_with(host, rpmostree, ALL)
    rpmostree.stage_deployment(ALL, watch=go_on)
    assert host.sysroot.read_staged() is None


def test_stage_of_staged_change_stages_nothing(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend
) -> None:
    rpmostree.stage_deployment(ALL, watch=go_on)
    first = staged(host)
    rpmostree.stage_deployment(ALL, watch=go_on)
    assert staged(host) == first


@pytest.mark.parametrize(
    "change",
    [
        DeploymentChange(append_kargs=("nosmt", "a=1"), delete_kargs=("gone",)),
        DeploymentChange(delete_kargs=("console=ttyS0",)),
    ],
)
def test_stage_of_kernel_arguments_keeps_the_image(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend, change: DeploymentChange
) -> None:
    before = host.sysroot.find_booted()
    rpmostree.stage_deployment(change, watch=go_on)
    kept = tuple(each for each in before.kernel_arguments if each not in change.delete_kargs)
    assert staged(host) == replace(before, serial=1, kernel_arguments=(*kept, *change.append_kargs))


def test_kernel_arguments_keep_order_and_repetitions(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend
) -> None:
    old = ("hugepagesz=1G", "hugepages=4", "hugepagesz=2M", "hugepages=4")
    new = ("hugepagesz=1G", "hugepages=4", "hugepagesz=2M", "hugepages=6", 'a="b c"')
    booted_with(host, rpmostree, DeploymentChange(append_kargs=old))
    rpmostree.stage_deployment(DeploymentChange(append_kargs=new, delete_kargs=old), watch=go_on)
    assert staged(host).kernel_arguments[-5:] == new


def test_kernel_type_changes_to_realtime_and_back(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend
) -> None:
    realtime = booted_with(host, rpmostree, REALTIME)
    back = DeploymentChange(
        uninstall_packages=REALTIME.install_packages, override_reset=REALTIME.override_remove
    )
    stock = booted_with(host, rpmostree, back)
    assert (realtime.packages, realtime.removals) == (
        REALTIME.install_packages,
        REALTIME.override_remove,
    )
    assert (stock.packages, stock.removals, stock.checksum) == ((), (), A.commit)


def test_stock_image_and_all_resets_need_one_reboot(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend
) -> None:
    booted_with(host, rpmostree, ALL)
    stock = booted_with(
        host,
        rpmostree,
        DeploymentChange(
            image=A.pull_spec,
            append_kargs=("console=ttyS0",),
            delete_kargs=ALL.append_kargs,
            uninstall_packages=ALL.install_packages,
            override_reset=ALL.override_remove,
        ),
    )
    assert (stock.checksum, stock.packages, stock.removals) == (A.commit, (), ())
    assert stock.kernel_arguments == (
        "root=LABEL=root", "rw", "ignition.platform.id=lab", "console=ttyS0",
    )  # fmt: skip


def test_stage_after_interruption_continues(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend, bus: SystemBus
) -> None:
    """Image and packages are staged; the daemon dies before the kernel arguments are."""

    def watch(progress: TransactionProgress) -> TransactionVerdict:
        if progress.percent == 100:
            # The second transaction must not end before the kill, however slow this process is.
            host.change_settings(replace(QUICK, staging_s=600.0))
        elif host.sysroot.read_staged() is not None and progress.percent is None:
            pid = bus.call_method(BUS, "GetConnectionUnixProcessID", _NAME, timeout_s=10)
            assert isinstance(pid, int)
            os.kill(pid, signal.SIGKILL)
        return TransactionVerdict.CONTINUE

    with pytest.raises(BusError):
        rpmostree.stage_deployment(ALL, watch=watch)
    half = staged(host)
    assert (half.digest, "nosmt" in half.kernel_arguments) == (B.digest, False)
    host.change_settings(QUICK)
    rpmostree.stage_deployment(ALL, watch=go_on)
    assert staged(host).kernel_arguments[-3:] == ALL.append_kargs


def test_failed_kernel_arguments_leave_locked_image(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend
) -> None:
    def watch(progress: TransactionProgress) -> TransactionVerdict:
        if progress.percent == 100:
            refuse_the_second(host)
        return TransactionVerdict.CONTINUE

    with pytest.raises(TransactionError, match=r"cannot stage .* and packages and kernel arg"):
        rpmostree.stage_deployment(ALL, watch=watch)
    assert staged(host).digest == B.digest


def test_staged_deployment_that_differs_is_dropped(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend
) -> None:
    def watch(progress: TransactionProgress) -> TransactionVerdict:
        if progress.percent == 100:
            host.sysroot.stage_deployment(replace(staged(host), packages=("strace",)), locked=True)
        return TransactionVerdict.CONTINUE

    with pytest.raises(
        TransactionError, match=r"did not stage packages: it lacks usbguard, and it has strace$"
    ):
        rpmostree.stage_deployment(DeploymentChange(install_packages=("usbguard",)), watch=watch)
    assert host.sysroot.read_staged() is None


def test_staged_deployment_with_other_kernel_arguments_is_dropped(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend
) -> None:
    def watch(progress: TransactionProgress) -> TransactionVerdict:
        if progress.percent == 100:
            wrong = replace(staged(host), kernel_arguments=("rw", "nosmt", "nosmt"))
            host.sysroot.stage_deployment(wrong, locked=True)
        return TransactionVerdict.CONTINUE

    with pytest.raises(TransactionError, match=r"it has the kernel arguments rw nosmt nosmt"):
        rpmostree.stage_deployment(DeploymentChange(append_kargs=("nosmt",)), watch=watch)
    assert host.sysroot.read_staged() is None


def test_stage_with_other_pending_deployment_is_refused(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend
) -> None:
    rpmostree.stage_deployment(
        DeploymentChange(image=B.pull_spec, install_packages=("strace",)), watch=go_on
    )
    before = staged(host)
    with pytest.raises(HostError) as caught:
        rpmostree.stage_deployment(
            DeploymentChange(install_packages=("usbguard",), override_remove=("kernel",)),
            watch=go_on,
        )
    assert str(caught.value) == (
        f"cannot stage packages: {B.pull_spec} is pending; it is of {B.pull_spec}, not "
        f"{A.pull_spec}, and it lacks usbguard, and it has strace, and it has not left out kernel"
    )
    assert staged(host) == before


def test_stage_with_running_transaction_is_busy(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend
) -> None:
    rpmostree.stage_deployment(DeploymentChange(image=B.pull_spec), watch=go_on)
    host.change_settings(replace(QUICK, refresh_md_s=600))
    other = SystemBus(host.address)
    os_target = BusInterface(_NAME, "/org/projectatomic/rpmostree1/fedora_coreos", f"{_NAME}.OS")
    other.call_method(os_target, "RefreshMd", {}, timeout_s=10)
    with pytest.raises(BusyError, match="busy with RefreshMd"):
        rpmostree.stage_deployment(DeploymentChange(install_packages=("usbguard",)), watch=go_on)
    other.close_connection()


def test_stage_of_missing_packages_names_them(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend
) -> None:
    host.change_settings(replace(QUICK, missing_packages=("usbguard",)))
    with pytest.raises(TransactionError, match="cannot stage packages: Packages not found: usb"):
        rpmostree.stage_deployment(DeploymentChange(install_packages=("usbguard",)), watch=go_on)
    assert rpmostree.read_deployments().staged is None


@pytest.mark.parametrize("by_commit", [False, True])
@pytest.mark.parametrize(
    "change",
    [ALL, DeploymentChange(append_kargs=("nosmt",)), REALTIME, DeploymentChange(image=B.pull_spec)],
)
def test_finalize_accepts_every_staged_change(
    host: RpmOstreeHost, rpmostree: RpmOstreeBackend, change: DeploymentChange, *, by_commit: bool
) -> None:
    """Newer daemons know a deployment by its image's digest, older ones by its commit."""
    host.change_settings(replace(QUICK, finalizes_by_commit=by_commit))
    login1 = Login1()
    with BusService(host.address, NAME, {PATH: login1}):
        rpmostree.stage_deployment(change, watch=go_on)
        rpmostree.finalize_staged(staged(host).id)
        rpmostree.read_deployments()
    assert (login1.reboots, host.sysroot.is_staged_locked()) == (1, False)


def test_staged_deployment_has_labels_of_the_image(rpmostree: RpmOstreeBackend) -> None:
    rpmostree.stage_deployment(ALL, watch=go_on)
    found = rpmostree.read_deployments().staged
    assert found.labels["machineconfig"] == "rendered-worker-2"
