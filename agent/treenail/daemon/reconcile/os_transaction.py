"""OS transactions: what the agent does while one runs, and with which login it pulls.

The back end calls a watch for each progress, at least once a second. The main thread waits in that
call, for an hour perhaps: `TransactionStep` is all that the agent does until the transaction ends.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial

from treenail import clocks, errors
from treenail.daemon.cluster.pull_secrets import PullSecrets
from treenail.daemon.local.status_file import StatusFile
from treenail.daemon.reconcile.context import NodeInterfaces
from treenail.daemon.reconcile.credentials import CredentialSync
from treenail.host.container.registry import is_unauthorized
from treenail.host.ostree import deployments
from treenail.log import MessageId
from treenail.update.checks.preflight_reason import PreflightReason
from treenail.update.decision import decide, decide_idle, node_state, user_requests
from treenail.update.state.ledger_record import LedgerRecord

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
"""Minimum interval between two writes, and from the first percentage to the first write."""
STEP_PERCENT = 10


class TransactionStep:
    """One step of the agent while an OS transaction runs; it decides whether that continues."""

    def __init__(
        self,
        interfaces: NodeInterfaces,
        credentials: CredentialSync,
        status_file: StatusFile,
        stop: threading.Event,
    ) -> None:
        """``stop`` is set when the agent must end."""
        self._interfaces = interfaces
        self._credentials = credentials
        self._status_file = status_file
        self._stop = stop
        self._reporter = ProgressReporter(interfaces.cluster.write_progress, interfaces.clock)
        self._verdict = deployments.TransactionVerdict.CONTINUE

    @property
    def has_ended_transaction(self) -> bool:
        """True if the last verdict cancelled the transaction of the last watch, or left it."""
        return self._verdict is not deployments.TransactionVerdict.CONTINUE

    def make_watch(self, record: LedgerRecord) -> deployments.TransactionWatch:
        """Return the watch of a transaction for the update, or the pre-staging, of the record."""
        self._verdict = deployments.TransactionVerdict.CONTINUE
        return partial(self.run, record)

    def run(
        self, record: LedgerRecord, progress: deployments.TransactionProgress
    ) -> deployments.TransactionVerdict:
        """Show the progress, do what cannot wait for the end, and return the verdict."""
        # systemd restarts an agent whose main thread is silent (WatchdogSec=).
        self._status_file.send_heartbeat()
        self._status_file.show_progress(progress)
        # The Node shows percentages of an update, not of pre-staging.
        if record.update is not None:
            self._reporter.handle_progress(record.update.id, progress)
        # Rotated certificates must be installed within a minute.
        self._credentials.sync_during_transaction()
        # Last, with what was observed meanwhile.
        self._verdict = self._decide_verdict(record)
        return self._verdict

    def _decide_verdict(self, record: LedgerRecord) -> deployments.TransactionVerdict:
        # The OS daemon or systemd runs the transaction, which outlives the agent. The next start
        # joins it.
        if self._stop.is_set():
            return deployments.TransactionVerdict.DETACH
        if not self._is_requested(record):
            return deployments.TransactionVerdict.CANCEL
        return deployments.TransactionVerdict.CONTINUE

    def _is_requested(self, record: LedgerRecord) -> bool:
        """Return whether the cluster still requests the target, and no user cancelled the update.

        A Node that was never read requests anything.
        """
        cached = self._interfaces.cluster.get_cached_node()
        node = None if cached is None else node_state.summarize_node(cached)
        if record.update is not None:
            if not decide.is_target_requested(node, record.update):
                return False
            request = self._interfaces.requests.read_request()
            return not user_requests.is_cancel_request(request, record.update)
        if node is None or record.prestaged is None:
            return True
        return decide_idle.is_prestage_requested(node, record.prestaged, record.current)


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


def wait_while_busy(
    error: errors.BusyError, os: deployments.OSBackend, watch: deployments.TransactionWatch
) -> None:
    """Wait until the transaction that ``error`` is about ends; raise it when that is impossible.

    A program that holds the sysroot lock outside a transaction emits no signal when it releases
    the lock. The caller can only try again after a pause.
    """
    log.info("waiting: %s", error)
    if not os.wait_for_other_transaction(watch=watch):
        raise error


def pull_with_logins(credentials: PullSecrets, image: str, attempt: Callable[[], None]) -> None:
    """Attempt to pull the image, with the newest login and then with the previous one.

    Raises what the last attempt raised.
    """
    credentials.install_secrets()
    if not image:
        attempt()
        return
    try:
        attempt()
    except (errors.PreflightError, errors.TransactionError) as error:
        if not _is_login_refused(error) or not credentials.handle_rejected_login(image):
            raise
        log.warning(
            "registry rejected the newest login, retrying with the previous one: %s",
            error,
            extra={"message_id": MessageId.CREDENTIALS_INVALID},
        )
        _retry_pull(credentials, image, attempt)
    credentials.confirm_login(image)


def _retry_pull(credentials: PullSecrets, image: str, attempt: Callable[[], None]) -> None:
    try:
        attempt()
    except (errors.PreflightError, errors.TransactionError) as error:
        if _is_login_refused(error):
            credentials.handle_rejected_login(image)
        raise


def _is_login_refused(error: errors.PreflightError | errors.TransactionError) -> bool:
    if isinstance(error, errors.PreflightError):
        return PreflightReason.REGISTRY_UNAUTHORIZED in error.reasons
    # rpm-ostree and bootc report a rejected login only in the text of the failed transaction.
    return is_unauthorized(str(error))
