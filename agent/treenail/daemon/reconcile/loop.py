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
from treenail.daemon.local.metrics import DriftMetrics
from treenail.daemon.local.status_file import StatusFile
from treenail.daemon.reconcile.act import ActionRunner
from treenail.daemon.reconcile.interfaces import NodeInterfaces
from treenail.daemon.reconcile.observe import Observer, summarize_node
from treenail.daemon.reconcile.wakeup import Wakeup
from treenail.errors import ClusterError, RetryPolicy, TreenailError, UnreachableError
from treenail.host.ostree.deployments import TransactionProgress, WatchVerdict
from treenail.log import MessageId
from treenail.update.decision import decide_prestage
from treenail.update.decision.actions import (
    CommitAction,
    Decision,
    RebootAction,
    RecoverAction,
    RefuseAction,
    RestoreAction,
    VerifyAction,
    WaitAction,
)
from treenail.update.decision.decide import decide_action, is_target_requested
from treenail.update.decision.facts import Facts
from treenail.update.decision.request import RequestKind, is_answered, is_cancel_request
from treenail.update.drift.drift_policy import format_drift
from treenail.update.state.record import LedgerRecord, PrestagedTarget, UpdateRecord
from treenail.update.status import NodeEvent, format_reason, make_report

log = logging.getLogger(__name__)

_MAX_LOGGED_DRIFTS = 20
_CONTROLLER_CONFIG_REASON, _PULL_SECRET_REASON = "ControllerConfigNotApplied", "PullSecretUnusable"
"""The reasons of Events about what is wrong with each."""

_MAX_BOOT_PASSES = 5
"""Each of the moves that finish a boot, and one more for each that has to be done again."""


@dataclass(frozen=True, slots=True)
class ActionFailure:
    """The last attempt at a move, and when to make the next one."""

    error: TreenailError
    action: str
    count: int
    since: float
    """Seconds since the epoch."""
    retry_at: float
    """On the monotonic clock."""

    @property
    def is_reportable(self) -> bool:
        """A service that is restarted is gone for a moment; that degrades nobody."""
        return self.count >= self.error.report_after_failures


@dataclass(frozen=True, slots=True)
class LoopTiming:
    """How long between looks, in seconds."""

    resync_s: float = 60.0
    retry_first_s: float = 5.0
    retry_max_s: float = 300.0


