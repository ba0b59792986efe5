"""Waits for whoever else has the operating system."""

import logging

from treenail.daemon.reconcile.interfaces import OSBackend, Watch
from treenail.errors import BusyError

log = logging.getLogger(__name__)


def wait_while_busy(error: BusyError, os: OSBackend, watch: Watch) -> None:
    """Return once they have ended, whom the error is about; raises it if that can't be waited for.

    Who holds the lock of the sysroot outside any transaction is not seen to let go: to try again
    after a pause is all there is.
    """
    log.info("waiting: %s", error)
    if not os.wait_for_other_transaction(watch=watch):
        raise error
