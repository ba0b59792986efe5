"""Turn after turn until told to stop: look, decide, report, act.

The only place that catches treenail's errors. A bug is not caught: the process dies with a
traceback, systemd starts it again, and the ledger leads on.
"""

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from treenail import log as journal
from treenail.config.drift import Drift
from treenail.daemon.local.metrics import DriftGauge
from treenail.daemon.local.status_file import Live
from treenail.daemon.reconcile.act import Actor
from treenail.daemon.reconcile.interfaces import Ports
from treenail.daemon.reconcile.observe import Observer, seen
from treenail.daemon.reconcile.wakeup import Wakeup
from treenail.errors import Again, ClusterError, TreenailError, Unreachable
from treenail.host.ostree.deployments import Progress, Verdict
from treenail.log import MessageId
from treenail.update.decision import decide_prestage
from treenail.update.decision.actions import (
    Commit,
    Decision,
    Prove,
    PutBack,
    Reboot,
    Recover,
    Refuse,
    Wait,
)
from treenail.update.decision.decide import decide, stands
from treenail.update.decision.facts import Facts
from treenail.update.decision.request import Kind, answered, cancels
from treenail.update.drift.drift_policy import sentence
from treenail.update.state.record import Record, StagedAhead, Update
from treenail.update.status import Event, reason_text, report

log = logging.getLogger(__name__)

_DRIFTS_TOLD = 20
_TRUST, _PULL_SECRETS = "ControllerConfigNotApplied", "PullSecretUnusable"
"""The reasons of Events about what is wrong with each."""

_BOOT_TURNS = 5
"""Each of the moves that finish a boot, and one more for each that has to be done again."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The last attempt at a move, and when to make the next one."""

    error: TreenailError
    move: str
    count: int
    since: float
    """Seconds since the epoch."""
    retry_at: float
    """On the monotonic clock."""

    @property
    def worth_telling(self) -> bool:
        """A service that is restarted is gone for a moment; that degrades nobody."""
        return self.count >= self.error.patience


@dataclass(frozen=True, slots=True)
class Pace:
    """How long between looks, in seconds."""

    look_s: float = 60.0
    retry_first_s: float = 5.0
    retry_most_s: float = 300.0


