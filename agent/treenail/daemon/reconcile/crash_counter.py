"""The first thing an agent does: count its starts, so that one that crashes at each goes back.

It needs the ledger and the machine, and neither the settings nor the API server.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from treenail.clock import Clock
from treenail.daemon.configuration.machine import Unfinished
from treenail.daemon.reconcile.interfaces import Kernel, LedgerFile, OperatingSystem, Power
from treenail.daemon.reconcile.observe import deployed
from treenail.errors import HostError, LedgerError
from treenail.log import MessageId
from treenail.update.checks.health import AGENT, Check, unhealthy
from treenail.update.decision.decide_boot import AGAIN, RETURNS_ALLOWED
from treenail.update.impact.os_change import in_effect
from treenail.update.state import record as records
from treenail.update.state.record import Phase, Record, Refused, Update

log = logging.getLogger(__name__)


class Files(Protocol):
    """The files that the update under way has changed."""

    def unfinished(self, owner: str) -> Unfinished: ...
    def put_back(self) -> None: ...


class Lifeline:
    """Counts starts in a boot on trial; what it takes to go back is made when it is needed."""

    def __init__(
        self,
        ledger: LedgerFile,
        kernel: Kernel,
        clock: Clock,
        *,
        machine: Callable[[], tuple[OperatingSystem, Power, Files]],
    ) -> None:
        self._ledger = ledger
        self._kernel = kernel
        self._clock = clock
        self._machine = machine

    def started(self) -> bool:
        """Count this start; returns whether the node is on its way back instead.

        Raises `LedgerError` when the ledger can't be read. When going back fails the agent goes on,
        for it may be able to; if it crashes once more, the next start tries again.
        """
        record = records.from_json(self._ledger.read())
        update = record.update
        if update is None:
            return False
        boot_id = self._kernel.boot_id()
        if not _on_trial(update, boot_id):
            return False
        probation = update.probation.started(boot_id, self._clock.monotonic())
        update = replace(update, probation=probation)
        record = replace(record, update=update)
        self._write(record)
        if not probation.crashes:
            return False
        try:
            return self._go_back(record, update, boot_id)
        except HostError as error:
            log.warning("can't go back to %s now: %s", update.origin, error)
            return False

    def _go_back(self, record: Record, update: Update, boot_id: str) -> bool:
        """Begin to, or, as each step can be repeated, finish what was cut short."""
        work = update.work
        os, power, files = self._machine()
        found = deployed(os.look(), self._kernel.command_line())
        if work is None or not in_effect(work.os, found.running):
            return False  # it is back already, and the loop knows what to do
        if update.phase is Phase.RETURNING and update.boot_id != boot_id:
            by_files = work.os.empty and not files.unfinished(update.id).held
            if by_files or update.probation.returns >= RETURNS_ALLOWED:
                return False  # it is back as well, or can't be brought back
        refused = record.refused
        if update.phase is not Phase.RETURNING or refused is None:
            check = Check(AGENT, well=False, text=update.probation.crashes)
            reason = unhealthy(update.target, check)
            log.error("%s", reason, extra={"message_id": MessageId.UNHEALTHY})
            refused = Refused(update.target, reason, AGAIN, check=AGENT)
        update = update.enter(Phase.RETURNING, boot_id=boot_id, now=self._clock.now())
        self._write(replace(record, update=update, refused=refused))
        if work.os.empty:
            files.put_back()
        else:
            os.roll_back()
        probation = replace(update.probation, returns=update.probation.returns + 1)
        update = replace(update, probation=probation)
        self._write(replace(record, update=update, refused=refused))
        log.info("going back to %s", update.origin, extra={"message_id": MessageId.RETURNING})
        power.reboot()
        return True

    def _write(self, record: Record) -> None:
        try:
            self._ledger.write(records.to_json(record))
        except LedgerError as error:
            log.warning("the agent's start can't be counted: %s", error)


def _on_trial(update: Update, boot_id: str) -> bool:
    """Whether nobody has found this boot healthy yet; on the way back nobody will."""
    if update.phase is Phase.REBOOTING:
        return update.boot_id != boot_id
    return update.phase in {Phase.PROVING, Phase.RETURNING}
