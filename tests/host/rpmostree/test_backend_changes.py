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
from treenail.clock import SystemClock
from treenail.errors import BusError, BusyError, HostError, TransactionError
from treenail.host.ostree.deployments import Change, Progress, Verdict
from treenail.host.rpmostree.backend import RpmOstree
from treenail.host.system.kernel_arguments import split_arguments
from treenail.host.systemd.bus import SystemBus, Target
from treenail_lab.images import make_image
from treenail_lab.machine.node.rpmostree_only import OstreeHost
from treenail_lab.machine.ostree.sysroot import Deployment
from treenail_lab.machine.settings import Settings

A = make_image("os/node", "1.0", 1_000_000)
B = make_image("os/node", "2.0", 1_000_000, labels={"machineconfig": "rendered-worker-2"})
REALTIME = Change(install=("kernel-rt-core", "kernel-rt-modules"), remove=("kernel", "kernel-core"))
ALL = Change(
    image=B.pull_spec,
    append=("nosmt", "hugepagesz=2M", "hugepages=4"),
    delete=("console=ttyS0", "gone"),
    install=("usbguard", *REALTIME.install),
    remove=REALTIME.remove,
)
QUICK = Settings(staging_s=0.02)
_NAME = "org.projectatomic.rpmostree1"
BUS = Target("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")


@pytest.fixture
def host() -> Iterator[OstreeHost]:
    with (
        tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder,
        OstreeHost(Path(folder), booted=A, images=(B,), settings=QUICK) as host,
    ):
        yield host


@pytest.fixture
def bus(host: OstreeHost) -> Iterator[SystemBus]:
    bus = SystemBus(host.address)
    yield bus
    bus.close()


@pytest.fixture
def rpmostree(bus: SystemBus) -> RpmOstree:
    return RpmOstree(bus, SystemClock())


def go_on(_: Progress) -> Verdict:
    return Verdict.GO_ON


def staged(host: OstreeHost) -> Deployment:
    found = host.sysroot.staged()
    assert found is not None
    assert host.sysroot.locked()
    return found


def booted_with(host: OstreeHost, rpmostree: RpmOstree, change: Change) -> Deployment:
    """Stage the change and boot into it; returns what is booted."""
    rpmostree.stage(change, watch=go_on)
    host.sysroot.unlock()
    host.reboot()
    found = host.sysroot.booted()
    assert found is not None
    return found


def refuse_the_second(host: OstreeHost) -> Settings:
    """Settings under which nothing can be staged any more."""
    settings = replace(QUICK, staging_error="No space left on device")
    host.change(settings)
    return settings


def test_everything_is_in_the_one_deployment_that_is_staged(
    host: OstreeHost, rpmostree: RpmOstree
) -> None:
    rpmostree.stage(ALL, watch=go_on)
    found = staged(host)
    assert (found.digest, found.base) == (B.digest, B.commit)
    assert found.packages == ALL.install
    assert found.removals == ALL.remove
    assert found.kernel_arguments == (
        "root=LABEL=root", "rw", "ignition.platform.id=lab", *ALL.append,
    )  # fmt: skip
    assert [each.booted for each in rpmostree.look().all] == [False, True]


def test_everything_is_booted_after_one_reboot(host: OstreeHost, rpmostree: RpmOstree) -> None:
    booted_with(host, rpmostree, ALL)
    found = rpmostree.look().booted
    assert found is not None
    assert (found.digest, found.packages, found.removed) == (B.digest, ALL.install, ALL.remove)
    command_line = split_arguments((host.root / "proc/cmdline").read_text())
    assert command_line[-4:-1] == ALL.append
    assert "console=ttyS0" not in command_line


def test_what_is_booted_is_not_staged_again(host: OstreeHost, rpmostree: RpmOstree) -> None:
    booted_with(host, rpmostree, ALL)
    rpmostree.stage(ALL, watch=go_on)
    assert host.sysroot.staged() is None


def test_staging_it_again_changes_nothing(host: OstreeHost, rpmostree: RpmOstree) -> None:
    rpmostree.stage(ALL, watch=go_on)
    first = staged(host)
    rpmostree.stage(ALL, watch=go_on)
    assert staged(host) == first


@pytest.mark.parametrize(
    "change",
    [Change(append=("nosmt", "a=1"), delete=("gone",)), Change(delete=("console=ttyS0",))],
)
def test_kernel_arguments_alone_keep_the_image(
    host: OstreeHost, rpmostree: RpmOstree, change: Change
) -> None:
    before = host.sysroot.booted()
    assert before is not None
    rpmostree.stage(change, watch=go_on)
    kept = tuple(each for each in before.kernel_arguments if each not in change.delete)
    assert staged(host) == replace(before, serial=1, kernel_arguments=(*kept, *change.append))


def test_kernel_arguments_keep_their_order_and_repetitions(
    host: OstreeHost, rpmostree: RpmOstree
) -> None:
    old = ("hugepagesz=1G", "hugepages=4", "hugepagesz=2M", "hugepages=4")
    new = ("hugepagesz=1G", "hugepages=4", "hugepagesz=2M", "hugepages=6", 'a="b c"')
    booted_with(host, rpmostree, Change(append=old))
    rpmostree.stage(Change(append=new, delete=old), watch=go_on)
    assert staged(host).kernel_arguments[-5:] == new


def test_kernel_type_goes_to_realtime_and_back(host: OstreeHost, rpmostree: RpmOstree) -> None:
    realtime = booted_with(host, rpmostree, REALTIME)
    back = Change(uninstall=REALTIME.install, reset=REALTIME.remove)
    stock = booted_with(host, rpmostree, back)
    assert (realtime.packages, realtime.removals) == (REALTIME.install, REALTIME.remove)
    assert (stock.packages, stock.removals, stock.checksum) == ((), (), A.commit)


