"""The ledger as moves use it: what is recorded, and the update under way as it goes on."""

import logging
from collections.abc import Callable
from dataclasses import replace

from treenail.daemon.reconcile.interfaces import NodeInterfaces
from treenail.errors import LedgerError
from treenail.update.checks.health import API_SERVER, LEDGER
from treenail.update.decision.facts import Facts
from treenail.update.impact.impact import UpdateImpact
from treenail.update.state import record as records
from treenail.update.state.boot_trial import BootTrial
from treenail.update.state.record import (
    LedgerRecord,
    Phase,
    QuarantinedTarget,
    Target,
    UpdateRecord,
)

log = logging.getLogger(__name__)

_TRIAL_PHASES = (Phase.VERIFYING, Phase.ROLLING_BACK)


class UpdateLedger:
    """Every change is in the ledger, for good, before the call returns; raises `LedgerError`."""

    def __init__(
        self, interfaces: NodeInterfaces, *, on_record: Callable[[LedgerRecord], None]
    ) -> None:
        self._interfaces = interfaces
        self._on_record = on_record
        self._save_error = ""
        self._record = records.from_json(interfaces.ledger.read_document())
        on_record(self._record)

    @property
    def record(self) -> LedgerRecord:
        """What the ledger holds."""
        return self._record

    @property
    def update(self) -> UpdateRecord:
        """The update under way; there is one."""
        update = self._record.update
        if update is None:
            raise AssertionError("a move within an update was decided without one")
        return update

    @property
    def impact(self) -> UpdateImpact:
        """What the update does; it has been weighed."""
        work = self.update.impact
        if work is None:
            raise AssertionError("a move was decided before the update was weighed")
        return work

    def enter_phase(
        self,
        phase: Phase,
        *,
        impact: UpdateImpact | None = None,
        staged_id: str | None = None,
        drain: str | None = None,
        reboots: int | None = None,
        refused: QuarantinedTarget | None = None,
        probation: BootTrial | None = None,
        reached_facts: Facts | None = None,
    ) -> UpdateRecord:
        """Have the update in the phase, for good; ``reached_facts``: with its target as current."""
        update = self.update.enter_phase(
            phase, boot_id=self._interfaces.kernel.read_boot_id(), now=self._interfaces.clock.now()
        )
        update = replace(
            update,
            impact=update.impact if impact is None else impact,
            staged_id=update.staged_id if staged_id is None else staged_id,
            drain_token=update.drain_token if drain is None else drain,
            reboot_count=update.reboot_count if reboots is None else reboots,
            boot_trial=update.boot_trial if probation is None else probation,
        )
        record = (
            self._record
            if reached_facts is None
            else self.record_at_target(update.target, reached_facts)
        )
        if refused is not None:
            # What the API server has sent a node back from, it does not send it back from again.
            blamed = refused.target if refused.check == API_SERVER else record.api_blamed
            record = replace(record, quarantined=refused, api_blamed=blamed)
        self.save_record(replace(record, update=update))
        return update

    def record_at_target(self, target: Target, facts: Facts) -> LedgerRecord:
        """The record with the target as current."""
        booted = (
            facts.deployments.booted_digest if facts.deployments else self._record.booted_digest
        )
        return replace(self._record, current=target, booted_digest=booted, quarantined=None)

    def save_record(self, record: LedgerRecord) -> None:
        """Have this record.

        On trial it need not outlive a crash: a disk that is full is a reason to go back, and must
        not keep the node from it.
        """
        if record == self._record and not self._save_error:
            return
        try:
            self._interfaces.ledger.write_document(records.to_json(record))
            self._save_error = ""
        except LedgerError as error:
            if record.update is None or record.update.phase not in _TRIAL_PHASES:
                raise
            log.warning("on trial without a ledger: %s", error)
            self._save_error = str(error)
        self._interfaces.health.set_check_problem(LEDGER, self._save_error)
        self._record = record
        self._on_record(record)
