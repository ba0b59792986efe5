"""Pinned deployments, which neither rpm-ostree, bootc nor ostree drops to make room.

There is no call on the bus for it: ``ostree admin pin`` names a deployment by its place in the boot
order, so what was pinned is looked at afterwards. See ostree-admin-pin(1).
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
    """Raises `HostError` alone, of that `BusyError` while a transaction changes deployments.

    To be used by one thread.
    """

    def __init__(
        self, jobs: JobRunner, root: Root, read_deployments: Callable[[], DeploymentStatus]
    ) -> None:
        """``read_deployments`` says which deployments there are now."""
        self._jobs = jobs
        self._root = root
        self._read_deployments = read_deployments

    def pin_deployment(self, deployment_id: str) -> None:
        """Return once nobody drops the deployment of this id."""
        self._set_pinned(deployment_id, is_pinned=True)
        found = [
            each for each in _list_deployed(self._read_deployments()) if each.id == deployment_id
        ]
        if not any(each.is_pinned for each in found):
            raise TransactionError(
                f"ostree did not pin {deployment_id}, which is what there is to go back to",
                remedy="see: ostree admin status",
            )
        log.info("pinned %s", deployment_id)

    def unpin_deployment(self, deployment_id: str) -> None:
        """Let it be dropped; harmless when there is none of this id."""
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
    """Those that ostree knows: an image that bootc is to deploy has no commit yet."""
    return [each for each in found.in_boot_order if each.checksum]
