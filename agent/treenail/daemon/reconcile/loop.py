"""The main loop: observe, decide, report, act, until a signal stops it.

This is the only place that catches treenail's errors. It does not catch bugs: the process ends
with a traceback, systemd restarts it, and the ledger says where to continue.
"""

import logging
import queue
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from treenail import errors
from treenail.api import annotations as key
from treenail.config.drift_comparison import Drift
from treenail.daemon.agent_settings import LimitSettings
from treenail.daemon.local.metrics import NodeMetrics
from treenail.daemon.local.status_file import StatusFile
from treenail.daemon.reconcile import (
    act,
    context,
    credentials,
    observe,
    os_transaction,
    update_ledger,
)
from treenail.log import MessageId
from treenail.update import status
from treenail.update.decision import (
    actions,
    decide,
    decide_boot,
    node_state,
    user_requests,
)
from treenail.update.drift.drift_policy import format_drift

log = logging.getLogger(__name__)

_MAX_LOGGED_DRIFTS = 20

START_EXTENSION_S = 660.0
"""The time for one pass before the agent is ready: rpm-ostreed may take 5 minutes to start, for
each of the two calls that read the deployments (its TimeoutStartSec=5m)."""
_REST_AFTER_S = 5.0
"""Time without a wakeup after which the agent is at rest: an update wakes it more often."""
_MAX_BOOT_PASSES = 5
"""One pass for each action that finishes a boot, and one for a repeated action."""


@dataclass(frozen=True, slots=True)
class ActionFailure:
    """The last failed attempt at an action, and the time of the next attempt."""

    error: errors.TreenailError
    action: str
    count: int
    since: float
    """On the monotonic clock, like ``retry_at``: the wall clock may jump during the wait."""
    retry_at: float
    is_degraded: bool = False
    """An earlier attempt degraded the Node."""

    @property
    def is_reportable(self) -> bool:
        """True after enough failures: a service that restarts must not degrade the Node."""
        return self.is_degraded or self.count >= self.error.report_after_failures

    @property
    def has_degraded(self) -> bool:
        """True once an attempt degraded the Node."""
        return self.is_degraded or (self.is_reportable and self.error.node_state is not None)

    def is_overdue(self, now: float) -> bool:
        """Return whether the wait for another program takes longer than its limit."""
        return now - self.since > self.error.wait_limit_s


class Wakeup:
    """Wakes the main thread from other threads and from signal handlers.

    A wakeup carries no order: the main thread observes everything afterwards, so that merged or
    lost wakeups do no harm. `queue.SimpleQueue` is reentrant, which signal handlers need.
    """

    def __init__(self) -> None:
        self._reasons: queue.SimpleQueue[str] = queue.SimpleQueue()

    def notify(self, reason: str) -> None:
        """Wake the waiting thread; ``reason`` is for the log."""
        self._reasons.put(reason)

    def wait(self, seconds: float) -> frozenset[str]:
        """Return the reasons since the last wait, or an empty set after ``seconds``."""
        reasons: set[str] = set()
        try:
            reasons.add(self._reasons.get(timeout=max(seconds, 0.0)))
            while True:
                reasons.add(self._reasons.get_nowait())
        except queue.Empty:
            return frozenset(reasons)


@dataclass(frozen=True, slots=True)
class LoopHooks:
    """Functions that the loop calls between two passes."""

    on_rest: Callable[[], None] = lambda: None
    """No update is in progress, and nothing happened for a while."""
    has_new_inputs: Callable[[], bool] = lambda: False
    """Returns whether the loop must end, so that another one uses new settings."""
    poll_s: float = float("inf")
    """How often it is called at least."""


_NO_HOOKS = LoopHooks()


