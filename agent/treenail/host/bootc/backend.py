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

from treenail.errors import (
    BusyError,
    CancelledError,
    CommandError,
    HostError,
    TransactionError,
)
from treenail.host.bootc.progress import read_progress
from treenail.host.bootc.status import BootcStatus, parse_status
from treenail.host.container.podman_progress import PodmanProgress
from treenail.host.filesystem.files import FileSpec
from treenail.host.machine import Machine
from treenail.host.ostree.commit import OSTREE_PROGRAM
from treenail.host.ostree.deployments import (
    ActiveTransaction,
    DeploymentChange,
    DeploymentStatus,
    OstreeDeployment,
    TransactionProgress,
    WatchVerdict,
    parse_digest,
)
from treenail.host.ostree.watch import WatchCallback
from treenail.host.systemd.transient import TransientJob, TransientRun

log = logging.getLogger(__name__)

PULL_UNIT = "treenail-pull.service"
SWITCH_UNIT = "treenail-bootc-switch.service"
ROLLBACK_UNIT = "treenail-bootc-rollback.service"
UNDEPLOY_UNIT = "treenail-undeploy.service"

_BOOTC = "/usr/bin/bootc"
_FIFO = "/run/treenail/bootc-progress"
_STATUS_CACHE = "/run/treenail/bootc-status.json"
_STATUS_CACHE_LIMIT = 1024 * 1024
# It waits for the lock of the sysroot, which somebody may hold for as long as a pull takes.
_STATUS_S = 60.0
_WAIT_S = 5.0
# One line for each layer, and two a second of a podman that tells more.
_PULL_LINES = 1000
_PULL_READ_S = 2.0
# The descriptor is opened by the shell: ExtraFileDescriptors= is too new for RHEL 9.
_PROGRESS_SCRIPT = 'exec "$@" 3>"$0" 1>&2'
_IMAGE_MODE_REMEDY = (
    "have packages, and arguments in /usr/lib/bootc/kargs.d, in the image; or, where rpm-ostree is "
    'installed, set backend = "rpm-ostree"'
)