def test_stock_image_is_returned_to_with_everything_else_in_one_reboot(
    host: OstreeHost, rpmostree: RpmOstree
) -> None:
    booted_with(host, rpmostree, ALL)
    stock = booted_with(
        host,
        rpmostree,
        Change(
            image=A.pull_spec,
            append=("console=ttyS0",),
            delete=ALL.append,
            uninstall=ALL.install,
            reset=ALL.remove,
        ),
    )
    assert (stock.checksum, stock.packages, stock.removals) == (A.commit, (), ())
    assert stock.kernel_arguments == (
        "root=LABEL=root", "rw", "ignition.platform.id=lab", "console=ttyS0",
    )  # fmt: skip


def test_change_that_was_cut_short_is_taken_up(
    host: OstreeHost, rpmostree: RpmOstree, bus: SystemBus
) -> None:
    """Image and packages are staged; the daemon dies before the kernel arguments are."""

    def watch(progress: Progress) -> Verdict:
        if host.sysroot.staged() is not None and progress.percent is None:
            pid = bus.call(BUS, "GetConnectionUnixProcessID", _NAME, timeout_s=10)
            assert isinstance(pid, int)
            os.kill(pid, signal.SIGKILL)
        return Verdict.GO_ON

    with pytest.raises(BusError):
        rpmostree.stage(ALL, watch=watch)
    half = staged(host)
    assert (half.digest, "nosmt" in half.kernel_arguments) == (B.digest, False)
    rpmostree.stage(ALL, watch=go_on)
    assert staged(host).kernel_arguments[-3:] == ALL.append


def test_failure_of_the_second_half_leaves_the_first_one_locked(
    host: OstreeHost, rpmostree: RpmOstree
) -> None:
    def watch(progress: Progress) -> Verdict:
        if progress.percent == 100:
            refuse_the_second(host)
        return Verdict.GO_ON

    with pytest.raises(TransactionError, match=r"could not stage .* and packages and kernel arg"):
        rpmostree.stage(ALL, watch=watch)
    assert staged(host).digest == B.digest


def test_what_was_staged_other_than_asked_is_dropped_and_told(
    host: OstreeHost, rpmostree: RpmOstree
) -> None:
    def watch(progress: Progress) -> Verdict:
        if progress.percent == 100:
            host.sysroot.stage(replace(staged(host), packages=("strace",)), locked=True)
        return Verdict.GO_ON

    with pytest.raises(
        TransactionError, match=r"did not stage packages: it lacks usbguard, and it has strace$"
    ):
        rpmostree.stage(Change(install=("usbguard",)), watch=watch)
    assert host.sysroot.staged() is None


def test_what_is_pending_but_something_else_is_not_built_upon(
    host: OstreeHost, rpmostree: RpmOstree
) -> None:
    rpmostree.stage(Change(image=B.pull_spec, install=("strace",)), watch=go_on)
    before = staged(host)
    with pytest.raises(HostError) as caught:
        rpmostree.stage(Change(install=("usbguard",), remove=("kernel",)), watch=go_on)
    assert str(caught.value) == (
        f"can't stage packages: {B.pull_spec} is pending; it is of {B.pull_spec}, not "
        f"{A.pull_spec}, and it lacks usbguard, and it has strace, and it has not left out kernel"
    )
    assert staged(host) == before


def test_another_transaction_is_in_the_way_of_what_is_pending(
    host: OstreeHost, rpmostree: RpmOstree
) -> None:
    rpmostree.stage(Change(image=B.pull_spec), watch=go_on)
    host.change(replace(QUICK, refresh_md_s=600))
    other = SystemBus(host.address)
    os_target = Target(_NAME, "/org/projectatomic/rpmostree1/fedora_coreos", f"{_NAME}.OS")
    other.call(os_target, "RefreshMd", {}, timeout_s=10)
    with pytest.raises(BusyError, match="busy with RefreshMd"):
        rpmostree.stage(Change(install=("usbguard",)), watch=go_on)
    other.close()


def test_packages_that_no_repository_has_are_named(host: OstreeHost, rpmostree: RpmOstree) -> None:
    host.change(replace(QUICK, missing_packages=("usbguard",)))
    with pytest.raises(TransactionError, match="could not stage packages: Packages not found: usb"):
        rpmostree.stage(Change(install=("usbguard",)), watch=go_on)
    assert rpmostree.look().staged is None


@pytest.mark.parametrize("by_commit", [False, True])
@pytest.mark.parametrize(
    "change", [ALL, Change(append=("nosmt",)), REALTIME, Change(image=B.pull_spec)]
)
def test_whatever_is_staged_can_be_finalized(
    host: OstreeHost, rpmostree: RpmOstree, change: Change, *, by_commit: bool
) -> None:
    """Newer daemons know a deployment by its image's digest, older ones by its commit."""
    host.change(replace(QUICK, finalizes_by_commit=by_commit))
    login1 = Login1()
    with BusService(host.address, NAME, {PATH: login1}):
        rpmostree.stage(change, watch=go_on)
        rpmostree.finalize(staged(host).id)
        rpmostree.look()
    assert (login1.reboots, host.sysroot.locked()) == (1, False)


def test_labels_of_the_image_are_known_before_it_is_booted(rpmostree: RpmOstree) -> None:
    rpmostree.stage(ALL, watch=go_on)
    found = rpmostree.look().staged
    assert found is not None
    assert found.labels["machineconfig"] == "rendered-worker-2"
