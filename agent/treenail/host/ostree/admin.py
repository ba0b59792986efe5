"""Commands of ``ostree admin``: pinned deployments and soft reboots.

rpm-ostreed has no D-Bus methods for these. The commands run in transient units, because they mount
in the mount namespace of the host. See ostree-admin-pin(1) and, of ostree 2025.3 and later,
ostree-admin-prepare-soft-reboot(1).
"""

import logging
from collections.abc import Callable

from treenail import errors
from treenail.host.filesystem.root_directory import Root
from treenail.host.ostree.deployments import DeploymentStatus, OstreeDeployment
from treenail.host.ostree.jobs import JobRunner
from treenail.host.ostree.sysroot import OSTREE_PROGRAM

log = logging.getLogger(__name__)

PIN_UNIT = "treenail-pin.service"
FINALIZE_UNIT = "ostree-finalize-staged.service"
"""The unit of ostree that deploys the staged deployment at shutdown."""
SOFT_REBOOT_UNIT = "treenail-soft-reboot.service"
_NEXT_ROOT = "/run/ostree/nextroot-booted"


class OstreePins:
    """Pins deployments: rpm-ostree, bootc and ostree do not remove them to free space.

    For one thread. Raises only `HostError`, of which `BusyError` during a transaction.
    """

    def __init__(
        self, jobs: JobRunner, root: Root, read_deployments: Callable[[], DeploymentStatus]
    ) -> None:
        """Use ``read_deployments`` to read the current deployments."""
        self._jobs = jobs
        self._root = root
        self._read_deployments = read_deployments

    def pin_deployment(self, deployment_id: str) -> None:
        """Pin the deployment with this ID; raise `TransactionError` unless it is pinned then."""
        self._set_pinned(deployment_id, is_pinned=True)
        deployments = _list_deployed(self._read_deployments())
        if not any(
            deployment.is_pinned for deployment in deployments if deployment.id == deployment_id
        ):
            raise errors.TransactionError(
                f"cannot pin {deployment_id}: ostree did not pin this rollback deployment",
                remedy="see: ostree admin status",
            )
        log.info("pinned %s", deployment_id)

    def unpin_deployment(self, deployment_id: str) -> None:
        """Unpin the deployment with this ID, if it exists."""
        self._set_pinned(deployment_id, is_pinned=False)
        log.info("unpinned %s", deployment_id)

    def _set_pinned(self, deployment_id: str, *, is_pinned: bool) -> None:
        status = self._read_deployments()
        for index, deployment in enumerate(_list_deployed(status)):
            if (
                deployment.id != deployment_id
                or deployment.is_staged
                or deployment.is_pinned is is_pinned
            ):
                continue
            if status.transaction is not None:
                method = status.transaction.method
                raise errors.BusyError(
                    f"rpm-ostree is busy with {method}", remedy="see: rpm-ostree status"
                )
            # The index in boot order may change meanwhile, so pin_deployment verifies the result.
            argv = ("pin", str(index)) if is_pinned else ("pin", "--unpin", str(index))
            description = f"{'' if is_pinned else 'un'}pin {deployment_id}"
            _run_admin(self._jobs, self._root, PIN_UNIT, description, argv)


class OstreeSoftReboot:
    """Prepares soft reboots into another deployment, which ostree mounts as the next root.

    ostree rejects a deployment whose kernel, initramfs or kernel arguments differ from the running
    ones, so its answer shows whether a soft reboot is possible. For one thread. Raises only
    `HostError`.
    """

    def __init__(self, jobs: JobRunner, root: Root) -> None:
        self._jobs = jobs
        self._root = root

    def unlock_staged(self) -> None:
        """Unlock the staged deployment, so that the next shutdown finalizes it; do not reboot."""
        self._run_command("unlock the staged deployment", "lock-finalization", "--unlock")

    def prepare_soft_reboot(self) -> bool:
        """Prepare a soft reboot into the staged deployment; return False when ostree rejects it."""
        try:
            # The staged deployment is the first in boot order, so its index is 0.
            self._run_command("prepare a soft reboot", "prepare-soft-reboot", "0")
        except errors.TransactionError as error:
            log.info("falling back to a full reboot: %s", error)
            return False
        return True

    def clear_soft_reboot(self) -> None:
        """Clear a prepared soft reboot, if there is one."""
        if self._root.resolve_path(_NEXT_ROOT).exists():
            self._run_command("clear the soft reboot", "prepare-soft-reboot", "--reset")

    def _run_command(self, description: str, *arguments: str) -> None:
        _run_admin(self._jobs, self._root, SOFT_REBOOT_UNIT, description, arguments)


def _run_admin(
    jobs: JobRunner, root: Root, unit: str, description: str, arguments: tuple[str, ...]
) -> None:
    argv = (str(root.resolve_path(OSTREE_PROGRAM)), "admin", *arguments)
    jobs.run_job(unit, "ostree", description, argv)


def _list_deployed(status: DeploymentStatus) -> list[OstreeDeployment]:
    """Return the deployments that ostree counts: an image queued in bootc has no commit yet."""
    return [deployment for deployment in status.in_boot_order if deployment.checksum]