class BootcBackend:
    """The deployments of this machine. Raises `HostError` alone; to be used by one thread.

    Programs are run below ``root``, whose paths have to be those that systemd sees too.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        status_s: float = _STATUS_S,
        needs_signature: Callable[[str], bool] = lambda _image: False,
    ) -> None:
        """``status_s``: how long ``bootc status`` may take.

        ``needs_signature`` says whether bootc is to be asked for a verified image.
        """
        self._machine = machine
        self._root = machine.root
        self._clock = machine.clock
        self._limits = machine.limits
        self._heartbeat = machine.heartbeat
        self._units = machine.transient_units
        self._jobs = machine.jobs
        self._podman = machine.podman
        self._status_s = status_s
        self._needs_signature = needs_signature
        self._labels: dict[str, dict[str, str]] = {}

    @property
    def name(self) -> str:
        """What drives the deployments, for people."""
        return "bootc"

    def read_deployments(self) -> DeploymentStatus:
        """The deployments as they are now; an image that was pulled is a staged, locked one.

        While bootc is at work for us they are as they were before, for it would not answer.
        """
        switching = self._jobs.find_running(SWITCH_UNIT, ROLLBACK_UNIT, UNDEPLOY_UNIT)
        status = self._read_status() if switching is None else self._read_cached_status()
        pulled = self._units.find_run(PULL_UNIT)
        running = switching or (pulled if pulled and pulled.is_running else None)
        found = tuple(
            replace(each, labels=self._machine.ostree_metadata.read_labels(each.checksum))
            for each in status.in_boot_order
        )
        image = _parse_pulled_image(pulled) if pulled and pulled.is_done else ""
        if image and parse_digest(image) not in {each.digest for each in found[:1]}:
            found = (self._make_pulled_deployment(image), *found)
        return DeploymentStatus(
            found, ActiveTransaction(running.description, "systemd", "") if running else None
        )

    def stage_deployment(self, change: DeploymentChange, *, watch: WatchCallback) -> None:
        """Return once the image is on this host; it is not deployed, and nobody can boot it.

        A pull that runs is joined, one that was done is not done again. Raises `HostError` for
        what bootc can't do, or when something else is staged; `TransactionError`;
        `CancelledError`, also when the watcher said to leave, and the pull goes on.
        """
        if change != DeploymentChange(image=change.image):
            raise HostError(
                "bootc changes nothing but the image of an installed host; asked for: "
                f"{replace(change, image='')}",
                remedy=_IMAGE_MODE_REMEDY,
            )
        if not parse_digest(change.image):
            raise HostError(f"can't stage {change.image}: it is not named by its digest")
        status = (
            self._read_status()
            if self._jobs.find_running(SWITCH_UNIT, ROLLBACK_UNIT) is None
            else None
        )
        if status is not None:
            digest = parse_digest(change.image)
            if not status.staged and status.booted.digest == digest:
                log.info("%s is booted already", change.image)
                return
            self._refuse_unless_switchable(status, change.image)
        found = self._units.find_run(PULL_UNIT)
        if (
            found is not None
            and found.is_running_or_done
            and _parse_pulled_image(found) != change.image
        ):
            raise HostError(
                f"can't stage {change.image}: {_parse_pulled_image(found)} was pulled to be booted",
                remedy=f"drop it with: systemctl stop {PULL_UNIT}",
            )
        self._pull_image(change.image, watch)

    def wait_for_other_transaction(self, *, watch: WatchCallback) -> bool:
        """Return once bootc answers again, or the watcher wants no more; True in any case.

        Raises `BusyError` when it exceeds the limits.
        """
        deadline = self._clock.monotonic() + self._limits.transaction_s
        waiting = TransactionProgress("waiting for the lock of the sysroot", None)
        while watch(waiting) is WatchVerdict.CONTINUE:
            try:
                self._read_status(timeout_s=min(_WAIT_S, self._status_s))
            except BusyError:
                if self._clock.monotonic() >= deadline:
                    raise
            else:
                break
        return True

    def drop_staged(self, staged_id: str) -> None:
        """End our pull, and drop what has this digest and was pulled, or boots next.

        That is what was staged, or what the boot loader gave up after it was deployed, and would
        try again. Harmless when there is nothing; what others staged is left to them.
        """
        pulled = self._units.find_run(PULL_UNIT)
        if pulled is not None and (
            pulled.is_running or parse_digest(_parse_pulled_image(pulled)) == staged_id
        ):
            self._remove_pulled(pulled)
        self._jobs.wait_for_units(UNDEPLOY_UNIT)
        pending = DeploymentStatus(self._read_status().in_boot_order).pending if staged_id else None
        if pending is not None and pending.id == staged_id:
            self._undeploy_deployment(pending)

    def finalize_staged(self, staged_id: str, *, is_soft: bool = False) -> None:  # noqa: ARG002  it is here
        """Have the image of this digest deployed, so that the next boot is into it.

        Nothing reboots. Refused when another is staged; done already when it is deployed.
        """
        pulled = self._units.find_run(PULL_UNIT)
        image = _parse_pulled_image(pulled) if pulled and pulled.is_done else ""
        status = (
            self._read_status()
            if self._jobs.find_running(SWITCH_UNIT) is None
            else self._read_cached_status()
        )
        if status.staged is None or status.staged.id != staged_id:
            if parse_digest(image) != staged_id:
                there = status.staged.id if status.staged else parse_digest(image)
                raise HostError(
                    f"can't reboot into {staged_id}: {there or 'nothing'} is staged",
                    remedy="see: bootc status",
                )
            self._refuse_unless_switchable(status, image)
            self._undeploy_former(status, staged_id)
            self._machine.reservation.reserve_space()
            self._switch_image(image)
        if pulled is not None and parse_digest(image) == staged_id:
            self._remove_pulled(pulled)

    def roll_back(self) -> None:
        """Make the previous deployment the default, and return; nothing reboots.

        What is staged or pulled is dropped, whoever staged it, for the shutdown would make it the
        default again. Repeatable: asked again, bootc would change them back, so one that an agent
        began which died is waited for, and nothing is done when the previous one is the default.
        """
        self._machine.reservation.release_space()
        pulled = self._units.find_run(PULL_UNIT)
        if pulled is not None:
            self._remove_pulled(pulled)
        self._jobs.wait_for_units(UNDEPLOY_UNIT, ROLLBACK_UNIT)
        status = self._read_status()
        if status.staged is not None:
            log.warning("dropping %s, which is staged, to roll back", status.staged.id)
            self._undeploy_deployment(status.staged)
            status = self._read_status()
        if status.is_rollback_queued:
            log.info("%s is the default already", status.rollback and status.rollback.id)
            return
        if status.rollback is None:
            raise HostError(
                "there is no previous deployment to go back to", remedy="see: bootc status"
            )
        argv = (self._resolve_program(_BOOTC), "rollback")
        self._jobs.run_job(ROLLBACK_UNIT, "bootc", f"roll back to {status.rollback.image}", argv)

    def release_daemon(self) -> None:
        """Nothing to let go: bootc does not stay."""

    def _undeploy_deployment(self, deployment: OstreeDeployment, number: int = 0) -> None:
        """Drop it by its place in boot order; bootc has no word for it, but ostree has."""
        argv = (self._resolve_program(OSTREE_PROGRAM), "admin", "undeploy", str(number))
        self._jobs.run_job(UNDEPLOY_UNIT, "bootc", f"drop {deployment.image}", argv)

    def _undeploy_former(self, status: BootcStatus, digest: str) -> None:
        """Drop an earlier deployment of the image that is about to be deployed once more.

        By their ids the two are one: if the power was cut now, the earlier one would be taken for
        the new one, which the boot loader gave up.
        """
        former, plain = status.rollback, not (status.staged or status.other_deployments)
        if plain and former is not None and former.id == digest and not former.is_pinned:
            self._undeploy_deployment(former, 0 if status.is_rollback_queued else 1)

    def _pull_image(self, image: str, watch: WatchCallback) -> None:
        job = TransientJob(
            PULL_UNIT,
            f"treenail: pull {image}",
            self._podman.build_pull_command(image),
            self._limits.transaction_s,
        )

        progress = PodmanProgress(self._podman.read_layer_sizes(image))
        due = 0.0

        def each() -> None:
            nonlocal due
            if self._clock.monotonic() >= due:
                found = self._units.find_run(PULL_UNIT)
                if found is not None:
                    progress.parse_output(
                        self._machine.journal.read_output(found.invocation, limit=_PULL_LINES)
                    )
                due = self._clock.monotonic() + _PULL_READ_S
            match watch(progress.last_progress):
                case WatchVerdict.CANCEL:
                    self._units.stop_unit(PULL_UNIT, self._heartbeat)
                    raise CancelledError(f"{image} was not pulled: it was cancelled")
                case WatchVerdict.DETACH:
                    raise CancelledError(
                        f"podman goes on to pull {image}, and is not waited for any more"
                    )
                case WatchVerdict.CONTINUE:
                    pass

        self._jobs.check_outcome(self._units.run_job(job, each), f"podman could not pull {image}")
        watch(TransactionProgress(f"pulled {image}", 100))

    def _remove_pulled(self, pulled: TransientRun) -> None:
        self._units.stop_unit(PULL_UNIT, self._heartbeat)
        self._podman.remove_image(_parse_pulled_image(pulled))

    def _switch_image(self, image: str) -> None:
        fifo = self._root.resolve_path(_FIFO)
        # podman has kept to the signature policy in any case; this has it kept to from now on.
        signed = ("--enforce-container-sigpolicy",) if self._needs_signature(image) else ()
        argv = (
            "/bin/sh", "-c", _PROGRESS_SCRIPT, str(fifo),
            self._resolve_program(_BOOTC), "switch", "--progress-fd", "3", "--quiet",
            *signed, "--transport", "containers-storage", image,
        )  # fmt: skip
        with read_progress(fifo) as progress:
            self._jobs.run_job(
                SWITCH_UNIT, "bootc", f"switch to {image}", argv, lambda: progress.last_progress
            )
        staged = self._read_status().staged
        if staged is None or staged.digest != parse_digest(image) or staged.is_locked:
            raise TransactionError(
                f"bootc did not stage {image}: {staged.digest if staged else 'nothing'} is staged",
                remedy=f"see: bootc status; journalctl -u {SWITCH_UNIT}",
            )

    def _refuse_unless_switchable(self, status: BootcStatus, image: str) -> None:
        """Raise if bootc would, or if something is deployed already, for any reboot to boot."""
        if status.is_incompatible:
            changes = ", ".join(
                self._machine.ostree_metadata.find_local_changes(status.origin_path)
            )
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

    def _read_status(self, *, timeout_s: float | None = None) -> BootcStatus:
        timeout_s = timeout_s or self._status_s
        command = [self._resolve_program(_BOOTC), "status", "--json", "--format-version=1"]
        try:
            content = self._machine.unsandboxed.run_command(command, timeout_s=timeout_s)
        except CommandError as error:
            if "not done within" not in str(error):
                raise
            raise BusyError(
                f"bootc status did not answer within {timeout_s:g} s: another program, such as "
                "rpm-ostree or ostree, holds the sysroot",
                remedy="see: fuser -v /ostree/lock",
            ) from error
        status = parse_status(content)
        seen = FileSpec(_STATUS_CACHE, content, 0o600)
        if not self._machine.files.has_file(seen):
            self._machine.files.write_files([seen])
        return status

    def _read_cached_status(self) -> BootcStatus:
        """As it was last seen since the boot, while bootc would not answer."""
        content = self._machine.files.read_file(_STATUS_CACHE, limit=_STATUS_CACHE_LIMIT)
        return self._read_status() if content is None else parse_status(content)

    def _make_pulled_deployment(self, image: str) -> OstreeDeployment:
        digest = parse_digest(image)
        if image not in self._labels:
            # They decide about the update, so without them it is tried again.
            self._labels = {image: self._podman.read_labels(image)}
        labels = self._labels[image]
        return OstreeDeployment(
            id=digest,
            checksum="",
            version=labels.get("org.opencontainers.image.version", ""),
            image=image,
            digest=digest,
            is_booted=False,
            is_staged=True,
            is_locked=True,
            is_pinned=False,
            origin=image,
            labels=labels,
        )

    def _resolve_program(self, path: str) -> str:
        return str(self._root.resolve_path(path))


def _parse_pulled_image(run: TransientRun) -> str:
    """The image that a pull is about; empty when it is about something else."""
    _, told, image = run.description.partition("treenail: pull ")
    return image if told else ""
