"""The previous deployment is kept while the new one may yet prove bad, and let go afterwards.

ostree would wait for a transaction of somebody else without a word, so that is waited for before.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from treenail.daemon.reconcile.busy_wait import wait_while_busy
from treenail.daemon.reconcile.interfaces import NodeInterfaces, Watch
from treenail.daemon.reconcile.state import UpdateLedger
from treenail.errors import BusyError
from treenail.update.decision.facts import Facts
from treenail.update.state.retention import RetainedDeployment

log = logging.getLogger(__name__)


def pin_booted(
    facts: Facts, interfaces: NodeInterfaces, ledger: UpdateLedger, watch: Watch
) -> bool:
    """Have what is booted pinned, until what takes its place was healthy for a while.

    False when somebody else was in the way, who has ended now. Raises `HostError`.
    """
    deployed, record = facts.deployments, ledger.record
    if deployed is None or (record.retained is None and deployed.is_booted_pinned):
        return True  # somebody wants it kept, and will want it afterwards
    ledger.save_record(replace(record, retained=RetainedDeployment(deployed.booted_id)))
    return _try_operation(
        lambda: interfaces.pins.pin_deployment(deployed.booted_id), interfaces, watch
    )


def unpin_retained(
    deployment_id: str, interfaces: NodeInterfaces, ledger: UpdateLedger, watch: Watch | None
) -> bool:
    """Have the deployment unpinned.

    False when somebody else was in the way; with a ``watch`` they have ended now. Raises
    `HostError`.
    """
    done = _try_operation(
        lambda: interfaces.pins.unpin_deployment(deployment_id), interfaces, watch
    )
    if done:
        ledger.save_record(replace(ledger.record, retained=None))
    return done


def _try_operation(
    operation: Callable[[], None], interfaces: NodeInterfaces, watch: Watch | None
) -> bool:
    try:
        operation()
    except BusyError as error:
        if watch is None:
            log.debug("later: %s", error)
        else:
            wait_while_busy(error, interfaces.os, watch)
        return False
    return True
