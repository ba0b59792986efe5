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
from treenail.clock import SystemClock
from treenail.errors import BusError, BusyError, CancelledError, HostError, TransactionError
from treenail.host.ostree.deployments import Change, Deployment, Deployments, Progress, Verdict
from treenail.host.ostree.watch import Limits
from treenail.host.rpmostree.backend import RpmOstree
from treenail.host.rpmostree.transaction import INTERFACE
from treenail.host.systemd.bus import Peer, SystemBus, Target, options
from treenail_lab.images import Credential, Image, make_image
from treenail_lab.machine.node.rpmostree_only import OstreeHost
from treenail_lab.machine.settings import Settings

A = make_image("os/node", "1.0", 1_000_000)
B = make_image("os/node", "2.0", 1_000_000)
BROKEN = make_image(
    "os/node", "2.1", 1_000_000, faults={"pull": "GET https://me:secret@cdn.example/b: 500"}
)
SECRET = make_image(
    "os/secret", "1", 1000, registry="private.example", credential=Credential("me", "pw")
)
# So slow that it does not end within a test, and never says a word.
SLOW = Settings(pull_bytes_per_s=1000)
BUS = Target("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")
OS = Target(
    "org.projectatomic.rpmostree1",
    "/org/projectatomic/rpmostree1/fedora_coreos",
    "org.projectatomic.rpmostree1.OS",
)


@pytest.fixture
def host() -> Iterator[OstreeHost]:
    with (
        tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder,
        OstreeHost(Path(folder), booted=A, images=(B, BROKEN, SECRET)) as host,
    ):
        yield host
    assert not GLib.MainContext.default().pending()


@pytest.fixture
def bus(host: OstreeHost) -> Iterator[SystemBus]:
    bus = SystemBus(host.address)
    yield bus
    bus.close()


@pytest.fixture
def rpmostree(bus: SystemBus) -> RpmOstree:
    return RpmOstree(bus, SystemClock())


@pytest.fixture
def other(host: OstreeHost) -> Iterator["Other"]:
    other = Other(host.address)
    yield other
    other.leave()


class Other:
    """Another client of rpm-ostree, which begins transactions and does not wait for them."""

    def __init__(self, address: str) -> None:
        self._bus = SystemBus(address)
        self._peers: list[Peer] = []

    def begin(self, method: str, *arguments: object) -> None:
        address = self._bus.call(OS, method, *arguments, timeout_s=10)
        self._peers.append(Peer(str(address), INTERFACE, timeout_s=10))
        self._peers[-1].call("Start", timeout_s=10)

    def stage(self, image: Image) -> None:
        """As a person would, unlocked, and to its end."""
        refspec = f"ostree-unverified-registry:{image.pull_spec}"
        self.begin("Rebase", options({}), refspec, [])
        self.leave()
        own = RpmOstree(self._bus, SystemClock())
        own.wait_for_other(watch=go_on)

    def leave(self) -> None:
        while self._peers:
            self._peers.pop().close()
        self._bus.close()


def go_on(_: Progress) -> Verdict:
    return Verdict.GO_ON


def after_first_layer(verdict: Verdict) -> Callable[[Progress], Verdict]:
    return lambda progress: verdict if "Fetching" in progress.text else Verdict.GO_ON


def of(image: Image, **changes: bool) -> Deployment:
    deployment = Deployment(
        id=f"fedora-coreos-{image.commit}.0",
        checksum=image.commit,
        version=image.version,
        image=image.pull_spec,
        digest=image.digest,
        booted=False,
        staged=False,
        locked=False,
        pinned=False,
        origin=f"ostree-unverified-registry:{image.pull_spec}",
        base=image.commit,
        labels={"org.opencontainers.image.version": image.version, "containers.bootc": "1"},
    )
    return replace(deployment, **changes)


TO_B = Change(image=B.pull_spec)
HERE = of(A, booted=True)
STAGED = of(B, staged=True, locked=True)


def daemon_pid(bus: SystemBus) -> int:
    pid = bus.call(BUS, "GetConnectionUnixProcessID", OS.name, timeout_s=10)
    assert isinstance(pid, int)
    return pid


def test_fresh_machine_has_its_booted_deployment_and_no_transaction(rpmostree: RpmOstree) -> None:
    assert rpmostree.look() == Deployments((HERE,))


