"""Pinned deployments, which neither rpm-ostree, bootc nor ostree drops to make room.

There is no call on the bus for it: ``ostree admin pin`` names a deployment by its place in the boot
order, so what was pinned is looked at afterwards. See ostree-admin-pin(1).
"""

import logging
from collections.abc import Callable

from treenail.errors import BusyError, TransactionError
from treenail.host.filesystem.root import Root
from treenail.host.ostree.commit import PROGRAM
from treenail.host.ostree.deployments import Deployment, Deployments
from treenail.host.ostree.jobs import Jobs

log = logging.getLogger(__name__)

UNIT = "treenail-pin.service"


class Pins:
    """Raises `HostError` alone, of that `BusyError` while a transaction changes deployments.

    To be used by one thread.
    """

    def __init__(self, jobs: Jobs, root: Root, look: Callable[[], Deployments]) -> None:
        """``look`` says which deployments there are now."""
        self._jobs = jobs
        self._root = root
        self._look = look

    def pin(self, deployment_id: str) -> None:
        """Return once nobody drops the deployment of this id."""
        self._have(deployment_id, pinned=True)
        found = [each for each in _written(self._look()) if each.id == deployment_id]
        if not any(each.pinned for each in found):
            raise TransactionError(
                f"ostree did not pin {deployment_id}, which is what there is to go back to",
                remedy="see: ostree admin status",
            )
        log.info("pinned %s", deployment_id)

    def unpin(self, deployment_id: str) -> None:
        """Let it be dropped; harmless when there is none of this id."""
        self._have(deployment_id, pinned=False)
        log.info("unpinned %s", deployment_id)

    def _have(self, deployment_id: str, *, pinned: bool) -> None:
        found = self._look()
        for index, each in enumerate(_written(found)):
            if each.id != deployment_id or each.staged or each.pinned is pinned:
                continue
            if found.transaction is not None:
                method = found.transaction.method
                raise BusyError(
                    f"rpm-ostree is busy with {method}", remedy="see: rpm-ostree status"
                )
            option = () if pinned else ("--unpin",)
            argv = (str(self._root.path(PROGRAM)), "admin", "pin", *option, str(index))
            self._jobs.carry_out(UNIT, f"{'' if pinned else 'un'}pin {deployment_id}", argv)


def _written(found: Deployments) -> list[Deployment]:
    """Those that ostree knows: an image that bootc is to deploy has no commit yet."""
    return [each for each in found.all if each.checksum]
