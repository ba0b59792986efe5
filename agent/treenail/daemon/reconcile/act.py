"""One move: what a decision does to the machine.

Nothing is decided here. Every change of phase is in the ledger before the step that it names, so
that a process killed at any instruction finds, at its next start, a phase whose facts lead on.
"""

import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace

from treenail.config.wanted import wanted
from treenail.daemon.reconcile import pinning, prestage
from treenail.daemon.reconcile.boot_trial import Trial
from treenail.daemon.reconcile.busy_wait import wait_out
from treenail.daemon.reconcile.interfaces import Ports, Watch
from treenail.daemon.reconcile.planning import Weighing
from treenail.daemon.reconcile.pull import pull
from treenail.daemon.reconcile.state import Book
from treenail.errors import BusError, BusyError, CancelledError, StepError
from treenail.host.ostree.deployments import Progress, Verdict
from treenail.log import MessageId
from treenail.update.decision.actions import (
    Adopt,
    Apply,
    Close,
    Commit,
    Decision,
    Drain,
    Drop,
    DropAhead,
    Forgive,
    Heal,
    Introduce,
    Prove,
    PutBack,
    Reboot,
    Recover,
    Refuse,
    Rest,
    Resume,
    Return,
    Stage,
    StageAhead,
    Unpin,
    Wait,
    Weigh,
)
from treenail.update.decision.facts import Facts
from treenail.update.state.boot_trial import Probation
from treenail.update.state.record import (
    Outcome,
    Phase,
    Record,
    Refused,
    StagedAhead,
    Target,
    Update,
)
from treenail.update.status import Event, not_served, served

log = logging.getLogger(__name__)

NOW = 0.0
SOON_S = 10.0
APPLYING_TRIES = 3
"""Of a step that failed because a service did not answer: it may be back in a moment."""


Inward = Weigh | Stage | Apply | PutBack | Commit | Close | Drop