def test_staging_ends_with_a_locked_deployment_and_rising_progress(rpmostree: RpmOstree) -> None:
    seen: list[Progress] = []

    def watch(progress: Progress) -> Verdict:
        seen.append(progress)
        return Verdict.GO_ON

    rpmostree.stage(TO_B, watch=watch)
    percents = [progress.percent for progress in seen if progress.percent is not None]
    assert rpmostree.look() == Deployments((STAGED, HERE))
    assert (percents, percents[-2:]) == (sorted(percents), [99, 100])
    assert {0, 25, 50, 75} <= set(percents)
    assert any(progress.text.startswith("[2/4] Fetching ostree chunk") for progress in seen)


def test_look_shows_the_end_of_a_transaction_at_once(
    host: OstreeHost, rpmostree: RpmOstree
) -> None:
    """Finished comes before PropertiesChanged: without Reload, the old state would be seen."""
    host.change(Settings(properties_lag_s=600))
    rpmostree.stage(TO_B, watch=go_on)
    assert rpmostree.look().staged == STAGED


def test_transaction_is_over_for_others_too_when_stage_returns(rpmostree: RpmOstree) -> None:
    """A peer that is not closed would keep the daemon busy for half a minute."""
    rpmostree.stage(TO_B, watch=go_on)
    rpmostree.drop(STAGED.id)
    rpmostree.stage(TO_B, watch=go_on)
    assert rpmostree.look() == Deployments((STAGED, HERE))


def test_image_that_is_staged_and_locked_is_not_staged_again(rpmostree: RpmOstree) -> None:
    rpmostree.stage(TO_B, watch=go_on)
    seen: list[Progress] = []
    rpmostree.stage(TO_B, watch=lambda progress: seen.append(progress) or Verdict.GO_ON)
    assert seen == []


def test_an_image_that_has_to_be_signed_is_asked_for_as_such(bus: SystemBus) -> None:
    asked: list[str] = []
    rpmostree = RpmOstree(
        bus, SystemClock(), verifies=lambda image: not asked.append(image) and True
    )
    rpmostree.stage(TO_B, watch=go_on)
    staged = rpmostree.look().staged
    assert staged is not None
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
def test_failure_says_what_rpm_ostree_said_and_what_to_do(
    rpmostree: RpmOstree, image: str, text: str, remedy: str
) -> None:
    with pytest.raises(TransactionError, match=f"could not stage {image}: .*{text}$") as caught:
        rpmostree.stage(Change(image=image), watch=go_on)
    assert caught.value.remedy == remedy
    assert rpmostree.look() == Deployments((HERE,))


def test_foreign_transaction_is_busy_and_named(
    host: OstreeHost, rpmostree: RpmOstree, other: Other
) -> None:
    host.change(Settings(refresh_md_s=600))
    other.begin("RefreshMd", {})
    with pytest.raises(BusyError, match=rf"busy with RefreshMd, called by process {os.getpid()} "):
        rpmostree.stage(TO_B, watch=go_on)


def test_foreign_transaction_whose_caller_left_is_named_too(
    host: OstreeHost, rpmostree: RpmOstree, other: Other
) -> None:
    host.change(Settings(refresh_md_s=600))
    other.begin("RefreshMd", {})
    other.leave()
    with pytest.raises(BusyError, match=r"busy with RefreshMd, whose caller :1\.\d+ has left"):
        rpmostree.stage(TO_B, watch=go_on)


def test_foreign_transaction_is_waited_for(
    host: OstreeHost, rpmostree: RpmOstree, other: Other
) -> None:
    host.change(Settings(refresh_md_s=0.3))
    other.begin("RefreshMd", {})
    other.leave()
    seen: list[str] = []
    assert rpmostree.wait_for_other(watch=lambda said: seen.append(said.text) or Verdict.GO_ON)
    assert rpmostree.look().transaction is None
    assert seen


def test_waiting_for_nobody_returns_at_once_and_says_so(rpmostree: RpmOstree) -> None:
    assert not rpmostree.wait_for_other(watch=go_on)
    assert rpmostree.look() == Deployments((HERE,))


@pytest.mark.parametrize("verdict", [Verdict.CANCEL, Verdict.LEAVE])
def test_foreign_transaction_is_left_running_whatever_the_watcher_says(
    host: OstreeHost, rpmostree: RpmOstree, other: Other, verdict: Verdict
) -> None:
    host.change(Settings(refresh_md_s=600))
    other.begin("RefreshMd", {})
    before = rpmostree.look().transaction
    rpmostree.wait_for_other(watch=lambda _: verdict)
    assert before
    assert rpmostree.look().transaction == before


