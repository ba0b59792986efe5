"""Pinned deployments, which rpm-ostree, bootc and ostree do not remove to free space.

rpm-ostreed has no D-Bus method to pin a deployment. ``ostree admin pin`` takes the deployment's
index in boot order, which can change in between, so the result is verified afterwards. See
ostree-admin-pin(1).
"""

import logging
from collections.abc import Callable

from treenail.errors import BusyError, TransactionError
from treenail.host.filesystem.root import Root
from treenail.host.ostree.commit import OSTREE_PROGRAM
from treenail.host.ostree.deployments import DeploymentStatus, OstreeDeployment
from treenail.host.ostree.jobs import JobRunner

log = logging.getLogger(__name__)

PIN_UNIT = "treenail-pin.service"


class OstreePins:
    """Pins and unpins deployments, for one thread.

    Raises only `HostError`, and of that `BusyError` while a transaction changes deployments.
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
        found = [
            each for each in _list_deployed(self._read_deployments()) if each.id == deployment_id
        ]
        if not any(each.is_pinned for each in found):
            raise TransactionError(
                f"cannot pin {deployment_id}: ostree did not pin this rollback deployment",
                remedy="see: ostree admin status",
            )
        log.info("pinned %s", deployment_id)

    def unpin_deployment(self, deployment_id: str) -> None:
        """Unpin the deployment with this ID, if it exists."""
        self._set_pinned(deployment_id, is_pinned=False)
        log.info("unpinned %s", deployment_id)

    def _set_pinned(self, deployment_id: str, *, is_pinned: bool) -> None:
        found = self._read_deployments()
        for index, each in enumerate(_list_deployed(found)):
            if each.id != deployment_id or each.is_staged or each.is_pinned is is_pinned:
                continue
            if found.transaction is not None:
                method = found.transaction.method
                raise BusyError(
                    f"rpm-ostree is busy with {method}", remedy="see: rpm-ostree status"
                )
            option = () if is_pinned else ("--unpin",)
            argv = (
                str(self._root.resolve_path(OSTREE_PROGRAM)),
                "admin",
                "pin",
                *option,
                str(index),
            )
            self._jobs.run_job(
                PIN_UNIT, "ostree", f"{'' if is_pinned else 'un'}pin {deployment_id}", argv
            )


def _list_deployed(found: DeploymentStatus) -> list[OstreeDeployment]:
    """Return the deployments that ostree counts: an image queued in bootc has no commit yet."""
    return [each for each in found.in_boot_order if each.checksum]
