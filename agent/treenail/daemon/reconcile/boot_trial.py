"""The moves of a node that was rebooted into its target: the trial, and the way back."""

import logging
from dataclasses import replace

from treenail.daemon.reconcile.interfaces import Ports
from treenail.daemon.reconcile.planning import Weighing
from treenail.daemon.reconcile.state import Book
from treenail.errors import ClusterError, TreenailError
from treenail.log import MessageId
from treenail.update.checks.health import CONFIGURATION
from treenail.update.decision.decide_boot import in_deployment
from treenail.update.decision.facts import Facts
from treenail.update.state.record import Phase, Refused

log = logging.getLogger(__name__)

_NOW = 0.0
_SOON_S = 10.0


class Trial:
    """Carries `Prove` and `Return` out; each returns in how many seconds to look again."""

    def __init__(self, ports: Ports, book: Book, weighing: Weighing) -> None:
        self._ports = ports
        self._book = book
        self._weighing = weighing
        self._completed_in = ""
        self._counted_in = ""

    def prove(self, facts: Facts) -> float:
        """The trial goes on, or begins: by the record of the agent's starts, or here."""
        update = self._book.update
        probation = update.probation
        if probation.boot_id != facts.boot_id:
            probation = probation.started(facts.boot_id, self._ports.clock.monotonic())
        if facts.trial is not None and facts.trial.api_answers:
            probation = replace(probation, api_seen=True)
        if update.phase is not Phase.PROVING or update.boot_id != facts.boot_id:
            self._book.enter(Phase.PROVING, probation=probation)
        else:
            record = self._book.record
            self._book.save(replace(record, update=replace(update, probation=probation)))
        if self._completed_in != facts.boot_id:
            self._complete(facts.boot_id)
        return self._ports.health.again_s

    def passed(self) -> None:
        """Have it for good that the verdict is given: the node does not go back any more."""
        update = self._book.update
        healthy = replace(update, probation=replace(update.probation, healthy=True))
        self._book.save(replace(self._book.record, update=healthy))

    def go_back(self, refuse: Refused, facts: Facts) -> float:
        """Have the previous deployment, or what the files were, with the next boot."""
        update, work = self._book.update, self._book.work
        if update.phase is not Phase.RETURNING or update.boot_id != facts.boot_id:
            log.error("%s", refuse.reason, extra={"message_id": MessageId.UNHEALTHY})
            self._book.enter(Phase.RETURNING, refused=refuse)
        if work.os.empty and facts.held:
            return _NOW
        if not work.os.empty:
            self._ports.os.roll_back()
        self._count(facts.boot_id)
        log.info("going back to %s", update.origin, extra={"message_id": MessageId.RETURNING})
        self._ports.power.reboot()
        return _SOON_S

    def _count(self, boot_id: str) -> None:
        """Once a boot, and not before what is to make the next boot the way back is done."""
        if self._counted_in != boot_id:
            update = self._book.update
            probation = replace(update.probation, returns=update.probation.returns + 1)
            self._book.save(replace(self._book.record, update=replace(update, probation=probation)))
            self._counted_in = boot_id

    def _complete(self, boot_id: str) -> None:
        """Write what the boot took away and the kubelet may need to be healthy."""
        update, problem = self._book.update, ""
        try:
            due = self._weighing.due(update.target, update.origin, self._book.work)
            steps = in_deployment(due.steps)
            if steps:
                log.info("%d steps are left to do after the boot", len(steps))
                self._ports.configuration.complete_first(steps)
            self._completed_in = boot_id
        except ClusterError as error:
            log.info("what is left to do after the boot can't be known now: %s", error)
        except TreenailError as error:
            problem = str(error)
        self._ports.health.mark(CONFIGURATION, problem)
