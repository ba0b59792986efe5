"""Pin the previous deployment while the new one may still roll back, and unpin it afterwards.

``ostree admin pin`` waits silently for the sysroot lock. A running transaction is therefore
awaited first, with progress.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from treenail.daemon.interfaces import Watch
from treenail.daemon.reconcile.context import NodeInterfaces
from treenail.daemon.reconcile.os_transaction import wait_while_busy
from treenail.daemon.reconcile.state import UpdateLedger
from treenail.errors import BusyError
from treenail.update.decision.facts import Facts
from treenail.update.state.record import RetainedDeployment

log = logging.getLogger(__name__)


def pin_booted(
    facts: Facts, interfaces: NodeInterfaces, ledger: UpdateLedger, watch: Watch
) -> bool:
    """Pin the booted deployment until the new one has been healthy for `retention_s`.

    Returns False after waiting for another program's transaction; the caller tries again. Raises
    `HostError`.
    """
    deployed, record = facts.deployments, ledger.record
    if deployed is None or (record.retained is None and deployed.is_booted_pinned):
        # The user pinned it. Pinning it again would make us remove the user's pin later.
        return True
    ledger.save_record(replace(record, retained=RetainedDeployment(deployed.booted_id)))
    return _try_operation(
        lambda: interfaces.pins.pin_deployment(deployed.booted_id), interfaces, watch
    )


def unpin_retained(
    deployment_id: str, interfaces: NodeInterfaces, ledger: UpdateLedger, watch: Watch | None
) -> bool:
    """Remove our pin from the deployment.

    Returns False when another program has the sysroot. With a ``watch``, waits until that
    program's transaction ends. Raises `HostError`.
    """
    is_done = _try_operation(
        lambda: interfaces.pins.unpin_deployment(deployment_id), interfaces, watch
    )
    if is_done:
        ledger.save_record(replace(ledger.record, retained=None))
    return is_done


def _try_operation(
    operation: Callable[[], None], interfaces: NodeInterfaces, watch: Watch | None
) -> bool:
    try:
        operation()
    except BusyError as error:
        if watch is None:
            log.debug("postponed unpinning: %s", error)
        else:
            wait_while_busy(error, interfaces.os, watch)
        return False
    return True