class Loop:
    """The agent's main thread."""

    def __init__(
        self,
        ports: Ports,
        *,
        observer: Observer,
        live: Live,
        gauge: DriftGauge,
        bell: Wakeup,
        stop: threading.Event,
        pace: Pace,
        images_bake: bool = True,
    ) -> None:
        self._ports = ports
        self._observer = observer
        self._live = live
        self._gauge = gauge
        self._bell = bell
        self._stop = stop
        self._pace = pace
        self._actor = Actor(
            ports,
            images_bake=images_bake,
            look_s=pace.look_s,
            on_progress=self._progress,
            on_record=self._recorded,
        )
        self._failure: Failure | None = None
        self._untold = ""
        """Why the last report could not be made; empty when it was."""
        self._refusals = 0
        """How many reports in a row the API server refused."""
        self._problems: dict[str, tuple[str, ...]] = {}
        self._drift: tuple[Drift, ...] = ()
        self._last_move = ""

    def run(self) -> None:
        """Turn until `stop` is set; every wait is cut short by a ring."""
        delay_s = 0.0
        while not self._stop.is_set():
            rung = self._bell.wait(min(delay_s, self._live.beat_s))
            self._live.beat()
            delay_s = (
                self.turn()
                if rung or delay_s <= self._live.beat_s
                else (delay_s - self._live.beat_s)
            )
            log.debug("awake: %s; next look in %.1f s", ", ".join(sorted(rung)) or "time", delay_s)

    def finish_boot(self) -> None:
        """Do what a boot has left to be done, as far as that needs nobody and goes well.

        Files, units and users are then those of the deployment that is booted: to be called before
        anything that reads them is started.
        """
        for _ in range(_BOOT_TURNS):
            _, decision = self._see()
            finishes = isinstance(decision, Recover | PutBack | Prove | Commit)
            if self._failure is not None or not finishes:
                return
            self.turn()
            if isinstance(decision, Prove):
                # With it the trial has begun; the rest is for when everything runs.
                return

    def turn(self) -> float:
        """Do the one next thing; returns in how many seconds to look again."""
        self._refresh(_TRUST, self._ports.trust.refresh)
        self._refresh(_PULL_SECRETS, self._ports.credentials.refresh)
        self._answer()
        facts, decision = self._see()
        try:
            return self._carry_out(facts, decision)
        finally:
            if facts.request is not None and facts.request.kind is Kind.HEAL:
                self._ports.requests.drop()

    def _carry_out(self, facts: Facts, decision: Decision) -> float:
        self._note(decision)
        told = self._tell(facts, decision)
        pending = self._pending(decision)
        if pending > 0:
            return min(pending, told)
        try:
            delay_s = self._actor.act(decision, facts)
        except TreenailError as error:
            return min(self._fail(error, facts, decision), told)
        if not isinstance(decision, Wait):
            self._failure = None
        return min(delay_s, told)

    def _answer(self) -> None:
        """Take away a request about which nothing is left to do: who asked is waiting for that."""
        request = self._ports.requests.read()
        if request is not None and answered(request, self._actor.record):
            self._ports.requests.drop()

    def _see(self) -> tuple[Facts, Decision]:
        """Facts and the decision they call for.

        The one move that can't be taken back is decided twice, the second time on a fresh look
        at the Node; with the API server away, what was decided and drained for goes through.
        """
        record = self._actor.record
        try:
            facts = self._observer.look(record)
            decision = decide(facts)
            if isinstance(decision, Reboot):
                answers = True
                try:
                    self._ports.cluster.refresh()
                except ClusterError as error:
                    answers = False
                    log.info("no fresh look at the Node before the reboot: %s", error)
                facts = replace(self._observer.look(record), api_answers=answers)
                decision = decide(facts)
        except TreenailError as error:
            return self._observer.glance(record), Refuse(error)
        self._note_drift(facts)
        return facts, decision

    def _note(self, decision: Decision) -> None:
        move = repr(decision)
        if move != self._last_move:
            log.debug("decided: %s", move)
            self._last_move = move
        if self._failure is not None and self._failure.move != move:
            self._failure = None

    def _note_drift(self, facts: Facts) -> None:
        """Tell once of each drift, also of such as holds nothing up, and once when it is gone."""
        if facts.record.update is not None or facts.cut_short or facts.forced:
            return
        found = facts.drift.all
        for drift in [each for each in found if each not in self._drift][:_DRIFTS_TOLD]:
            log.warning("drifted: %s", drift, extra={"message_id": MessageId.DRIFTED})
        if self._drift and not found:
            log.info("nothing drifts any more: the machine is as %s says", facts.record.current)
        if facts.drift.reported and found != self._drift:
            told = sentence(facts.drift.reported, facts.record.current.config)
            self._ports.cluster.tell(Event("Warning", "ConfigDriftDetected", told))
        self._drift = found
        self._live.drift(found)
        self._gauge.show(facts.drift)

    def _tell(self, facts: Facts, decision: Decision) -> float:
        """Report; returns in how many seconds to try again if nobody could be told."""
        failure = self._failure
        error = failure.error if failure is not None and failure.worth_telling else None
        told = report(facts, decision, error)
        self._live.show(facts, told, failure.error if failure else None)
        try:
            self._ports.cluster.report(told)
        except ClusterError as problem:
            if str(problem) != self._untold:
                log.warning("can't report to the API server: %s", problem)
            self._untold = str(problem)
            # Who does not answer is back in a moment; who refuses is to be asked less and less.
            refused = not isinstance(problem, Unreachable)
            self._refusals = self._refusals + 1 if refused else 0
            longer = 2.0 ** min(max(self._refusals - 1, 0), 20)
            return min(self._pace.retry_first_s * longer, self._pace.retry_most_s)
        if self._untold:
            log.info("the API server takes reports again")
        self._untold, self._refusals = "", 0
        return self._pace.look_s

    def _pending(self, decision: Decision) -> float:
        """Seconds until a move that failed may be tried again."""
        if self._failure is None or self._failure.move != repr(decision):
            return 0.0
        return self._failure.retry_at - self._ports.clock.monotonic()

    def _fail(self, error: TreenailError, facts: Facts, decision: Decision) -> float:
        earlier = self._failure
        count = earlier.count + 1 if earlier else 1
        delay_s = self._pace.retry_most_s
        if error.again is Again.BACKOFF:
            first_s = self._pace.retry_first_s * random.uniform(0.8, 1.2)  # noqa: S311 - jitter
            delay_s = min(first_s * 2.0 ** min(count - 1, 20), delay_s)
        if earlier is None or str(earlier.error) != str(error):
            log.error("%s", reason_text(error), extra={"message_id": MessageId.DEGRADED})
        else:
            log.info("attempt %d failed the same way; the next is in %.0f s", count, delay_s)
        self._failure = Failure(
            error=error,
            move=repr(decision),
            count=count,
            since=earlier.since if earlier else facts.now,
            retry_at=self._ports.clock.monotonic() + delay_s,
        )
        self._tell(self._observer.glance(self._actor.record), decision)
        return delay_s

    def _refresh(self, reason: str, refresh: Callable[[], tuple[str, ...]]) -> None:
        """Have credentials in place, and tell once, by Events of this reason, what is wrong."""
        try:
            problems = refresh()
        except TreenailError as error:
            problems = (reason_text(error),)
        for problem in problems:
            if problem not in self._problems.get(reason, ()):
                log.warning("%s", problem, extra={"message_id": MessageId.CREDENTIALS_BROKEN})
                self._ports.cluster.tell(Event("Warning", reason, problem))
        self._problems[reason] = problems
        self._live.credential_problems([each for all_ in self._problems.values() for each in all_])

    def _recorded(self, record: Record) -> None:
        """Let the journal and the live status say which update this is, and how far."""
        update = record.update
        journal.context(
            update=update.id if update else "",
            phase=str(update.phase) if update else "",
            config=update.target.config if update else record.current.config,
        )
        self._live.record(record)

    def _progress(self, update: Update | StagedAhead, progress: Progress) -> Verdict:
        """Show how an OS transaction gets on, and whether it is still wanted."""
        self._live.beat()
        self._live.progress(progress)
        # This may take an hour, and they are to be there within a minute.
        self._refresh(_TRUST, self._ports.trust.refresh)
        if self._stop.is_set():
            return Verdict.LEAVE
        node = self._ports.cluster.node()
        if isinstance(update, StagedAhead):
            current = self._actor.record.current
            stands_ahead = node is None or decide_prestage.stands(seen(node), update, current)
            return Verdict.GO_ON if stands_ahead else Verdict.CANCEL
        if node is not None and not stands(seen(node), update):
            return Verdict.CANCEL
        if cancels(self._ports.requests.read(), update):
            return Verdict.CANCEL
        return Verdict.GO_ON
