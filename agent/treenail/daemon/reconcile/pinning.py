"""The previous deployment is kept while the new one may yet prove bad, and let go afterwards.

ostree would wait for a transaction of somebody else without a word, so that is waited for before.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from treenail.daemon.reconcile.busy_wait import wait_out
from treenail.daemon.reconcile.interfaces import Ports, Watch
from treenail.daemon.reconcile.state import Book
from treenail.errors import BusyError
from treenail.update.decision.facts import Facts
from treenail.update.state.retention import Retained

log = logging.getLogger(__name__)


def keep(facts: Facts, ports: Ports, book: Book, watch: Watch) -> bool:
    """Have what is booted pinned, until what takes its place was healthy for a while.

    False when somebody else was in the way, who has ended now. Raises `HostError`.
    """
    deployed, record = facts.deployed, book.record
    if deployed is None or (record.retained is None and deployed.booted_pinned):
        return True  # somebody wants it kept, and will want it afterwards
    book.save(replace(record, retained=Retained(deployed.booted_id)))
    return _done(lambda: ports.pins.pin(deployed.booted_id), ports, watch)


def let_go(deployment_id: str, ports: Ports, book: Book, watch: Watch | None) -> bool:
    """Have the deployment unpinned.

    False when somebody else was in the way; with a ``watch`` they have ended now. Raises
    `HostError`.
    """
    done = _done(lambda: ports.pins.unpin(deployment_id), ports, watch)
    if done:
        book.save(replace(book.record, retained=None))
    return done


def _done(what: Callable[[], None], ports: Ports, watch: Watch | None) -> bool:
    try:
        what()
    except BusyError as error:
        if watch is None:
            log.debug("later: %s", error)
        else:
            wait_out(error, ports.os, watch)
        return False
    return True
