"""The ledger as moves use it: what is recorded, and the update under way as it goes on."""

import logging
from collections.abc import Callable
from dataclasses import replace

from treenail.daemon.reconcile.interfaces import Ports
from treenail.errors import LedgerError
from treenail.update.checks.health import API_SERVER, LEDGER
from treenail.update.decision.facts import Facts
from treenail.update.impact.impact import Work
from treenail.update.state import record as records
from treenail.update.state.boot_trial import Probation
from treenail.update.state.record import Phase, Record, Refused, Target, Update

log = logging.getLogger(__name__)

_ON_TRIAL = (Phase.PROVING, Phase.RETURNING)


class Book:
    """Every change is in the ledger, for good, before the call returns; raises `LedgerError`."""

    def __init__(self, ports: Ports, *, on_record: Callable[[Record], None]) -> None:
        self._ports = ports
        self._on_record = on_record
        self._unsaved = ""
        self._record = records.from_json(ports.ledger.read())
        on_record(self._record)

    @property
    def record(self) -> Record:
        """What the ledger holds."""
        return self._record

    @property
    def update(self) -> Update:
        """The update under way; there is one."""
        update = self._record.update
        if update is None:
            raise AssertionError("a move within an update was decided without one")
        return update

    @property
    def work(self) -> Work:
        """What the update does; it has been weighed."""
        work = self.update.work
        if work is None:
            raise AssertionError("a move was decided before the update was weighed")
        return work

    def enter(
        self,
        phase: Phase,
        *,
        work: Work | None = None,
        staged_id: str | None = None,
        drain: str | None = None,
        reboots: int | None = None,
        refused: Refused | None = None,
        probation: Probation | None = None,
        at: Facts | None = None,
    ) -> Update:
        """Have the update in the phase, for good; ``at``: with its target as current."""
        update = self.update.enter(
            phase, boot_id=self._ports.kernel.boot_id(), now=self._ports.clock.now()
        )
        update = replace(
            update,
            work=update.work if work is None else work,
            staged_id=update.staged_id if staged_id is None else staged_id,
            drain=update.drain if drain is None else drain,
            reboots=update.reboots if reboots is None else reboots,
            probation=update.probation if probation is None else probation,
        )
        record = self._record if at is None else self.at(update.target, at)
        if refused is not None:
            # What the API server has sent a node back from, it does not send it back from again.
            blamed = refused.target if refused.check == API_SERVER else record.blamed
            record = replace(record, refused=refused, blamed=blamed)
        self.save(replace(record, update=update))
        return update

    def at(self, target: Target, facts: Facts) -> Record:
        """The record with the target as current."""
        booted = facts.deployed.booted if facts.deployed else self._record.booted
        return replace(self._record, current=target, booted=booted, refused=None)

    def save(self, record: Record) -> None:
        """Have this record.

        On trial it need not outlive a crash: a disk that is full is a reason to go back, and must
        not keep the node from it.
        """
        if record == self._record and not self._unsaved:
            return
        try:
            self._ports.ledger.write(records.to_json(record))
            self._unsaved = ""
        except LedgerError as error:
            if record.update is None or record.update.phase not in _ON_TRIAL:
                raise
            log.warning("on trial without a ledger: %s", error)
            self._unsaved = str(error)
        self._ports.health.mark(LEDGER, self._unsaved)
        self._record = record
        self._on_record(record)
