"""The operating system by bootc, which has no D-Bus interface: its commands as transient units.

Also those that only look: bootc needs CAP_SYS_ADMIN and a mount name space of its own for them, and
podman takes a root without that for a user without privileges. The agent's sandbox has neither.

bootc can't stage an image locked so that it could be dropped again, and what it has staged is
booted by anybody's reboot. So the image is pulled into the storage of podman, which arms nothing,
while the node serves, and ``bootc switch --transport containers-storage`` takes it from there once
the node is drained. Both are documented: https://bootc.dev/bootc/man/bootc-switch.8.html. The
price is that the image is on disk twice in between. ``switch --download-only``, of bootc since
summer 2026, is not used: it leaves what is staged unlocked as it is
(https://github.com/bootc-dev/bootc/issues/2425), and nothing takes back what it staged.

That an image was pulled is remembered by its unit, which stays until it is released; so it is
forgotten at a reboot, as a staged deployment is.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from treenail.clock import Clock
from treenail.errors import (
    BusyError,
    CancelledError,
    CommandError,
    HostError,
    TransactionError,
)
from treenail.host.bootc.progress import reading
from treenail.host.bootc.status import Status
from treenail.host.bootc.status import parse as parse_status
from treenail.host.container.podman import Podman
from treenail.host.container.podman_progress import PodmanProgress
from treenail.host.filesystem.files import File, Files
from treenail.host.filesystem.root import Root
from treenail.host.ostree.commit import PROGRAM, Ostree
from treenail.host.ostree.deployments import (
    Change,
    Deployment,
    Deployments,
    Progress,
    Transaction,
    Verdict,
    digest_of,
)
from treenail.host.ostree.jobs import Jobs
from treenail.host.ostree.watch import Limits, Watch
from treenail.host.system.process import Programs
from treenail.host.system.reservation import Reserve
from treenail.host.systemd.bus import SystemBus
from treenail.host.systemd.journal import Journal
from treenail.host.systemd.transient import Job, Run, TransientUnits
from treenail.host.systemd.unsandboxed import Outside

log = logging.getLogger(__name__)

PULL = "treenail-pull.service"
SWITCH = "treenail-bootc-switch.service"
ROLLBACK = "treenail-bootc-rollback.service"
UNDEPLOY = "treenail-undeploy.service"

_BOOTC = "/usr/bin/bootc"
_FIFO = "/run/treenail/bootc-progress"
_SEEN = "/run/treenail/bootc-status.json"
_SEEN_LIMIT = 1024 * 1024
# It waits for the lock of the sysroot, which somebody may hold for as long as a pull takes.
_STATUS_S = 60.0
_WAIT_S = 5.0
# One line for each layer, and two a second of a podman that tells more.
_PULL_LINES = 1000
_PULL_READ_S = 2.0
_LIMITS = Limits()
# The descriptor is opened by the shell: ExtraFileDescriptors= is too new for RHEL 9.
_WITH_PROGRESS = 'exec "$@" 3>"$0" 1>&2'
_IMAGE_MODE = (
    "have packages, and arguments in /usr/lib/bootc/kargs.d, in the image; or, where rpm-ostree is "
    'installed, set backend = "rpm-ostree"'
)


class Bootc:
    """The deployments of this machine. Raises `HostError` alone; to be used by one thread.

    Programs are run below ``root``, whose paths have to be those that systemd sees too.
    """

    def __init__(
        self,
        bus: SystemBus,
        programs: Programs,
        root: Root,
        clock: Clock,
        limits: Limits = _LIMITS,
        *,
        status_s: float = _STATUS_S,
        alive: Callable[[], None] = lambda: None,
        verifies: Callable[[str], bool] = lambda _image: False,
    ) -> None:
        """``status_s``: how long ``bootc status`` may take.

        ``alive`` is called once a second while something runs that nobody watches; ``verifies``
        says whether bootc is to be asked for a verified image.
        """
        self._status_s = status_s
        self._units = TransientUnits(bus)
        self._ostree = Ostree(programs, root)
        self._root = root
        self._reserve = Reserve(root)
        self._files = Files(root)
        self._labels: dict[str, dict[str, str]] = {}
        self._clock = clock
        self._limits = limits
        self._alive = alive
        self._verifies = verifies
        self._journal = Journal(programs, root, clock)
        self._outside = Outside(self._units, self._journal, root, alive=alive)
        self._podman = Podman(programs, self._outside, root)
        self._jobs = Jobs(self._units, self._journal, clock, limits, alive=alive)

    @property
    def name(self) -> str:
        """What drives the deployments, for people."""
        return "bootc"

    def look(self) -> Deployments:
        """The deployments as they are now; an image that was pulled is a staged, locked one.

        While bootc is at work for us they are as they were before, for it would not answer.
        """
        switching = self._jobs.running(SWITCH, ROLLBACK, UNDEPLOY)
        status = self._status() if switching is None else self._status_before()
        pulled = self._units.find(PULL)
        running = switching or (pulled if pulled and pulled.running else None)
        found = tuple(
            replace(each, labels=self._ostree.labels(each.checksum))
            for each in status.in_boot_order
        )
        image = _image(pulled) if pulled and pulled.done else ""
        if image and digest_of(image) not in {each.digest for each in found[:1]}:
            found = (self._pulled(image), *found)
        return Deployments(found, Transaction(running.what, "systemd", "") if running else None)

    def stage(self, change: Change, *, watch: Watch) -> None:
        """Return once the image is on this host; it is not deployed, and nobody can boot it.

        A pull that runs is joined, one that was done is not done again. Raises `HostError` for
        what bootc can't do, or when something else is staged; `TransactionError`;
        `CancelledError`, also when the watcher said to leave, and the pull goes on.
        """
        if change != Change(image=change.image):
            raise HostError(
                "bootc changes nothing but the image of an installed host; asked for: "
                f"{replace(change, image='')}",
                remedy=_IMAGE_MODE,
            )
        if not digest_of(change.image):
            raise HostError(f"can't stage {change.image}: it is not named by its digest")
        status = self._status() if self._jobs.running(SWITCH, ROLLBACK) is None else None
        if status is not None:
            digest = digest_of(change.image)
            if not status.staged and status.booted.digest == digest:
                log.info("%s is booted already", change.image)
                return
            self._refuse(status, change.image)
        found = self._units.find(PULL)
        if found is not None and found.matters and _image(found) != change.image:
            raise HostError(
                f"can't stage {change.image}: {_image(found)} was pulled to be booted",
                remedy=f"drop it with: systemctl stop {PULL}",
            )
        self._pull(change.image, watch)

    def wait_for_other(self, *, watch: Watch) -> bool:
        """Return once bootc answers again, or the watcher wants no more; True in any case.

        Raises `BusyError` when it exceeds the limits.
        """
        deadline = self._clock.monotonic() + self._limits.transaction_s
        waiting = Progress("waiting for the lock of the sysroot", None)
        while watch(waiting) is Verdict.GO_ON:
            try:
                self._status(limit_s=min(_WAIT_S, self._status_s))
            except BusyError:
                if self._clock.monotonic() >= deadline:
                    raise
            else:
                break
        return True

    def drop(self, staged_id: str) -> None:
        """End our pull, and drop what has this digest and was pulled, or boots next.

        That is what was staged, or what the boot loader gave up after it was deployed, and would
        try again. Harmless when there is nothing; what others staged is left to them.
        """
        pulled = self._units.find(PULL)
        if pulled is not None and (pulled.running or digest_of(_image(pulled)) == staged_id):
            self._forget(pulled)
        self._jobs.wait(UNDEPLOY)
        pending = Deployments(self._status().in_boot_order).pending if staged_id else None
        if pending is not None and pending.id == staged_id:
            self._undeploy(pending)

    def finalize(self, staged_id: str, *, softly: bool = False) -> None:  # noqa: ARG002  it is here
        """Have the image of this digest deployed, so that the next boot is into it.

        Nothing reboots. Refused when another is staged; done already when it is deployed.
        """
        pulled = self._units.find(PULL)
        image = _image(pulled) if pulled and pulled.done else ""
        status = self._status() if self._jobs.running(SWITCH) is None else self._status_before()
        if status.staged is None or status.staged.id != staged_id:
            if digest_of(image) != staged_id:
                there = status.staged.id if status.staged else digest_of(image)
                raise HostError(
                    f"can't reboot into {staged_id}: {there or 'nothing'} is staged",
                    remedy="see: bootc status",
                )
            self._refuse(status, image)
            self._forget_former(status, staged_id)
            self._reserve.keep()
            self._switch(image)
        if pulled is not None and digest_of(image) == staged_id:
            self._forget(pulled)

    def roll_back(self) -> None:
        """Make the previous deployment the default, and return; nothing reboots.

        What is staged or pulled is dropped, whoever staged it, for the shutdown would make it the
        default again. Repeatable: asked again, bootc would change them back, so one that an agent
        began which died is waited for, and nothing is done when the previous one is the default.
        """
        self._reserve.let_go()
        pulled = self._units.find(PULL)
        if pulled is not None:
            self._forget(pulled)
        self._jobs.wait(UNDEPLOY, ROLLBACK)
        status = self._status()
        if status.staged is not None:
            log.warning("dropping %s, which is staged, to roll back", status.staged.id)
            self._undeploy(status.staged)
            status = self._status()
        if status.rollback_queued:
            log.info("%s is the default already", status.rollback and status.rollback.id)
            return
        if status.rollback is None:
            raise HostError(
                "there is no previous deployment to go back to", remedy="see: bootc status"
            )
        argv = (self._program(_BOOTC), "rollback")
        self._jobs.carry_out(ROLLBACK, f"roll back to {status.rollback.image}", argv)

    def release(self) -> None:
        """Nothing to let go: bootc does not stay."""

    def _undeploy(self, deployment: Deployment, number: int = 0) -> None:
        """Drop it by its place in boot order; bootc has no word for it, but ostree has."""
        argv = (self._program(PROGRAM), "admin", "undeploy", str(number))
        self._jobs.carry_out(UNDEPLOY, f"drop {deployment.image}", argv)

    def _forget_former(self, status: Status, digest: str) -> None:
        """Drop an earlier deployment of the image that is about to be deployed once more.

        By their ids the two are one: if the power was cut now, the earlier one would be taken for
        the new one, which the boot loader gave up.
        """
        former, plain = status.rollback, not (status.staged or status.others)
        if plain and former is not None and former.id == digest and not former.pinned:
            self._undeploy(former, 0 if status.rollback_queued else 1)

    def _pull(self, image: str, watch: Watch) -> None:
        job = Job(
            PULL, f"treenail: pull {image}", self._podman.pull(image), self._limits.transaction_s
        )

        progress = PodmanProgress(self._podman.layers(image))
        due = 0.0

        def each() -> None:
            nonlocal due
            if self._clock.monotonic() >= due:
                found = self._units.find(PULL)
                if found is not None:
                    progress.read(self._journal.told_by(found.invocation, most=_PULL_LINES))
                due = self._clock.monotonic() + _PULL_READ_S
            match watch(progress.last):
                case Verdict.CANCEL:
                    self._units.stop(PULL, self._alive)
                    raise CancelledError(f"{image} was not pulled: it was cancelled")
                case Verdict.LEAVE:
                    raise CancelledError(
                        f"podman goes on to pull {image}, and is not waited for any more"
                    )
                case Verdict.GO_ON:
                    pass

        self._jobs.check(self._units.run(job, each), f"podman could not pull {image}")
        watch(Progress(f"pulled {image}", 100))

    def _forget(self, pulled: Run) -> None:
        self._units.stop(PULL, self._alive)
        self._podman.forget(_image(pulled))

    def _switch(self, image: str) -> None:
        fifo = self._root.path(_FIFO)
        # podman has kept to the signature policy in any case; this has it kept to from now on.
        signed = ("--enforce-container-sigpolicy",) if self._verifies(image) else ()
        argv = (
            "/bin/sh", "-c", _WITH_PROGRESS, str(fifo),
            self._program(_BOOTC), "switch", "--progress-fd", "3", "--quiet",
            *signed, "--transport", "containers-storage", image,
        )  # fmt: skip
        with reading(fifo) as progress:
            self._jobs.carry_out(SWITCH, f"switch to {image}", argv, lambda: progress.last)
        staged = self._status().staged
        if staged is None or staged.digest != digest_of(image) or staged.locked:
            raise TransactionError(
                f"bootc did not stage {image}: {staged.digest if staged else 'nothing'} is staged",
                remedy=f"see: bootc status; journalctl -u {SWITCH}",
            )

    def _refuse(self, status: Status, image: str) -> None:
        """Raise if bootc would, or if something is deployed already, for any reboot to boot."""
        if status.incompatible:
            changes = ", ".join(self._ostree.local_changes(status.origin))
            raise HostError(
                "bootc can't replace the booted deployment: it was changed by rpm-ostree"
                f"{': ' if changes else ''}{changes}",
                remedy="take the changes back with: rpm-ostree reset; or set backend = "
                '"rpm-ostree"',
            )
        if status.staged is not None:
            raise HostError(
                f"can't stage {image}: {status.staged.image or status.staged.id} is staged",
                remedy="drop what is staged with: ostree admin undeploy 0",
            )

    def _status(self, *, limit_s: float | None = None) -> Status:
        limit_s = limit_s or self._status_s
        command = [self._program(_BOOTC), "status", "--json", "--format-version=1"]
        try:
            content = self._outside.run(command, limit_s=limit_s)
        except CommandError as error:
            if "not done within" not in str(error):
                raise
            raise BusyError(
                f"bootc status did not answer within {limit_s:g} s: another program, such as "
                "rpm-ostree or ostree, holds the sysroot",
                remedy="see: fuser -v /ostree/lock",
            ) from error
        status = parse_status(content)
        seen = File(_SEEN, content, 0o600)
        if not self._files.has(seen):
            self._files.write_all([seen])
        return status

    def _status_before(self) -> Status:
        """As it was last seen since the boot, while bootc would not answer."""
        content = self._files.read(_SEEN, limit=_SEEN_LIMIT)
        return self._status() if content is None else parse_status(content)

    def _pulled(self, image: str) -> Deployment:
        digest = digest_of(image)
        if image not in self._labels:
            # They decide about the update, so without them it is tried again.
            self._labels = {image: self._podman.labels(image)}
        labels = self._labels[image]
        return Deployment(
            id=digest,
            checksum="",
            version=labels.get("org.opencontainers.image.version", ""),
            image=image,
            digest=digest,
            booted=False,
            staged=True,
            locked=True,
            pinned=False,
            origin=image,
            labels=labels,
        )

    def _program(self, path: str) -> str:
        return str(self._root.path(path))


def _image(run: Run) -> str:
    """The image that a pull is about; empty when it is about something else."""
    _, told, image = run.what.partition("treenail: pull ")
    return image if told else ""
