"""One move: what a decision does to the machine.

Nothing is decided here. Every change of phase is in the ledger before the step that it names, so
that a process killed at any instruction finds, at its next start, a phase whose facts lead on.
"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace

from treenail.daemon.ports import Ports, Watch
from treenail.errors import BusyError, CancelledError, Unreachable, UnreconcilableError
from treenail.host.deployments import Change, Progress, Verdict
from treenail.log import MessageId
from treenail.update import record as records
from treenail.update.decide import (
    Adopt,
    Close,
    Commit,
    Decision,
    Drain,
    Drop,
    Forgive,
    Reboot,
    Refuse,
    Rest,
    Resume,
    Stage,
    Wait,
)
from treenail.update.facts import Facts
from treenail.update.record import Outcome, Phase, Record, Target, Update

log = logging.getLogger(__name__)

NOW = 0.0
SOON_S = 10.0


class Actor:
    """Carries decisions out, and owns the ledger."""

    def __init__(
        self,
        ports: Ports,
        *,
        look_s: float,
        on_progress: Callable[[Update, Progress], Verdict],
        on_record: Callable[[Record], None],
    ) -> None:
        self._ports = ports
        self._look_s = look_s
        self._on_progress = on_progress
        self._on_record = on_record
        self._record = records.from_json(ports.ledger.read())
        on_record(self._record)

    @property
    def record(self) -> Record:
        """What the ledger holds."""
        return self._record

    def act(self, decision: Decision, facts: Facts) -> float:
        """Carry the decision out; returns in how many seconds to look again.

        Raises `TreenailError` when the machine or the cluster refused; what had been done is in
        the ledger, and deciding anew leads on from there.
        """
        match decision:
            case Rest() | Wait() | Resume():
                return self._look_s
            case Refuse(error=error):
                raise error
            case Adopt(target=target):
                self._save(Record(current=target, history=self._record.history))
                log.info("the machine already is at %s", target)
            case Forgive():
                self._save(replace(self._record, refused=None))
            case Stage(target=target):
                self._stage(target)
            case Drain(token=token):
                return self._drain(token)
            case Reboot(target=target):
                return self._reboot(target, _staged_id(facts, target))
            case Commit():
                self._commit(facts)
            case Close(done=done):
                self._close(done=done)
            case Drop(reason=reason, refuse=refuse):
                self._drop(reason, facts, refuse)
        return NOW

    def _stage(self, target: Target) -> None:
        update = self._record.update
        if update is None or update.target != target:
            update = Update(
                id=secrets.token_hex(16),
                target=target,
                origin=self._record.current,
                phase=Phase.STAGING,
                boot_id=self._ports.kernel.boot_id(),
                began=self._ports.clock.now(),
                entered=self._ports.clock.now(),
            )
            self._save(replace(self._record, update=update, refused=None))
            log.info(
                "update %s began: from %s to %s",
                update.id,
                update.origin,
                target,
                extra={"message_id": MessageId.UPDATE_BEGAN},
            )
        elif update.phase is not Phase.STAGING:
            update = self._enter(Phase.STAGING)
        self._ports.credentials.refresh()
        try:
            self._check()
        except Unreachable:
            # Staging harms nobody; the check is made up for before the drain.
            log.info("can't read %s now, staging meanwhile", target.config)
        watch, called_off = self._watch(update)
        try:
            self._ports.os.stage(Change(image=target.image), watch=watch)
        except BusyError as error:
            log.info("waiting: %s", error)
            self._ports.os.wait_for_other(watch=watch)
            return
        except CancelledError:
            if not called_off:
                raise
            return
        log.info("staged %s, locked", target.image, extra={"message_id": MessageId.STAGED})

    def _watch(self, update: Update) -> tuple[Watch, list[Verdict]]:
        """A watch for the transaction, and where it notes that we ended it ourselves."""
        ended: list[Verdict] = []

        def watch(progress: Progress) -> Verdict:
            verdict = self._on_progress(update, progress)
            if verdict is not Verdict.GO_ON:
                ended.append(verdict)
            return verdict

        return watch, ended

    def _check(self) -> None:
        """Read the rendered config and refuse what a running node can't be made to be."""
        update = self._record.update
        if update is None or update.checked:
            return
        wanted = self._ports.cluster.machine_config(update.target.config)
        if wanted.fips != self._ports.kernel.fips_enabled():
            raise UnreconcilableError(
                f"{update.target.config} wants FIPS mode {'on' if wanted.fips else 'off'}, and "
                "this node runs with it the other way",
                remedy="FIPS mode is chosen when a node is installed: reinstall it, or change the "
                "MachineConfig back",
            )
        self._save(replace(self._record, update=replace(update, checked=True)))

    def _drain(self, token: str) -> float:
        self._check()
        update = self._current_update()
        if update.phase is not Phase.DRAINING or update.drain != token:
            self._enter(Phase.DRAINING, drain=token)
            log.info("asking for the drain: %s", token)
            return NOW
        # The ledger has the token and so has the report; what is missing is the answer.
        return SOON_S if self._ports.cluster.node() is None else self._look_s

    def _reboot(self, target: Target, staged_id: str) -> float:
        update = self._current_update()
        boot_id = self._ports.kernel.boot_id()
        if update.phase is not Phase.REBOOTING or update.boot_id != boot_id:
            if update.drain:
                log.info("drained: %s", update.drain, extra={"message_id": MessageId.DRAINED})
            self._enter(Phase.REBOOTING, reboots=update.reboots + 1)
        log.info("rebooting into %s", target, extra={"message_id": MessageId.REBOOTING})
        self._ports.os.finalize(staged_id)
        self._ports.power.reboot()
        return SOON_S

    def _commit(self, facts: Facts) -> None:
        update = self._current_update()
        update = update.enter(
            Phase.RESUMING, boot_id=self._ports.kernel.boot_id(), now=self._ports.clock.now()
        )
        self._save(replace(self._record, current=update.target, update=update, refused=None))
        log.info(
            "booted and verified %s after %d s",
            update.target,
            facts.now - update.began,
            extra={"message_id": MessageId.VERIFIED},
        )

    def _close(self, *, done: bool) -> None:
        update = self._current_update()
        took_s = self._ports.clock.now() - update.began
        if done:
            log.info(
                "update %s to %s done after %d s",
                update.id,
                update.target,
                took_s,
                extra={"message_id": MessageId.DONE},
            )
        else:
            log.info(
                "update %s to %s called off, the node is as it was: %s",
                update.id,
                update.target,
                self._record.current,
                extra={"message_id": MessageId.CANCELLED},
            )
        refused = self._record.refused is not None
        outcome = Outcome.DONE if done else Outcome.FAILED if refused else Outcome.CALLED_OFF
        self._save(self._record.closed(outcome, now=self._ports.clock.now()))
        self._ports.os.release()

    def _drop(self, reason: str, facts: Facts, refuse: records.Refused | None) -> None:
        update = self._current_update()
        if update.phase is not Phase.RELEASING:
            log.info("calling update %s off: %s", update.id, reason)
            self._enter(Phase.RELEASING, refused=refuse)
        self._ports.os.drop(_staged_id(facts, update.target))
        log.info(
            "dropped what was staged for %s",
            update.target,
            extra={"message_id": MessageId.UNDONE},
        )

    def _current_update(self) -> Update:
        update = self._record.update
        if update is None:
            raise AssertionError("a move within an update was decided without one")
        return update

    def _enter(
        self,
        phase: Phase,
        *,
        drain: str | None = None,
        reboots: int | None = None,
        refused: records.Refused | None = None,
    ) -> Update:
        update = self._current_update().enter(
            phase, boot_id=self._ports.kernel.boot_id(), now=self._ports.clock.now()
        )
        update = replace(
            update,
            drain=update.drain if drain is None else drain,
            reboots=update.reboots if reboots is None else reboots,
        )
        self._save(replace(self._record, update=update, refused=refused or self._record.refused))
        return update

    def _save(self, record: Record) -> None:
        if record != self._record:
            self._ports.ledger.write(records.to_json(record))
            self._record = record
            self._on_record(record)


def _staged_id(facts: Facts, target: Target) -> str:
    deployed = facts.deployed
    return deployed.staged_id if deployed and deployed.staged == target.digest else ""