def test_foreign_transaction_beyond_the_limits_is_busy_and_left_running(
    host: OstreeHost, bus: SystemBus, other: Other
) -> None:
    clock = FakeClock()
    rpmostree = RpmOstree(bus, clock, Limits(transaction_s=60))
    host.change(Settings(refresh_md_s=600))
    other.begin("RefreshMd", {})
    before = rpmostree.look().transaction
    with pytest.raises(BusyError, match=r"RefreshMd.*: it has not ended within 60 s"):
        rpmostree.wait_for_other(watch=lambda _: clock.move(61) or Verdict.GO_ON)
    assert rpmostree.look().transaction == before


def test_cancelled_staging_leaves_nothing_behind(host: OstreeHost, rpmostree: RpmOstree) -> None:
    host.change(SLOW)
    with pytest.raises(CancelledError, match=r"did not stage .* it was cancelled"):
        rpmostree.stage(TO_B, watch=after_first_layer(Verdict.CANCEL))
    assert rpmostree.look() == Deployments((HERE,))


def test_staging_that_somebody_else_cancels_is_cancelled(
    host: OstreeHost, rpmostree: RpmOstree, bus: SystemBus
) -> None:
    host.change(SLOW)
    cancelled: list[object] = []

    def watch(progress: Progress) -> Verdict:
        if "Fetching" in progress.text and not cancelled:
            address = f"unix:path={host.root}/run/rpm-ostree-transaction.sock"
            with Peer(address, INTERFACE, timeout_s=10) as peer:
                cancelled.append(peer.call("Cancel", timeout_s=10))
        return Verdict.GO_ON

    with pytest.raises(CancelledError):
        rpmostree.stage(TO_B, watch=watch)


def test_staging_that_was_left_runs_on_and_is_joined_by_the_next(
    host: OstreeHost, rpmostree: RpmOstree
) -> None:
    host.change(Settings(pull_bytes_per_s=1_000_000))
    with pytest.raises(CancelledError, match=f"goes on to stage {B.pull_spec}, and is not waited"):
        rpmostree.stage(TO_B, watch=after_first_layer(Verdict.LEAVE))
    left = rpmostree.look().transaction
    rpmostree.stage(TO_B, watch=go_on)
    assert left is not None
    assert (left.method, rpmostree.look()) == ("UpdateDeployment", Deployments((STAGED, HERE)))


def test_staging_of_a_killed_program_is_joined_by_the_next(
    host: OstreeHost, rpmostree: RpmOstree
) -> None:
    host.change(Settings(pull_bytes_per_s=700_000))
    program = f"""
from treenail.clock import SystemClock
from treenail.host.systemd.bus import SystemBus
from treenail.host.ostree.deployments import Change, Verdict
from treenail.host.rpmostree.backend import RpmOstree
def watch(progress):
    print(progress.text, flush=True)
    return Verdict.GO_ON
RpmOstree(SystemBus(), SystemClock()).stage(Change("{B.pull_spec}"), watch=watch)
"""
    environment = {**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": host.address}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any("Fetching" in line for line in process.stdout)
        process.kill()
    orphaned = rpmostree.look()
    seen: list[str] = []
    rpmostree.stage(TO_B, watch=lambda said: seen.append(said.text) or Verdict.GO_ON)
    assert orphaned.transaction is not None
    assert not any("Pulling manifest" in text for text in seen)
    assert rpmostree.look() == Deployments((STAGED, HERE))


def test_daemon_that_dies_in_mid_transaction_is_an_error_and_look_tells_the_truth(
    host: OstreeHost, rpmostree: RpmOstree, bus: SystemBus
) -> None:
    host.change(SLOW)

    def watch(progress: Progress) -> Verdict:
        if "Fetching" in progress.text:
            os.kill(daemon_pid(bus), signal.SIGKILL)
        return Verdict.GO_ON

    with pytest.raises(BusError, match=r"could not stage .*: rpm-ostreed went away"):
        rpmostree.stage(TO_B, watch=watch)
    assert rpmostree.look() == Deployments((HERE,))


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (Limits(transaction_s=50), "it has not ended within 50 s"),
        (Limits(stall_s=50), "it has said nothing for 50 s"),
    ],
)
def test_staging_beyond_its_limits_is_cancelled(
    host: OstreeHost, bus: SystemBus, limits: Limits, why: str
) -> None:
    clock = FakeClock()
    rpmostree = RpmOstree(bus, clock, limits)
    host.change(SLOW)

    def watch(progress: Progress) -> Verdict:
        clock.move(51 if "Fetching" in progress.text else 0)
        return Verdict.GO_ON

    with pytest.raises(TransactionError, match=f"could not stage .*: {why}$"):
        rpmostree.stage(TO_B, watch=watch)
    assert rpmostree.look() == Deployments((HERE,))


