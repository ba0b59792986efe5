"""A machine that is booted and no node, and the agent's adapter for its operating system in it."""

import base64
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.contract.os_machines import Images
from treenail.deployment_change import DeploymentChange
from treenail.host.ostree.deployments import (
    DeploymentStatus,
    TransactionProgress,
    TransactionVerdict,
)
from treenail.host.rpmostree.client import (
    TransactionDetached,
    TransactionFinished,
    TransactionLost,
    TransactionOutcome,
    TransactionTimedOut,
)
from treenail.host.systemd.system_bus import BusInterface
from vmlab import registry
from vmlab.drivers import Driver
from vmlab.image.build import Builder, Built
from vmlab.machine import SNAPSHOT, Machine
from vmlab.snapshot import copy_snapshot, prepare_snapshot

_CALL_LIMIT_S = 300.0
_GUEST_MODULE = "PYTHONPATH=/usr/lib/treenail-vm python3 -m vmlab.guest."
_SPOILT_LAYER = "(?i)digest|unexpected EOF|corrupted blob"
_SLOW = "#!/bin/sh\nexec sleep 3600\n"
_REAL_PODMAN = "/run/treenail-vm-podman"
_SLOW_PODMAN = f"""\
#!/bin/sh
[ "$1" != pull ] || exec sleep 3600
exec {_REAL_PODMAN} "$@"
"""


class RemoteOs:
    """`treenail.host.rpmostree.backend.RpmOstreeBackend` in the guest: a process for each call."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def read_deployments(self) -> DeploymentStatus:
        found = self._call("read_deployments")
        assert isinstance(found, DeploymentStatus)
        return found

    def stage_deployment(
        self,
        change: DeploymentChange,
        *,
        watch: Callable[[TransactionProgress], TransactionVerdict],
    ) -> None:
        """Call ``watch`` once and send its answer for each entry that the guest reports."""
        self._call(
            "stage_deployment", change, verdict=watch(TransactionProgress("all of it", None))
        )

    def wait_for_other_transaction(
        self, *, watch: Callable[[TransactionProgress], TransactionVerdict]
    ) -> None:
        self._call(
            "wait_for_other_transaction", verdict=watch(TransactionProgress("all of it", None))
        )

    def drop_staged(self, staged_id: str) -> None:
        self._call("drop_staged", staged_id)

    def finalize_staged(self, staged_id: str) -> None:
        self._call("finalize_staged", staged_id)

    def roll_back(self) -> None:
        self._call("roll_back")

    def release_daemon(self) -> None:
        """Nothing: each call is made by a process that ends."""

    def _call(
        self, method: str, *arguments: object, verdict: TransactionVerdict | None = None
    ) -> object:
        return _run_module(self._machine, "operate", (method, arguments, verdict))


def _run_module(machine: Machine, name: str, order: object) -> object:
    """Return the result of a module of the guest; raise the error that it returns."""
    text = base64.b64encode(pickle.dumps(order)).decode()
    answer = machine.sh(_GUEST_MODULE + name, stdin=text, limit_s=_CALL_LIMIT_S)
    found: object = pickle.loads(base64.b64decode(answer.split()[-1]))
    if isinstance(found, Exception):
        raise found
    return found


class RemoteMachine:
    """The machine that the contract of an operating system back end is tried on.

    It reboots when the test says so: what the back end asks logind for comes to nothing.
    """

    def __init__(self, machine: Machine, images: Images) -> None:
        self.images = images
        self._machine = machine
        self._boots = 0
        self.sh("mkdir -p /etc/ostree; cat >/etc/ostree/auth.json", stdin=registry.pull_secret())
        self._refuse_reboots()

    def sh(self, command: str, *, stdin: str = "") -> str:
        """The output of a command as root."""
        return self._machine.sh(command, stdin=stdin)

    def os(self) -> RemoteOs:
        return RemoteOs(self._machine)

    def reboot(self) -> None:
        self._boots += 1
        self.sh("systemctl unmask --runtime reboot.target; systemctl reboot --no-block")
        self._machine.wait_boots(self._boots)
        self._refuse_reboots()

    def slow_down(self) -> None:
        place = "/usr/local/bin"
        # Without rpm-ostree the agent pulls with podman, which it calls by its path.
        name = self.sh("command -v rpm-ostree || command -v podman || true").rpartition("/")[2]
        if name == "podman\n":
            self.sh(
                f"mkdir -p {place}; cat >{place}/slow; chmod +x {place}/slow", stdin=_SLOW_PODMAN
            )
            self.sh(f"touch {_REAL_PODMAN}; mount --bind /usr/bin/podman {_REAL_PODMAN}")
            self.sh(f"mount --bind {place}/slow /usr/bin/podman")
        else:
            self.sh(f"mkdir -p {place}; cat >{place}/skopeo; chmod +x {place}/skopeo", stdin=_SLOW)

    def transact(self, method: str, *arguments: object) -> TransactionOutcome:
        """Follow the transaction of a method of rpm-ostree's OS interface."""
        found = _run_module(self._machine, "transact", (method, arguments))
        assert isinstance(
            found,
            TransactionFinished | TransactionDetached | TransactionLost | TransactionTimedOut,
        )
        return found

    def call(self, target: BusInterface, method: str, *arguments: object) -> object:
        """Return the result of a method on the guest's system bus."""
        return _run_module(self._machine, "query", (target, method, arguments))

    def withhold_login(self) -> str:
        self.sh("rm /etc/ostree/auth.json")
        return self.images.there

    def unlock_staged(self) -> None:
        self.sh("ostree admin lock-finalization --unlock")

    def set_pinned(self, index: int, *, is_pinned: bool) -> None:
        self.sh(f"ostree admin pin {'' if is_pinned else '--unpin'} {index}")

    def block_shutdown(self) -> None:
        inhibit = "systemd-inhibit --what=shutdown --mode=block --who=backup --why=running"
        self.sh(f"systemd-run --unit=backup {inhibit} sleep infinity")
        self.sh("until systemd-inhibit --list | grep -q backup; do sleep 0.2; done")

    def _refuse_reboots(self) -> None:
        self.sh("systemctl stop treenail; systemctl mask --runtime reboot.target")


# Each image takes skopeo seconds, and all tests of a run have the same images.
@cache
def _publish_images(built: Built, builder: Builder) -> Images:
    there = builder.variant(built, "2", {})
    return Images(
        here=built.pull_spec,
        there=there,
        broken=builder.broken(built),
        listed=builder.listed(there),
        listed_manifest=there.partition("@")[2],
        complaint=_SPOILT_LAYER,
        insane=builder.insane(built),
    )


@contextmanager
def booted(
    directory: Path, built: Built, builder: Builder, chosen: Driver
) -> Iterator[RemoteMachine]:
    """Boot a machine that is no node, with the registry's login, and remove its disk at the end."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    disk = directory / "disk.qcow2"
    copy_snapshot(prepare_snapshot(built, chosen), disk)
    machine = Machine(directory, disk, driver=chosen, booted=lambda _: None)
    try:
        images = _publish_images(built, builder)
        machine.start(SNAPSHOT)
        yield RemoteMachine(machine, images)
    finally:
        machine.stop()
        disk.unlink()
