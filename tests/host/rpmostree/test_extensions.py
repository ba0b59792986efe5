"""Packages out of an image, unpacked by podman's stand-in for rpm-ostreed's on a lab machine."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.waiting import wait_until
from treenail.clocks import SystemClock
from treenail.deployment_change import DeploymentChange
from treenail.errors import CancelledError, TransactionError
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.ostree.deployments import TransactionProgress, TransactionVerdict
from treenail.host.rpmostree.backend import RpmOstreeBackend
from treenail.host.rpmostree.extensions import PACKAGES_DIRECTORY, REPOSITORY_FILE, UNPACK_UNIT
from treenail.host.systemd.system_bus import SystemBus
from treenail.host.systemd.transient import TransientUnits
from treenail_lab import images
from treenail_lab.images import ImageCatalogue, make_image
from treenail_lab.machine import rootfs, settings
from treenail_lab.machine.node.daemons import MachineDaemons, build_environment
from treenail_lab.machine.ostree.sysroot import Sysroot
from treenail_lab.machine.programs import commands
from treenail_lab.machine.settings import MachineSettings

pytestmark = pytest.mark.integration

A = make_image("os/node", "1.0", 1_000_000)
B = make_image("os/node", "2.0", 1_000_000)
PACKAGES = replace(make_image("os/extensions", "1.0", 1_000_000), packages=("usbguard", "kata"))
EMPTY = make_image("os/extensions", "1.1", 1_000_000)
BROKEN = replace(
    make_image("os/extensions", "1.2", 1_000_000, faults={"pull": "unexpected EOF"}),
    packages=("usbguard",),
)
NOWHERE = ("usbguard", "kata")
QUICK = MachineSettings(staging_s=0.02, missing_packages=NOWHERE)
LIMIT_S = 20.0
INSTALL = DeploymentChange(install_packages=("usbguard",), extensions_image=PACKAGES.pull_spec)


class Site:
    """A machine whose repositories have none of the packages."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.root = directory / "root"
        self._settings = directory / "settings.json"
        self._catalogue = directory / "images.json"
        images.save_catalogue(ImageCatalogue((A, B, PACKAGES, EMPTY, BROKEN)), self._catalogue)
        self.change(QUICK)
        rootfs.install_root(self.root, A)
        rootfs.boot_root(self.root)
        commands.install_programs(self.root, self._catalogue, self._settings)
        self._daemons = MachineDaemons(
            directory, self.root, self._catalogue, self._settings, on_request=lambda _line: None
        )
        self._daemons.start()
        self.address = self._daemons.address
        self.bus = SystemBus(self.address)
        self.units = TransientUnits(self.bus)

    @property
    def sysroot(self) -> Sysroot:
        return Sysroot(self.root)

    def change(self, new: MachineSettings) -> None:
        settings.save_settings(new, self._settings)

    def os(self) -> RpmOstreeBackend:
        return RpmOstreeBackend(Machine(Root(self.root), clock=SystemClock(), bus=self.bus))

    def packages(self) -> tuple[str, ...]:
        staged = self.sysroot.read_staged()
        return () if staged is None else staged.packages

    def left(self) -> list[str]:
        """List what must not outlive its transaction."""
        storage = self.root / "var/lib/containers/storage"
        places = [self.root / path[1:] for path in (REPOSITORY_FILE, PACKAGES_DIRECTORY)]
        places += (storage / "containers").glob("*")
        stored = (storage / "images.json").read_text() if storage.exists() else "[]"
        unit = [UNPACK_UNIT] if self.units.find_run(UNPACK_UNIT) else []
        return [str(place) for place in places if place.exists()] + unit + stored.split('"')[1::2]

    def close(self) -> None:
        self.bus.close_connection()
        self._daemons.stop(hard=True)


@pytest.fixture
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder:
        site = Site(Path(folder))
        try:
            yield site
        finally:
            site.close()


def go_on(_: TransactionProgress) -> TransactionVerdict:
    return TransactionVerdict.CONTINUE


@pytest.mark.parametrize(
    "change",
    [
        INSTALL,
        replace(INSTALL, image=B.pull_spec, append_kargs=("nosmt",)),
        DeploymentChange(
            install_packages=("kata", "usbguard"),
            override_remove=("kernel",),
            extensions_image=PACKAGES.pull_spec,
        ),
    ],
    ids=["alone", "image and arguments", "kernel"],
)
def test_packages_are_layered_and_nothing_is_left(site: Site, change: DeploymentChange) -> None:
    site.os().stage_deployment(change, watch=go_on)
    assert (site.packages(), site.sysroot.is_staged_locked()) == (change.install_packages, True)
    assert site.left() == []


def test_layered_packages_move_to_the_next_image(site: Site) -> None:
    site.os().stage_deployment(INSTALL, watch=go_on)
    site.sysroot.unlock_staged()
    site.sysroot.finalize_staged()
    rootfs.boot_root(site.root)
    with pytest.raises(TransactionError, match="Packages not found: usbguard"):
        site.os().stage_deployment(DeploymentChange(B.pull_spec), watch=go_on)
    site.os().stage_deployment(
        DeploymentChange(B.pull_spec, extensions_image=PACKAGES.pull_spec), watch=go_on
    )
    assert site.packages() == ("usbguard",)
    assert site.left() == []