class ReconcileLoop:
    """The agent's main thread."""

    def __init__(
        self,
        interfaces: context.NodeInterfaces,
        *,
        observer: observe.Observer,
        status_file: StatusFile,
        metrics: NodeMetrics,
        wakeup: Wakeup,
        stop: threading.Event,
        limits: LimitSettings,
        hooks: LoopHooks = _NO_HOOKS,
    ) -> None:
        self._hooks = hooks
        self._interfaces = interfaces
        self._observer = observer
        self._status_file = status_file
        self._metrics = metrics
        self._wakeup = wakeup
        self._stop = stop
        self._limits = limits
        self._ledger = update_ledger.UpdateLedger(interfaces, status_file)
        self._credentials = credentials.CredentialSync(interfaces, status_file)
        transaction_step = os_transaction.TransactionStep(
            interfaces, self._credentials, status_file, stop
        )
        self._runner = act.ActionRunner(
            interfaces, self._ledger, transaction_step, resync_s=limits.resync_s
        )
        self._failure: ActionFailure | None = None
        self._report_error = ""
        """The error of the last report; empty when it was written."""
        self._rejections = 0
        """How many reports in a row the API server rejected."""
        self._known_drift: tuple[Drift, ...] = ()
        self._last_action = ""
        self._wait_reason, self._waiting_since = "", 0.0

    def run(self) -> None:
        """Reconcile until `stop` is set or there are new inputs. A wakeup ends every wait."""
        delay_s, is_at_rest = 0.0, False
        while not self._stop.is_set():
            pause_s = min(delay_s, self._status_file.heartbeat_s, self._hooks.poll_s)
            if not is_at_rest:
                pause_s = min(pause_s, _REST_AFTER_S)
            reasons = self._wakeup.wait(pause_s)
            self._status_file.send_heartbeat()
            if self._hooks.has_new_inputs():
                return
            if reasons or delay_s <= pause_s:
                delay_s, is_at_rest = self.reconcile_once(), False
            else:
                delay_s -= pause_s
                if not is_at_rest and self._ledger.record.update is None:
                    self._interfaces.config_cache.drop_parsed()
                    self._hooks.on_rest()
                is_at_rest = True
            log.debug(
                "woken by %s; next pass in %.1f s", ", ".join(sorted(reasons)) or "time", delay_s
            )

    def finish_boot(self) -> None:
        """Run the actions that finish a boot, until one fails or needs the API server.

        Afterwards files, units, users and the trust store match the booted deployment. Call it
        before systemd starts the kubelet and everything else that reads them.
        """
        self._finish_boot_actions()
        self._credentials.sync_trust_store()

    def _finish_boot_actions(self) -> None:
        for _ in range(_MAX_BOOT_PASSES):
            if self._ledger.record.update is not None:
                self._status_file.extend_start_timeout(START_EXTENSION_S)
            facts, decision = self._observe_and_decide()
            if self._failure is not None or not decide_boot.is_boot_action(decision, facts):
                return
            self.reconcile_once()
            if isinstance(decision, actions.VerifyAction):
                # The boot trial has begun. Its checks need the services that start after us.
                return

    def reconcile_once(self) -> float:
        """Observe, decide, report and act once; return the seconds until the next pass."""
        self._credentials.sync_all()
        self._remove_answered_request()
        facts, decision = self._observe_and_decide()
        decision = self._mark_overdue(decision)
        try:
            return self._run_decision(facts, decision)
        finally:
            if facts.request is not None and facts.request.kind is user_requests.RequestKind.REPAIR:
                self._interfaces.requests.remove_request()

    def _run_decision(self, facts: node_state.Facts, decision: actions.Decision) -> float:
        self._log_decision(decision)
        next_report_s = self._write_report(facts, decision)
        pending = self._compute_retry_delay(decision)
        if pending > 0:
            return min(pending, next_report_s)
        try:
            delay_s = self._runner.run_action(decision, facts)
        except errors.TreenailError as error:
            return min(self._handle_failure(error, facts, decision), next_report_s)
        if not isinstance(decision, actions.WaitAction):
            self._failure = None
        return min(delay_s, next_report_s)

    def _remove_answered_request(self) -> None:
        """Remove a request that is done: the command that wrote it waits for that."""
        request = self._interfaces.requests.read_request()
        if request is not None and user_requests.is_answered(request, self._ledger.record):
            self._interfaces.requests.remove_request()

    def _observe_and_decide(self) -> tuple[node_state.Facts, actions.Decision]:
        """Collect facts and decide the next action.

        A reboot cannot be undone, so it is decided twice, the second time with a Node read from
        the API server. When the API server is unreachable, the decided and drained update goes on.
        """
        record = self._ledger.record
        try:
            facts = self._observer.collect_facts(record)
            decision = decide.decide_action(facts)
            if isinstance(decision, actions.RebootAction):
                is_reachable = True
                try:
                    self._interfaces.cluster.refresh_node()
                except errors.ClusterError as error:
                    is_reachable = False
                    log.info("cannot read the Node before the reboot, continuing: %s", error)
                facts = replace(self._observer.collect_facts(record), is_api_reachable=is_reachable)
                decision = decide.decide_action(facts)
        except errors.TreenailError as error:
            facts = self._observer.collect_cached_facts(record)
            return facts, actions.RefuseAction(error, is_observation_failure=True)
        self._report_drift(facts)
        return facts, decision

    def _mark_overdue(self, decision: actions.Decision) -> actions.Decision:
        """Return a wait as overdue after it was decided in each pass for longer than its limit."""
        now = self._interfaces.clock.monotonic()
        reason = decision.reason if isinstance(decision, actions.WaitAction) else ""
        if reason != self._wait_reason:
            self._wait_reason, self._waiting_since = reason, now
        if (
            not isinstance(decision, actions.WaitAction)
            or now - self._waiting_since <= decision.limit_s
        ):
            return decision
        return replace(decision, is_overdue=True)

    def _log_decision(self, decision: actions.Decision) -> None:
        action = repr(decision)
        if action != self._last_action:
            log.debug("decided: %s", action)
            self._last_action = action
        if self._failure is not None and self._failure.action != action:
            self._failure = None

    def _report_drift(self, facts: node_state.Facts) -> None:
        """Log each drift once, including reported-only drift, and log once that it is resolved.

        Without a check, as after an update whose config cannot be read, the drift is unknown.
        """
        if facts.record.update is not None or facts.has_interrupted_change or facts.is_forced:
            return
        if facts.drift.is_checked:
            self._log_drift(facts)
            self._metrics.write_metrics(facts.drift)
        elif facts.record.current.config:
            self._status_file.show_drift(None)
        self._metrics.write_history(facts.record.history)
        node = self._interfaces.cluster.get_cached_node()
        if node is not None and facts.deployments is not None:
            self._metrics.write_packages(node.name, facts.deployments.packages)

    def _log_drift(self, facts: node_state.Facts) -> None:
        drifts = facts.drift.all
        new_drifts = [drift for drift in drifts if drift not in self._known_drift]
        for drift in new_drifts[:_MAX_LOGGED_DRIFTS]:
            log.warning("drift: %s", drift, extra={"message_id": MessageId.DRIFT_DETECTED})
        if self._known_drift and not drifts:
            log.info("drift resolved; machine matches %s", facts.record.current)
        if facts.drift.reported and drifts != self._known_drift:
            message = format_drift(facts.drift.reported, facts.record.current.config)
            self._interfaces.cluster.record_event(
                status.NodeEvent("Warning", "ConfigDriftDetected", message)
            )
        self._known_drift = drifts
        self._status_file.show_drift(drifts)

    def _write_report(self, facts: node_state.Facts, decision: actions.Decision) -> float:
        """Write the report; return the seconds until it must be written again."""
        failure = self._failure
        error = failure.error if failure is not None and failure.is_reportable else None
        is_overdue = failure is not None and failure.is_overdue(facts.monotonic)
        report = status.make_report(facts, decision, error, is_overdue=is_overdue)
        self._status_file.show_report(facts, report, failure.error if failure else None)
        if state := report.annotations.get(key.STATE):
            self._metrics.write_state(state)
        try:
            self._interfaces.cluster.write_report(report)
        except errors.ClusterError as problem:
            if str(problem) != self._report_error:
                log.warning("cannot report to the API server: %s", problem)
            self._report_error = str(problem)
            # Unreachable: retry at a fixed interval. Rejected: back off exponentially.
            is_rejected = not isinstance(problem, errors.UnreachableError)
            self._rejections = self._rejections + 1 if is_rejected else 0
            factor = 2.0 ** min(max(self._rejections - 1, 0), 20)
            return min(self._limits.retry_first_s * factor, self._limits.retry_max_s)
        if self._report_error:
            log.info("API server accepts reports again")
        self._report_error, self._rejections = "", 0
        return self._limits.resync_s

    def _compute_retry_delay(self, decision: actions.Decision) -> float:
        """Return the seconds until the failed action may be retried; 0 for another action."""
        if self._failure is None or self._failure.action != repr(decision):
            return 0.0
        return self._failure.retry_at - self._interfaces.clock.monotonic()

    def _handle_failure(
        self, error: errors.TreenailError, facts: node_state.Facts, decision: actions.Decision
    ) -> float:
        last = self._failure
        count = last.count + 1 if last else 1
        delay_s = self._limits.retry_max_s
        if error.retry_policy is errors.RetryPolicy.BACKOFF:
            first_s = self._limits.retry_first_s * random.uniform(0.8, 1.2)  # noqa: S311 - jitter
            delay_s = min(first_s * 2.0 ** min(count - 1, 20), delay_s, error.max_delay_s)
        if last is None or str(last.error) != str(error):
            log.error("%s", status.format_reason(error), extra={"message_id": MessageId.DEGRADED})
        elif isinstance(decision, actions.RefuseAction) and not decision.is_observation_failure:
            # Nothing is tried before the cause of the refusal changes.
            log.info("still refused for the same reason; checking again in %.0f s", delay_s)
        else:
            log.info("attempt %d failed with the same error; retrying in %.0f s", count, delay_s)
        self._failure = ActionFailure(
            error=error,
            action=repr(decision),
            count=count,
            since=last.since if last else facts.monotonic,
            retry_at=self._interfaces.clock.monotonic() + delay_s,
            # Another error with a higher limit must not end the report before a success.
            is_degraded=last is not None and last.has_degraded,
        )
        if self._failure.is_reportable:
            self._ledger.record_failed_try(error)
        self._write_report(self._observer.collect_cached_facts(self._ledger.record), decision)
        return delay_s
