"""The back end for bootc, which has no D-Bus interface: its commands run as transient units.

Reading commands do so too: bootc needs CAP_SYS_ADMIN and a mount namespace of its own for them, and
podman treats a root user without that capability as unprivileged. The agent's sandbox has neither.

bootc cannot stage an image locked, and any reboot boots a staged image. Therefore the image is
pulled into podman's storage while the node serves, which arms nothing, and once the node is drained
``bootc switch --transport containers-storage`` deploys it from there. Both are documented:
https://bootc.dev/bootc/man/bootc-switch.8.html. The image is on disk twice in between.
``switch --download-only``, added to bootc in summer 2026, is not used: it leaves a staged image
unlocked (https://github.com/bootc-dev/bootc/issues/2425), and no command undoes it.

The unit of the pull stays until it is released, and is the record that the image was pulled. A
reboot removes the unit, as it finalizes a staged deployment.

bootc may stage another image than the requested one. From before the switch until its result is
verified, a record names the requested image. Without the record an agent that starts after a kill
would take that deployment for an administrator's, and the next reboot would boot it.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from treenail import deployment_change, errors
from treenail.encoding import json_text
from treenail.host.bootc.progress import read_progress
from treenail.host.bootc.status import BootcStatus, parse_status
from treenail.host.container.podman import PodmanProgress
from treenail.host.filesystem import atomic_files, root_directory
from treenail.host.machine import Machine
from treenail.host.ostree import admin, deployments, sysroot
from treenail.host.system.kernel import HostKernel
from treenail.host.system.state_file import STATE_DIRECTORY
from treenail.host.systemd import transient

log = logging.getLogger(__name__)

SWITCH_RECORD_PATH = f"{STATE_DIRECTORY}/bootc-switch.json"
PULL_UNIT = "treenail-pull.service"
SWITCH_UNIT = "treenail-bootc-switch.service"
ROLLBACK_UNIT = "treenail-bootc-rollback.service"
UNDEPLOY_UNIT = "treenail-undeploy.service"

_BOOTC = "/usr/bin/bootc"
_FIFO = "/run/treenail/bootc-progress"
_STATUS_CACHE = "/run/treenail/bootc-status.json"
_REBOOT_REQUEST = "/run/reboot-required"
_STATUS_CACHE_LIMIT = 1024 * 1024
# bootc status waits for the sysroot lock, which another program may hold during a whole pull.
_STATUS_S = 60.0
_WAIT_S = 5.0
# podman writes one line for each layer, or two lines a second with progress.
_PULL_LINES = 1000
_PULL_READ_S = 2.0
# The descriptor is opened by the shell: ExtraFileDescriptors= is too new for RHEL 9.
# bootc accepts a descriptor above 2 that is a pipe, and no regular file or socket. The FIFO has a
# reader by then: open(2) for writing would wait for one (fifo(7)).
_PROGRESS_SCRIPT = 'exec "$@" 3>"$0" 1>&2'
_IMAGE_MODE_REMEDY = (
    "add packages, and arguments in /usr/lib/bootc/kargs.d, to the image; or, where rpm-ostree is "
    'installed, set backend = "rpm-ostree"'
)


class BootcBackend:
    """The deployments of a host with bootc. Raises only `HostError`; for one thread.

    Programs run below ``root``, whose paths must be those that systemd sees too.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        status_s: float = _STATUS_S,
        needs_signature: Callable[[str], bool] = lambda _image: False,
    ) -> None:
        """``status_s`` limits the time of ``bootc status``.

        ``needs_signature`` returns whether bootc must verify the signature of an image.
        """
        self._machine = machine
        self._root = machine.root
        self._clock = machine.clock
        self._limits = machine.limits
        self._heartbeat = machine.heartbeat
        self._units = machine.transient_units
        self._jobs = machine.jobs
        self._podman = machine.podman
        self._switch_record = SwitchRecord(machine.files, machine.kernel)
        self._status_s = status_s
        self._needs_signature = needs_signature
        self._labels: dict[str, dict[str, str]] = {}

    @property
    def name(self) -> str:
        """The name of the back end in messages."""
        return "bootc"

    def read_deployments(self) -> deployments.DeploymentStatus:
        """Read the deployments; a pulled image counts as a staged, locked deployment.

        While our own bootc command runs, return the previous state: bootc would not answer.
        """
        switching = self._jobs.find_running(SWITCH_UNIT, ROLLBACK_UNIT, UNDEPLOY_UNIT)
        status = self._read_status() if switching is None else self._read_cached_status()
        pulled = self._units.find_run(PULL_UNIT)
        running = switching or (pulled if pulled and pulled.is_running else None)
        in_boot_order = tuple(
            replace(
                deployment, labels=self._machine.ostree_metadata.read_labels(deployment.checksum)
            )
            for deployment in status.in_boot_order
        )
        image = _parse_pulled_image(pulled) if pulled and pulled.is_done else ""
        if image and not any(
            deployment.has_image(deployments.parse_digest(image))
            for deployment in in_boot_order[:1]
        ):
            in_boot_order = (self._make_pulled_deployment(image), *in_boot_order)
        return deployments.DeploymentStatus(
            in_boot_order,
            deployments.ActiveTransaction(running.description, "systemd", "") if running else None,
        )

    def stage_deployment(
        self, change: deployment_change.DeploymentChange, *, watch: deployments.TransactionWatch
    ) -> None:
        """Pull the image to this host; it is not deployed, so that no reboot can boot it.

        A running pull is joined, a finished one is not repeated. Raises `HostError` for a change
        that bootc cannot make, or when another image is staged; `TransactionError`;
        `CancelledError`, also when the watcher detached and the pull continues.
        """
        if change != deployment_change.DeploymentChange(image=change.image):
            raise errors.HostError(
                "bootc can change only the image of an installed host; requested: "
                f"{replace(change, image='')}",
                remedy=_IMAGE_MODE_REMEDY,
            )
        if not deployments.parse_digest(change.image):
            raise errors.HostError(f"cannot stage {change.image}: it is not named by its digest")
        self._drop_wrong_switch()
        status = (
            self._read_status()
            if self._jobs.find_running(SWITCH_UNIT, ROLLBACK_UNIT) is None
            else None
        )
        if status is not None:
            digest = deployments.parse_digest(change.image)
            if not status.staged and status.booted.has_image(digest):
                # bootc switch to the booted image stages nothing (bootc 1.16.9).
                log.info("%s is booted already", change.image)
                return
            self._refuse_unless_switchable(status, change.image)
        run = self._units.find_run(PULL_UNIT)
        if run is not None and run.is_running_or_done and _parse_pulled_image(run) != change.image:
            raise errors.HostError(
                f"cannot stage {change.image}: {_parse_pulled_image(run)} was pulled before it",
                remedy=f"drop it with: systemctl stop {PULL_UNIT}",
            )
        self._pull_image(change.image, watch)

    @contextmanager
    def open_staged_tree(
        self, staged_id: str, paths: Sequence[str]
    ) -> Iterator[root_directory.Root]:
        """Copy these paths out of the pulled image with this digest, and remove them at the end.

        Raises `HostError` when the image is not pulled.
        """
        pulled = self._units.find_run(PULL_UNIT)
        image = _parse_pulled_image(pulled) if pulled and pulled.is_done else ""
        if not image or staged_id not in {
            deployment.id for deployment in self.read_deployments().in_boot_order
        }:
            raise errors.HostError(
                f"cannot read the content of {staged_id}: it is no longer pulled",
                remedy="see: bootc status; podman images",
            )
        with self._podman.copy_from_image(image, paths) as tree:
            yield tree

    def wait_for_other_transaction(self, *, watch: deployments.TransactionWatch) -> bool:
        """Wait until bootc answers again or the watcher detaches; always return True.

        Raises `BusyError` when it exceeds the limits.
        """
        deadline = self._clock.monotonic() + self._limits.transaction_s
        waiting = deployments.TransactionProgress("waiting for the lock of the sysroot", None)
        while watch(waiting) is deployments.TransactionVerdict.CONTINUE:
            try:
                self._read_status(timeout_s=min(_WAIT_S, self._status_s))
            except errors.BusyError:
                if self._clock.monotonic() >= deadline:
                    raise
            else:
                break
        return True

    def read_finalization_error(self) -> str:
        """Return why ostree did not finalize a deployment at the last shutdown; empty if it did."""
        return self._machine.journal.read_previous_boot_error(admin.FINALIZE_UNIT)

    def drop_staged(self, staged_id: str) -> None:
        """Cancel our pull, and drop the pulled or pending image with this digest.

        A pending image is staged, or was deployed and given up by the boot loader, which would try
        it again. Idempotent. Images that another program staged stay.
        """
        pulled = self._units.find_run(PULL_UNIT)
        if pulled is not None and (
            pulled.is_running or deployments.parse_digest(_parse_pulled_image(pulled)) == staged_id
        ):
            self._remove_pulled(pulled)
        self._jobs.wait_for_units(UNDEPLOY_UNIT)
        self._drop_wrong_switch()
        pending = (
            deployments.DeploymentStatus(self._read_status().in_boot_order).pending
            if staged_id
            else None
        )
        if pending is not None and pending.id == staged_id:
            self._undeploy_deployment(pending)

    # is_soft is unused: bootc switch never reboots.
    def finalize_staged(self, staged_id: str, *, is_soft: bool = False) -> None:  # noqa: ARG002
        """Deploy the pulled image with this digest for the next boot; nothing reboots.

        Raises `HostError` when another image is staged. Idempotent.
        """
        self._drop_wrong_switch()
        pulled = self._units.find_run(PULL_UNIT)
        image = _parse_pulled_image(pulled) if pulled and pulled.is_done else ""
        status = (
            self._read_status()
            if self._jobs.find_running(SWITCH_UNIT) is None
            else self._read_cached_status()
        )
        if status.staged is None or status.staged.id != staged_id:
            if deployments.parse_digest(image) != staged_id:
                other = status.staged.id if status.staged else deployments.parse_digest(image)
                raise errors.HostError(
                    f"cannot reboot into {staged_id}: {other or 'nothing'} is staged",
                    remedy="see: bootc status",
                )
            self._refuse_unless_switchable(status, image)
            self._undeploy_former(status, staged_id)
            self._machine.reservation.reserve_space()
            self._switch_image(image)
        if pulled is not None and deployments.parse_digest(image) == staged_id:
            self._remove_pulled(pulled)

    def roll_back(self) -> None:
        """Make the previous deployment the default; nothing reboots.

        A staged or pulled image is dropped whichever program staged it: the shutdown would make it
        the default again. Idempotent, although a second ``bootc rollback`` would swap the
        deployments back: a rollback that a previous agent began is waited for.
        """
        self._machine.reservation.release_space()
        pulled = self._units.find_run(PULL_UNIT)
        if pulled is not None:
            self._remove_pulled(pulled)
        self._jobs.wait_for_units(UNDEPLOY_UNIT, ROLLBACK_UNIT)
        status = self._read_status()
        if status.staged is not None:
            log.warning("dropping staged %s to roll back", status.staged.id)
            self._undeploy_deployment(status.staged)
            status = self._read_status()
        if status.is_rollback_queued:
            log.info("%s is the default already", status.rollback and status.rollback.id)
            return
        if status.rollback is None:
            raise errors.HostError(
                "cannot roll back: there is no previous deployment", remedy="see: bootc status"
            )
        argv = (self._resolve_program(_BOOTC), "rollback")
        self._jobs.run_job(ROLLBACK_UNIT, "bootc", f"roll back to {status.rollback.image}", argv)

    def release_daemon(self) -> None:
        """Do nothing: bootc has no daemon."""

    def _undeploy_deployment(
        self, deployment: deployments.OstreeDeployment, number: int = 0
    ) -> None:
        """Drop a deployment by its place in boot order; ostree does it, as bootc cannot."""
        # ostree leaves the file, and kured would reboot the node for nothing (deploy.rs).
        request = f"bootc: Reboot required for image: {deployment.digest}".encode()
        if self._machine.files.read_file(_REBOOT_REQUEST) == request:
            self._machine.files.remove_file(_REBOOT_REQUEST)
        argv = (self._resolve_program(sysroot.OSTREE_PROGRAM), "admin", "undeploy", str(number))
        self._jobs.run_job(UNDEPLOY_UNIT, "ostree", f"drop {deployment.image}", argv)

    def _undeploy_former(self, status: BootcStatus, digest: str) -> None:
        """Drop an earlier deployment of the image that is about to be deployed again.

        Both have the same ID: after a power cut the earlier one would be mistaken for the new one,
        given up by the boot loader.
        """
        former = status.rollback
        # The index in boot order is known only without a staged or further deployment.
        is_index_known = not (status.staged or status.other_deployments)
        if is_index_known and former and former.id == digest and not former.is_pinned:
            self._undeploy_deployment(former, 0 if status.is_rollback_queued else 1)

    def _pull_image(self, image: str, watch: deployments.TransactionWatch) -> None:
        job = transient.TransientJob(
            PULL_UNIT,
            f"treenail: pull {image}",
            self._podman.build_pull_command(image),
            self._limits.transaction_s,
        )

        progress = PodmanProgress(self._podman.read_layer_sizes(image))
        next_read = 0.0

        def check_progress() -> None:
            nonlocal next_read
            if self._clock.monotonic() >= next_read:
                run = self._units.find_run(PULL_UNIT)
                if run is not None:
                    progress.parse_output(
                        self._machine.journal.read_output(run.invocation, limit=_PULL_LINES)
                    )
                next_read = self._clock.monotonic() + _PULL_READ_S
            match watch(progress.last_progress):
                case deployments.TransactionVerdict.CANCEL:
                    self._units.stop_unit(PULL_UNIT, self._heartbeat)
                    raise errors.CancelledError(f"cancelled the pull of {image}")
                case deployments.TransactionVerdict.DETACH:
                    raise errors.CancelledError(
                        f"stopped waiting for podman to pull {image}; the pull continues"
                    )
                case deployments.TransactionVerdict.CONTINUE:
                    pass

        run = self._units.run_job(job, check_progress)
        self._jobs.check_outcome(run, f"cannot pull {image} with podman")
        watch(deployments.TransactionProgress(f"pulled {image}", 100))

    def _remove_pulled(self, pulled: transient.TransientRun) -> None:
        self._units.stop_unit(PULL_UNIT, self._heartbeat)
        self._podman.remove_image(_parse_pulled_image(pulled))

    def _switch_image(self, image: str) -> None:
        fifo = self._root.resolve_path(_FIFO)
        # podman enforced the signature policy at the pull; this enforces it for later updates.
        signed = ("--enforce-container-sigpolicy",) if self._needs_signature(image) else ()
        argv = (
            "/bin/sh", "-c", _PROGRESS_SCRIPT, str(fifo),
            self._resolve_program(_BOOTC), "switch", "--progress-fd", "3", "--quiet",
            *signed, "--transport", "containers-storage", image,
        )  # fmt: skip
        self._switch_record.write_image(image)
        try:
            with read_progress(fifo) as progress:
                self._jobs.run_job(
                    SWITCH_UNIT, "bootc", f"switch to {image}", argv, lambda: progress.last_progress
                )
        except errors.TransactionError:
            with suppress(errors.HostError):
                self._drop_wrong_switch(image)
            raise
        staged = self._drop_wrong_switch(image)
        if (
            staged is not None
            and staged.has_image(deployments.parse_digest(image))
            and not staged.is_locked
        ):
            return
        result = f"{staged.image} ({staged.digest})" if staged else "nothing"
        raise errors.TransactionError(
            f"bootc did not stage {image}: it staged {result}",
            remedy=f"see: bootc status; journalctl -u {SWITCH_UNIT}",
        )

    def _drop_wrong_switch(self, image: str = "") -> deployments.OstreeDeployment | None:
        """Drop what the switch to ``image`` staged unless it is that image; return what was staged.

        Without ``image``: the switch of an agent that was killed before it verified the result, if
        there is one and it does not run any longer.
        """
        image = image or self._switch_record.read_image()
        if not image or self._jobs.find_running(SWITCH_UNIT) is not None:
            return None
        staged = self._read_status().staged
        if staged is not None and not (
            staged.has_image(deployments.parse_digest(image)) and not staged.is_locked
        ):
            # Nothing was staged before, so bootc staged it for us, and any reboot would boot it.
            log.warning("dropping %s, which bootc staged instead of %s", staged.image, image)
            self._undeploy_deployment(staged)
        self._switch_record.remove_image()
        return staged

    def _refuse_unless_switchable(self, status: BootcStatus, image: str) -> None:
        """Raise `HostError` if bootc cannot switch to the image, or if another image is staged."""
        # bootc upgrade refuses to replace it; bootc switch drops the packages (bootc 1.16.9).
        if status.is_incompatible:
            changes = ", ".join(
                self._machine.ostree_metadata.find_local_changes(status.origin_path)
            )
            raise errors.HostError(
                "bootc cannot replace the booted deployment: rpm-ostree changed it"
                f"{': ' if changes else ''}{changes}",
                remedy='undo the changes with: rpm-ostree reset; or set backend = "rpm-ostree"',
            )
        if status.staged is not None:
            raise errors.HostError(
                # bootc replaces a staged deployment, whichever program staged it.
                f"cannot stage {image}: {status.staged.image or status.staged.id} is staged",
                remedy="drop it with: ostree admin undeploy 0",
            )

    def _read_status(self, *, timeout_s: float | None = None) -> BootcStatus:
        timeout_s = timeout_s or self._status_s
        # rpm-ostreed only tries the lock of the sysroot and reports that it is busy. bootc waits
        # for the lock, and prints nothing about it where its output is no terminal.
        command = [self._resolve_program(_BOOTC), "status", "--json", "--format-version=1"]
        try:
            content = self._machine.unsandboxed.run_command(command, timeout_s=timeout_s)
        except errors.CommandTimeoutError as error:
            raise errors.BusyError(
                f"bootc status did not answer within {timeout_s:g} s: another program, such as "
                "rpm-ostree or ostree, holds the sysroot",
                remedy="see: fuser -v /ostree/lock",
            ) from error
        status = parse_status(content)
        cache = atomic_files.FileSpec(_STATUS_CACHE, content, 0o600)
        if not self._machine.files.has_file(cache):
            self._machine.files.write_files([cache])
        return status

    def _read_cached_status(self) -> BootcStatus:
        """Return the last status since the boot, while bootc would not answer."""
        content = self._machine.files.read_file(_STATUS_CACHE, limit=_STATUS_CACHE_LIMIT)
        return self._read_status() if content is None else parse_status(content)

    def _make_pulled_deployment(self, image: str) -> deployments.OstreeDeployment:
        digest = deployments.parse_digest(image)
        if image not in self._labels:
            # Labels decide about the update: a failed read raises and is repeated, never cached.
            self._labels = {image: self._podman.read_labels(image)}
        labels = self._labels[image]
        return deployments.OstreeDeployment(
            id=digest,
            checksum="",
            # From the annotations of the OCI image specification (annotations.md).
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


class SwitchRecord:
    """The image of the unverified switch of this boot: no staged deployment outlives a boot."""

    def __init__(self, files: atomic_files.HostFiles, kernel: HostKernel) -> None:
        self._files = files
        self._kernel = kernel

    def read_image(self) -> str:
        """Return the pull spec; empty without a record of this boot. Raises `HostError`."""
        try:
            content = self._files.read_file(SWITCH_RECORD_PATH)
            document: object = None if content is None else json_text.parse_json(content)
        except (errors.FileError, ValueError) as error:
            log.warning("cannot read the record of the last switch: %s", error)
            return ""
        match document:
            case {"image": str(image), "bootID": str(boot)} if boot == self._kernel.read_boot_id():
                return image
            case _:
                return ""

    def write_image(self, image: str) -> None:
        """Record the pull spec durably. Raises `HostError`."""
        document = {"image": image, "bootID": self._kernel.read_boot_id()}
        self._files.write_file(SWITCH_RECORD_PATH, json.dumps(document).encode(), mode=0o600)

    def remove_image(self) -> None:
        """Remove the record, if there is one. Raises `FileError`."""
        self._files.remove_file(SWITCH_RECORD_PATH)


def _parse_pulled_image(run: transient.TransientRun) -> str:
    """Return the image of a pull; empty for a unit of another purpose."""
    _, prefix, image = run.description.partition("treenail: pull ")
    return image if prefix else ""