class Actor:
    """Carries decisions out, and owns the ledger."""

    def __init__(
        self,
        ports: Ports,
        *,
        look_s: float,
        images_bake: bool,
        on_progress: Callable[[Update | StagedAhead, Progress], Verdict],
        on_record: Callable[[Record], None],
    ) -> None:
        self._ports = ports
        self._look_s = look_s
        self._on_progress = on_progress
        self._weighing = Weighing(ports, images_bake=images_bake)
        self._failed_to_apply = 0
        self._book = Book(ports, on_record=on_record)
        self._trial = Trial(ports, self._book, self._weighing)

    @property
    def record(self) -> Record:
        """What the ledger holds."""
        return self._book.record

    def act(self, decision: Decision, facts: Facts) -> float:
        """Carry the decision out; returns in how many seconds to look again.

        Raises `TreenailError` when the machine or the cluster refused; what had been done is in
        the ledger, and deciding anew leads on from there.
        """
        match decision:
            case Rest() | Wait() | Resume() | Introduce():
                return self._look_s
            case Refuse(error=error):
                raise error
            case Drain(token=token):
                return self._drain(token)
            case Reboot():
                return self._reboot(decision, facts)
            case Prove():
                return self._trial.prove(facts)
            case Return(refuse=refuse):
                return self._trial.go_back(refuse, facts)
            case Adopt(target=target):
                self._adopt(target, facts)
            case StageAhead() | DropAhead():
                self._beside(decision, facts)
            case Forgive() | Unpin():
                return self._forget(decision)
            case Heal(drifts=drifts):
                self._ports.upkeep.heal(self._book.record.current, drifts)
            case Recover():
                update = self._book.record.update
                self._ports.configuration.recover(update.id if update else "")
            case _:
                self._move_on(decision, facts)
        return NOW

    def _beside(self, decision: StageAhead | DropAhead, facts: Facts) -> None:
        progress, save = self._on_progress, self._book.save
        match decision:
            case StageAhead():
                prestage.stage(
                    decision, facts, self._ports, self._weighing, on_progress=progress, save=save
                )
            case DropAhead():
                prestage.drop(decision, facts, self._ports, save=save)

    def _forget(self, decision: Forgive | Unpin) -> float:
        if isinstance(decision, Forgive):
            self._book.save(replace(self._book.record, refused=None))
            return NOW
        update = self._book.record.update
        watch = self._watch(update)[0] if update else None
        done = pinning.let_go(decision.id, self._ports, self._book, watch)
        return NOW if done or update else SOON_S

    def _adopt(self, target: Target, facts: Facts) -> None:
        if not target.image:
            # Whoever installed the machine wrote these files, and they go with their config.
            config = self._ports.configs.fetch(target.config)
            self._ports.configuration.adopt(wanted(config), target.config)
        self._book.save(self._book.at(target, facts))
        log.info("the machine already is at %s", target)

    def _move_on(self, decision: Inward, facts: Facts) -> None:
        """One step of the update, of which the next can be taken at once."""
        match decision:
            case Weigh(target=target):
                self._weigh(target, facts)
            case Stage(target=target):
                self._stage(target)
            case Apply(target=target):
                self._apply(target, facts)
            case PutBack():
                booted = self._book.update.boot_id != facts.boot_id
                self._ports.configuration.put_back(booted=booted)
            case Commit():
                self._commit(facts)
            case Close(done=done):
                self._close(done=done)
            case Drop(reason=reason, staged_id=staged_id, refuse=refuse):
                self._drop(reason, staged_id, refuse)

    def _weigh(self, target: Target, facts: Facts) -> None:
        update = self._book.record.update
        if update is None or update.target != target:
            update = self._begin(target, facts)
        deployed = facts.deployed
        if deployed is None:
            raise AssertionError("an update was to be weighed without a look at the deployments")
        work = self._weighing.weigh(target, update.origin, deployed)
        log.info(
            "%s asks for: %s%s",
            target,
            work.cost,
            "".join(f"; {reason}" for reason in work.reasons),
        )
        self._book.enter(Phase.STAGING, work=work)
        self._ports.upkeep.obeyed()

    def _begin(self, target: Target, facts: Facts) -> Update:
        claimed = facts.node.claimed if facts.node else Target()
        update = Update(
            id=secrets.token_hex(16),
            target=target,
            origin=self._book.record.current if self._book.record.current != Target() else claimed,
            phase=Phase.STAGING,
            boot_id=self._ports.kernel.boot_id(),
            began=self._ports.clock.now(),
            entered=self._ports.clock.now(),
        )
        self._failed_to_apply = 0
        self._book.save(replace(self._book.record, update=update, refused=None, ahead=None))
        log.info(
            "update %s began: from %s to %s",
            update.id,
            update.origin,
            target,
            extra={"message_id": MessageId.UPDATE_BEGAN},
        )
        return update

    def _stage(self, target: Target) -> None:
        update = self._book.update
        if update.phase is not Phase.STAGING or update.staged_id:
            # What was staged before is gone; until it is noted, what is staged now has no name.
            update = self._book.enter(Phase.STAGING, staged_id="")
        asked = self._book.work.os
        watch, called_off = self._watch(update)

        def attempt() -> bool:
            self._ports.preflight.clear(asked.image)
            self._ports.os.stage(prestage.change(asked), watch=watch)
            return not called_off

        try:
            pull(self._ports.credentials, asked.image, attempt)
        except BusyError as error:
            wait_out(error, self._ports.os, watch)
            return
        except CancelledError:
            if not called_off:
                raise
            return
        staged = self._ports.os.look().staged
        noted = replace(update, staged_id=staged.id if staged else "")
        self._book.save(replace(self._book.record, update=noted))
        log.info("staged %s, locked", target, extra={"message_id": MessageId.STAGED})

    def _watch(self, update: Update) -> tuple[Watch, list[Verdict]]:
        """A watch for the transaction, and where it notes that we ended it ourselves."""
        ended: list[Verdict] = []

        def watch(progress: Progress) -> Verdict:
            verdict = self._on_progress(update, progress)
            if verdict is not Verdict.GO_ON:
                ended.append(verdict)
            return verdict

        return watch, ended

    def _drain(self, token: str) -> float:
        update = self._book.update
        if update.phase is not Phase.DRAINING or update.drain != token:
            if self._book.work.reboots:
                # It may be long since it was staged, and what fails after this costs a drain.
                self._ports.preflight.still_clear(self._book.work.os.image)
            self._book.enter(Phase.DRAINING, drain=token)
            log.info("asking for the drain: %s", token)
            return NOW
        # The ledger has the token and so has the report; what is missing is the answer.
        return SOON_S if self._ports.cluster.node() is None else self._look_s

    def _apply(self, target: Target, facts: Facts) -> None:
        update, work = self._book.update, self._book.work
        if update.phase is not Phase.APPLYING or update.boot_id != facts.boot_id:
            self._told_of_drain(update)
            update = self._book.enter(Phase.APPLYING)
        due = self._weighing.due(target, update.origin, work)
        if due.work.level > work.level:
            log.info("%s has come to ask for more: %s", target, "; ".join(due.work.reasons))
            self._book.enter(Phase.STAGING, work=due.work)
            return
        try:
            self._ports.configuration.apply(
                due.steps, due.wish, target.config, owner=update.id if work.reboots else ""
            )
        except StepError as error:
            self._failed_to_apply += 1
            gone = isinstance(error.__cause__, BusError)
            if gone and self._failed_to_apply < APPLYING_TRIES:
                raise
            log.warning("%s", error, extra={"message_id": MessageId.DEGRADED})
            self._tell(not_served(error.step, error))
            refused = Refused(target, str(error), error.remedy)
            self._book.enter(Phase.RELEASING, refused=refused)
            return
        log.info("applied %s in %d steps", target, len(due.steps))
        if not work.reboots:
            self._tell(served(due.steps, target))
            self._reached(facts)
        elif not due.steps:
            self._book.enter(Phase.APPLYING, work=replace(work, writes=False))

    def _tell(self, events: Iterable[Event]) -> None:
        for event in events:
            self._ports.cluster.tell(event)

    def _reboot(self, move: Reboot, facts: Facts) -> float:
        update, staged_id = self._book.update, move.staged_id
        boot_id = self._ports.kernel.boot_id()
        if update.phase is not Phase.REBOOTING or update.boot_id != boot_id:
            self._told_of_drain(update)
            # Once it is unlocked nothing but its name tells that it is ours.
            self._book.enter(
                Phase.REBOOTING,
                reboots=update.reboots + 1,
                staged_id=staged_id or update.staged_id,
                probation=Probation(api_before=facts.api_answers),
            )
        elif update.probation.api_before is not facts.api_answers:
            # What counts is whether it answered right before the reboot, and this may be held up.
            probation = Probation(api_before=facts.api_answers)
            self._book.enter(Phase.REBOOTING, probation=probation)
        watch, _ = self._watch(self._book.update)
        if staged_id and not pinning.keep(facts, self._ports, self._book, watch):
            return NOW
        soft = move.softly and self._softly(staged_id)
        log.info(
            "%s into %s",
            "soft-rebooting" if soft else "rebooting",
            move.target,
            extra={"message_id": MessageId.REBOOTING},
        )
        if staged_id and not soft:
            self._ports.os.finalize(staged_id)
        self._ports.power.reboot(soft=soft)
        return SOON_S

    def _softly(self, staged_id: str) -> bool:
        """Whether a soft reboot leads into it; until the shutdown finalizes it, it has no /etc."""
        self._ports.os.finalize(staged_id, softly=True)
        return self._ports.soft_reboots.prepare()

    def _told_of_drain(self, update: Update) -> None:
        if update.phase is Phase.DRAINING:
            log.info("drained: %s", update.drain, extra={"message_id": MessageId.DRAINED})

    def _commit(self, facts: Facts) -> None:
        """What an image, or a merge of two /etc, took away with it is written again."""
        self._trial.passed()
        update = self._book.update
        due = self._weighing.due(update.target, update.origin, self._book.work)
        if due.steps:
            log.info("%d steps are left to do after the boot", len(due.steps))
            self._ports.configuration.complete(due.steps, due.wish, update.target.config)
        self._ports.configuration.confirm()
        self._reached(facts)

    def _reached(self, facts: Facts) -> None:
        """Verified: the target is current from now on."""
        update = self._book.enter(Phase.RESUMING, at=facts)
        self._ports.configs.keep_only({update.target.config})
        log.info(
            "verified %s after %d s",
            update.target,
            facts.now - update.began,
            extra={"message_id": MessageId.VERIFIED},
        )

    def _close(self, *, done: bool) -> None:
        update = self._book.update
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
                self._book.record.current,
                extra={"message_id": MessageId.CANCELLED},
            )
        refused = self._book.record.refused
        failed = refused is not None and not refused.called_off
        outcome = Outcome.DONE if done else Outcome.FAILED if failed else Outcome.CALLED_OFF
        self._book.save(self._book.record.closed(outcome, now=self._ports.clock.now()))
        self._ports.os.release()

    def _drop(self, reason: str, staged_id: str, refuse: Refused | None) -> None:
        update = self._book.update
        if update.phase is not Phase.RELEASING:
            log.info("calling update %s off: %s", update.id, reason)
            self._book.enter(Phase.RELEASING, refused=refuse)
        if update.work is None or update.work.reboots:
            self._ports.soft_reboots.clear()
            self._ports.os.drop(staged_id)
        log.info(
            "dropped what was staged for %s",
            update.target,
            extra={"message_id": MessageId.UNDONE},
        )