def test_repository_file_names_the_image(site: Site) -> None:
    seen: list[str] = []

    def look(progress: TransactionProgress) -> TransactionVerdict:
        if (site.root / REPOSITORY_FILE[1:]).exists():
            seen.append((site.root / REPOSITORY_FILE[1:]).read_text())
        return TransactionVerdict.CONTINUE

    site.os().stage_deployment(INSTALL, watch=look)
    expected = (
        "[treenail-extensions]\n"
        f"name=Packages of {PACKAGES.pull_spec}\n"
        f"baseurl=file://{site.root}{PACKAGES_DIRECTORY}\n"
        "enabled=1\ngpgcheck=0\nmetadata_expire=0\nskip_if_unavailable=0\n"
    )
    assert set(seen) == {expected}


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (EMPTY.pull_spec, "could not be found on container"),
        (BROKEN.pull_spec, "unexpected EOF"),
        (f"{A.registry}/none@{A.digest}", "manifest unknown|not found"),
    ],
    ids=["without packages", "broken", "missing"],
)
def test_failed_unpacking_stages_and_leaves_nothing(site: Site, image: str, reason: str) -> None:
    with pytest.raises(TransactionError, match=f"cannot unpack {image} with podman: .*({reason})"):
        site.os().stage_deployment(replace(INSTALL, extensions_image=image), watch=go_on)
    assert (site.packages(), site.left()) == ((), [])


def test_missing_package_leaves_nothing(site: Site) -> None:
    site.change(replace(QUICK, missing_packages=("strace",)))
    with pytest.raises(TransactionError, match="Packages not found: strace"):
        site.os().stage_deployment(replace(INSTALL, install_packages=("strace",)), watch=go_on)
    assert site.left() == []


@pytest.mark.parametrize("verdict", [TransactionVerdict.CANCEL, TransactionVerdict.DETACH])
def test_cancelled_unpacking_leaves_nothing(site: Site, verdict: TransactionVerdict) -> None:
    site.change(replace(QUICK, pull_bytes_per_s=1000))
    with pytest.raises(CancelledError, match="cancelled unpacking"):
        site.os().stage_deployment(INSTALL, watch=lambda _: verdict)
    assert (site.packages(), site.left()) == ((), [])


def test_packages_stay_while_their_transaction_runs(site: Site) -> None:
    site.change(replace(QUICK, staging_s=2.0))

    def leave(progress: TransactionProgress) -> TransactionVerdict:
        return (
            TransactionVerdict.CONTINUE
            if "unpacking" in progress.text
            else TransactionVerdict.DETACH
        )

    with pytest.raises(CancelledError):
        site.os().stage_deployment(INSTALL, watch=leave)
    assert (site.root / REPOSITORY_FILE[1:]).exists()
    assert (site.root / PACKAGES_DIRECTORY[1:] / "usbguard.rpm").exists()

    site.os().stage_deployment(INSTALL, watch=go_on)
    assert (site.packages(), site.left()) == (("usbguard",), [])


AGENT = """
import sys
from treenail.clocks import SystemClock
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.ostree.deployments import TransactionVerdict
from treenail.deployment_change import DeploymentChange
from treenail.host.rpmostree.backend import RpmOstreeBackend
from treenail.host.systemd.system_bus import SystemBus
root, address, image = sys.argv[1:]
machine = Machine(Root(root), clock=SystemClock(), bus=SystemBus(address))
RpmOstreeBackend(machine).stage_deployment(
    DeploymentChange(install_packages=("usbguard",), extensions_image=image),
    watch=lambda _: TransactionVerdict.CONTINUE,
)
"""


def killed(site: Site, moment: Callable[[], bool]) -> None:
    """Run an agent that stages it and dies at this moment."""
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, str(site.root), site.address, PACKAGES.pull_spec],
        env=build_environment(site.directory),
    ) as agent:
        wait_until(moment, limit_s=LIMIT_S)
        agent.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("during", ["unpacking", "transaction"])
@pytest.mark.parametrize("then", ["staged again", "dropped", "at rest"])
def test_next_agent_removes_packages_of_a_killed_one(site: Site, during: str, then: str) -> None:
    slow = {"pull_bytes_per_s": 1000.0} if during == "unpacking" else {"staging_s": 1.0}
    site.change(replace(QUICK, **slow))
    place = site.root / (PACKAGES_DIRECTORY if during == "unpacking" else REPOSITORY_FILE)[1:]
    killed(site, place.exists)
    if during == "transaction":
        wait_until(lambda: site.os().read_deployments().transaction is None, limit_s=LIMIT_S)
    site.change(QUICK)
    match then:
        case "staged again":
            site.os().stage_deployment(INSTALL, watch=go_on)
            assert site.packages() == ("usbguard",)
        case "dropped":
            site.os().drop_staged("")
        case _:
            site.os().release_daemon()
    assert [each for each in site.left() if each != PACKAGES.pull_spec] == []