class ReconcileLoop:
    """The agent's main thread."""

    def __init__(
        self,
        interfaces: NodeInterfaces,
        *,
        observer: Observer,
        status_file: StatusFile,
        metrics: DriftMetrics,
        wakeup: Wakeup,
        stop: threading.Event,
        timing: LoopTiming,
        has_files_in_image: bool = True,
    ) -> None:
        self._interfaces = interfaces
        self._observer = observer
        self._status_file = status_file
        self._metrics = metrics
        self._wakeup = wakeup
        self._stop = stop
        self._timing = timing
        self._runner = ActionRunner(
            interfaces,
            has_files_in_image=has_files_in_image,
            resync_s=timing.resync_s,
            on_progress=self._handle_progress,
            on_record=self._handle_record,
        )
        self._failure: ActionFailure | None = None
        self._report_error = ""
        """Why the last report could not be made; empty when it was."""
        self._rejections = 0
        """How many reports in a row the API server refused."""
        self._problems: dict[str, tuple[str, ...]] = {}
        self._known_drift: tuple[Drift, ...] = ()
        self._last_action = ""

    def run(self) -> None:
        """Turn until `stop` is set; every wait is cut short by a ring."""
        delay_s = 0.0
        while not self._stop.is_set():
            rung = self._wakeup.wait(min(delay_s, self._status_file.heartbeat_s))
            self._status_file.send_heartbeat()
            delay_s = (
                self.reconcile_once()
                if rung or delay_s <= self._status_file.heartbeat_s
                else (delay_s - self._status_file.heartbeat_s)
            )
            log.debug("awake: %s; next look in %.1f s", ", ".join(sorted(rung)) or "time", delay_s)

    def finish_boot(self) -> None:
        """Do what a boot has left to be done, as far as that needs nobody and goes well.

        Files, units and users are then those of the deployment that is booted: to be called before
        anything that reads them is started.
        """
        for _ in range(_MAX_BOOT_PASSES):
            _, decision = self._observe_and_decide()
            finishes = isinstance(
                decision, RecoverAction | RestoreAction | VerifyAction | CommitAction
            )
            if self._failure is not None or not finishes:
                return
            self.reconcile_once()
            if isinstance(decision, VerifyAction):
                # With it the trial has begun; the rest is for when everything runs.
                return

    def reconcile_once(self) -> float:
        """Do the one next thing; returns in how many seconds to look again."""
        self._refresh_credentials(
            _CONTROLLER_CONFIG_REASON, self._interfaces.certificates.sync_files
        )
        self._refresh_credentials(
            _PULL_SECRET_REASON, self._interfaces.pull_secrets.install_secrets
        )
        self._remove_answered_request()
        facts, decision = self._observe_and_decide()
        try:
            return self._run_decision(facts, decision)
        finally:
            if facts.request is not None and facts.request.kind is RequestKind.REPAIR:
                self._interfaces.requests.remove_request()

    def _run_decision(self, facts: Facts, decision: Decision) -> float:
        self._log_decision(decision)
        told = self._write_report(facts, decision)
        pending = self._compute_retry_delay(decision)
        if pending > 0:
            return min(pending, told)
        try:
            delay_s = self._runner.run_action(decision, facts)
        except TreenailError as error:
            return min(self._handle_failure(error, facts, decision), told)
        if not isinstance(decision, WaitAction):
            self._failure = None
        return min(delay_s, told)

    def _remove_answered_request(self) -> None:
        """Take away a request about which nothing is left to do: who asked is waiting for that."""
        request = self._interfaces.requests.read_request()
        if request is not None and is_answered(request, self._runner.record):
            self._interfaces.requests.remove_request()

    def _observe_and_decide(self) -> tuple[Facts, Decision]:
        """Facts and the decision they call for.

        The one move that can't be taken back is decided twice, the second time on a fresh look
        at the Node; with the API server away, what was decided and drained for goes through.
        """
        record = self._runner.record
        try:
            facts = self._observer.collect_facts(record)
            decision = decide_action(facts)
            if isinstance(decision, RebootAction):
                answers = True
                try:
                    self._interfaces.cluster.refresh_node()
                except ClusterError as error:
                    answers = False
                    log.info("no fresh look at the Node before the reboot: %s", error)
                facts = replace(self._observer.collect_facts(record), is_api_reachable=answers)
                decision = decide_action(facts)
        except TreenailError as error:
            return self._observer.collect_cached_facts(record), RefuseAction(error)
        self._report_drift(facts)
        return facts, decision

    def _log_decision(self, decision: Decision) -> None:
        move = repr(decision)
        if move != self._last_action:
            log.debug("decided: %s", move)
            self._last_action = move
        if self._failure is not None and self._failure.action != move:
            self._failure = None

    def _report_drift(self, facts: Facts) -> None:
        """Tell once of each drift, also of such as holds nothing up, and once when it is gone."""
        if facts.record.update is not None or facts.has_interrupted_change or facts.is_forced:
            return
        found = facts.drift.all
        for drift in [each for each in found if each not in self._known_drift][:_MAX_LOGGED_DRIFTS]:
            log.warning("drifted: %s", drift, extra={"message_id": MessageId.DRIFT_DETECTED})
        if self._known_drift and not found:
            log.info("nothing drifts any more: the machine is as %s says", facts.record.current)
        if facts.drift.reported and found != self._known_drift:
            told = format_drift(facts.drift.reported, facts.record.current.config)
            self._interfaces.cluster.record_event(NodeEvent("Warning", "ConfigDriftDetected", told))
        self._known_drift = found
        self._status_file.show_drift(found)
        self._metrics.write_metrics(facts.drift)

    def _write_report(self, facts: Facts, decision: Decision) -> float:
        """Report; returns in how many seconds to try again if nobody could be told."""
        failure = self._failure
        error = failure.error if failure is not None and failure.is_reportable else None
        told = make_report(facts, decision, error)
        self._status_file.show_report(facts, told, failure.error if failure else None)
        try:
            self._interfaces.cluster.write_report(told)
        except ClusterError as problem:
            if str(problem) != self._report_error:
                log.warning("can't report to the API server: %s", problem)
            self._report_error = str(problem)
            # Who does not answer is back in a moment; who refuses is to be asked less and less.
            refused = not isinstance(problem, UnreachableError)
            self._rejections = self._rejections + 1 if refused else 0
            longer = 2.0 ** min(max(self._rejections - 1, 0), 20)
            return min(self._timing.retry_first_s * longer, self._timing.retry_max_s)
        if self._report_error:
            log.info("the API server takes reports again")
        self._report_error, self._rejections = "", 0
        return self._timing.resync_s

    def _compute_retry_delay(self, decision: Decision) -> float:
        """Seconds until a move that failed may be tried again."""
        if self._failure is None or self._failure.action != repr(decision):
            return 0.0
        return self._failure.retry_at - self._interfaces.clock.monotonic()

    def _handle_failure(self, error: TreenailError, facts: Facts, decision: Decision) -> float:
        earlier = self._failure
        count = earlier.count + 1 if earlier else 1
        delay_s = self._timing.retry_max_s
        if error.retry_policy is RetryPolicy.BACKOFF:
            first_s = self._timing.retry_first_s * random.uniform(0.8, 1.2)  # noqa: S311 - jitter
            delay_s = min(first_s * 2.0 ** min(count - 1, 20), delay_s)
        if earlier is None or str(earlier.error) != str(error):
            log.error("%s", format_reason(error), extra={"message_id": MessageId.DEGRADED})
        else:
            log.info("attempt %d failed the same way; the next is in %.0f s", count, delay_s)
        self._failure = ActionFailure(
            error=error,
            action=repr(decision),
            count=count,
            since=earlier.since if earlier else facts.now,
            retry_at=self._interfaces.clock.monotonic() + delay_s,
        )
        self._write_report(self._observer.collect_cached_facts(self._runner.record), decision)
        return delay_s

    def _refresh_credentials(self, reason: str, refresh: Callable[[], tuple[str, ...]]) -> None:
        """Have credentials in place, and tell once, by Events of this reason, what is wrong."""
        try:
            problems = refresh()
        except TreenailError as error:
            problems = (format_reason(error),)
        for problem in problems:
            if problem not in self._problems.get(reason, ()):
                log.warning("%s", problem, extra={"message_id": MessageId.CREDENTIALS_INVALID})
                self._interfaces.cluster.record_event(NodeEvent("Warning", reason, problem))
        self._problems[reason] = problems
        self._status_file.show_credential_problems(
            [each for all_ in self._problems.values() for each in all_]
        )

    def _handle_record(self, record: LedgerRecord) -> None:
        """Let the journal and the live status say which update this is, and how far."""
        update = record.update
        journal.set_log_context(
            update=update.id if update else "",
            phase=str(update.phase) if update else "",
            config=update.target.config if update else record.current.config,
        )
        self._status_file.show_record(record)

    def _handle_progress(
        self, update: UpdateRecord | PrestagedTarget, progress: TransactionProgress
    ) -> WatchVerdict:
        """Show how an OS transaction gets on, and whether it is still wanted."""
        self._status_file.send_heartbeat()
        self._status_file.show_progress(progress)
        # This may take an hour, and they are to be there within a minute.
        self._refresh_credentials(
            _CONTROLLER_CONFIG_REASON, self._interfaces.certificates.sync_files
        )
        if self._stop.is_set():
            return WatchVerdict.DETACH
        node = self._interfaces.cluster.get_cached_node()
        if isinstance(update, PrestagedTarget):
            current = self._runner.record.current
            stands_ahead = node is None or decide_prestage.is_prestage_requested(
                summarize_node(node), update, current
            )
            return WatchVerdict.CONTINUE if stands_ahead else WatchVerdict.CANCEL
        if node is not None and not is_target_requested(summarize_node(node), update):
            return WatchVerdict.CANCEL
        if is_cancel_request(self._interfaces.requests.read_request(), update):
            return WatchVerdict.CANCEL
        return WatchVerdict.CONTINUE
