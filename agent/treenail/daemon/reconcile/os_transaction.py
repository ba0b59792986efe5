"""OS transactions: build the change, pull the image with a working login, wait while busy.

Their progress goes to the API server, in a few writes at most.
"""

import logging
from collections.abc import Callable

from treenail import clocks, errors
from treenail.daemon import interfaces
from treenail.daemon.cluster.pull_secrets import PullSecrets
from treenail.host.container.registry import is_unauthorized
from treenail.host.ostree import deployments
from treenail.log import MessageId
from treenail.update.checks.preflight_reason import PreflightReason
from treenail.update.impact.os_change import OSChange

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
"""Minimum interval between two writes, and from the first percentage to the first write."""
STEP_PERCENT = 10


class ProgressReporter:
    """Writes percentages of an update: ten at most, however long its transaction takes.

    Each costs the API server a write of the Node. A failed write ends the reports of this update,
    so that an API server without an answer does not delay the transaction again.
    """

    def __init__(self, write: Callable[[int], None], clock: clocks.Clock) -> None:
        self._write = write
        self._clock = clock
        self._update_id = ""
        self._written_percent = 0
        self._not_before = 0.0

    def handle_progress(self, update_id: str, progress: deployments.TransactionProgress) -> None:
        """Write the percentage if it grew enough since the last write. Never raises."""
        if progress.percent is None:
            return
        now = self._clock.monotonic()
        if update_id != self._update_id:
            self._update_id, self._written_percent = update_id, 0
            self._not_before = now + INTERVAL_S
        if now < self._not_before or progress.percent < self._written_percent + STEP_PERCENT:
            return
        self._not_before, self._written_percent = now + INTERVAL_S, progress.percent
        try:
            self._write(progress.percent)
        except errors.ClusterError as error:
            log.debug("cannot write the progress: %s", error)
            self._not_before = float("inf")


def build_deployment_change(os_change: OSChange) -> deployments.DeploymentChange:
    """Convert the planned change of the operating system to the argument of an OS back end."""
    return deployments.DeploymentChange(
        image=os_change.image,
        append_kargs=os_change.append,
        delete_kargs=os_change.delete,
        install_packages=os_change.install,
        uninstall_packages=os_change.uninstall,
        override_remove=os_change.remove,
        override_reset=os_change.reset,
        extensions_image=os_change.packages_from,
    )


def wait_while_busy(
    error: errors.BusyError, os: interfaces.OSBackend, watch: interfaces.TransactionWatch
) -> None:
    """Wait until the transaction that ``error`` is about ends; raise it when that is impossible.

    A program that holds the sysroot lock outside a transaction emits no signal when it releases
    the lock. The caller can only try again after a pause.
    """
    log.info("waiting: %s", error)
    if not os.wait_for_other_transaction(watch=watch):
        raise error


def pull_image(credentials: PullSecrets, image: str, attempt: Callable[[], bool]) -> None:
    """Attempt to pull the image, with the newest login and then with the previous one.

    ``attempt`` returns whether the image was pulled. Raises what the last attempt raised.
    """
    credentials.install_secrets()
    if not image:
        attempt()
        return
    try:
        pulled = attempt()
    except (errors.PreflightError, errors.TransactionError) as error:
        if not _is_login_refused(error) or not credentials.handle_rejected_login(image):
            raise
        log.warning(
            "registry rejected the newest login, retrying with the previous one: %s",
            error,
            extra={"message_id": MessageId.CREDENTIALS_INVALID},
        )
        pulled = _retry_pull(credentials, image, attempt)
    if pulled:
        credentials.confirm_login(image)


def _retry_pull(credentials: PullSecrets, image: str, attempt: Callable[[], bool]) -> bool:
    try:
        return attempt()
    except (errors.PreflightError, errors.TransactionError) as error:
        if _is_login_refused(error):
            credentials.handle_rejected_login(image)
        raise


def _is_login_refused(error: errors.PreflightError | errors.TransactionError) -> bool:
    if isinstance(error, errors.PreflightError):
        return PreflightReason.REGISTRY_UNAUTHORIZED in error.reasons
    # rpm-ostree and bootc report a rejected login only in the text of the failed transaction.
    return is_unauthorized(str(error))