def test_pending_deployment_of_another_is_not_built_upon(
    rpmostree: RpmOstree, other: Other
) -> None:
    other.stage(B)
    with pytest.raises(HostError, match=f"{B.pull_spec} is pending; it is staged and not locked"):
        rpmostree.stage(TO_B, watch=go_on)
    rpmostree.drop(STAGED.id)
    rpmostree.stage(TO_B, watch=go_on)
    assert rpmostree.look() == Deployments((STAGED, HERE))


def test_what_another_staged_is_not_dropped(rpmostree: RpmOstree, other: Other) -> None:
    other.stage(B)
    rpmostree.drop(HERE.id)
    staged = rpmostree.look().staged
    assert staged is not None
    assert staged.digest == B.digest


def test_dropping_nothing_is_harmless(rpmostree: RpmOstree) -> None:
    rpmostree.drop(STAGED.id)
    assert rpmostree.look() == Deployments((HERE,))


def test_drop_ends_our_own_transaction_first(host: OstreeHost, rpmostree: RpmOstree) -> None:
    host.change(SLOW)
    with pytest.raises(CancelledError, match=f"goes on to stage {B.pull_spec}, and is not waited"):
        rpmostree.stage(TO_B, watch=after_first_layer(Verdict.LEAVE))
    rpmostree.drop(STAGED.id)
    assert rpmostree.look() == Deployments((HERE,))


def test_finalizing_unlocks_and_reboots_and_can_be_repeated(
    host: OstreeHost, rpmostree: RpmOstree, bus: SystemBus
) -> None:
    login1 = Login1()
    objects = {"/org/freedesktop/login1": login1}
    rpmostree.stage(TO_B, watch=go_on)
    with BusService(host.address, "org.freedesktop.login1", objects):
        rpmostree.finalize(STAGED.id)
        unlocked = rpmostree.look()
        # Killed between unlocking and rebooting, rpm-ostreed is asked again.
        os.kill(daemon_pid(bus), signal.SIGKILL)
        rpmostree.finalize(STAGED.id)
        rpmostree.look()
    assert unlocked.staged == replace(STAGED, locked=False)
    assert login1.reboots == 2


def test_finalizing_another_than_what_is_staged_is_refused(
    host: OstreeHost, rpmostree: RpmOstree
) -> None:
    rpmostree.stage(TO_B, watch=go_on)
    login1 = Login1()
    with (
        BusService(host.address, "org.freedesktop.login1", {"/org/freedesktop/login1": login1}),
        pytest.raises(HostError, match=f"can't reboot into {HERE.id}: {STAGED.id} is staged"),
    ):
        rpmostree.finalize(HERE.id)
    assert (login1.reboots, rpmostree.look().staged) == (0, STAGED)


def test_finalizing_is_refused_while_somebody_blocks_the_shutdown(
    host: OstreeHost, rpmostree: RpmOstree
) -> None:
    rpmostree.stage(TO_B, watch=go_on)
    login1 = Login1(("shutdown", "backup", "running", "block", 0, 1))
    with (
        BusService(host.address, "org.freedesktop.login1", {"/org/freedesktop/login1": login1}),
        pytest.raises(TransactionError, match="Held by: backup") as caught,
    ):
        rpmostree.finalize(STAGED.id)
    assert caught.value.remedy == "see who holds it with: systemd-inhibit --list"
    assert (login1.reboots, rpmostree.look().staged) == (0, STAGED)


def test_released_daemon_exits_when_idle_and_is_started_again_when_needed(
    host: OstreeHost, bus: SystemBus, rpmostree: RpmOstree
) -> None:
    host.change(Settings(idle_exit_s=0.2))
    rpmostree.look()
    first = daemon_pid(bus)
    with bus.signals(BUS) as signals:
        rpmostree.release()
        signals.run(lambda said: said is not None and said.values == (OS.name, said.values[1], ""))
    rpmostree.release()
    assert not bus.call(BUS, "NameHasOwner", OS.name, timeout_s=10)
    assert rpmostree.look() == Deployments((HERE,))
    assert daemon_pid(bus) != first
