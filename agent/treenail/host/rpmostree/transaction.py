"""One rpm-ostree transaction, followed over its private socket to its end."""

import logging
import re
from dataclasses import dataclass
from typing import assert_never

from treenail import clocks, errors, sanitize
from treenail.host.ostree import backends, deployments
from treenail.host.systemd import system_bus

log = logging.getLogger(__name__)

INTERFACE = "org.projectatomic.rpmostree1.Transaction"

_CALL_S = 60.0
# rpm-ostree reports an imported layer as one task, "[3/15] Fetching …", without its bytes.
_NUMBERED = re.compile(r"\[(\d{1,9})/(\d{1,9})\]", re.ASCII)
_TEXT_LIMIT = 200
_UNKNOWN_RESULT = "it sent a result of another type"
# After the last counted task rpm-ostree still writes the deployment: only success is 100 %.
_MAX_UNFINISHED_PERCENT = 99


@dataclass(frozen=True, slots=True)
class TransactionFinished:
    """The transaction sent Finished; ``is_cancelled`` if that was after our Cancel."""

    is_success: bool
    text: str
    is_cancelled: bool


@dataclass(frozen=True, slots=True)
class TransactionDetached:
    """The watcher detached, and the transaction continues."""


@dataclass(frozen=True, slots=True)
class TransactionLost:
    """rpm-ostreed closed the socket without Finished: it exited."""


@dataclass(frozen=True, slots=True)
class TransactionTimedOut:
    """A time limit passed; unless ``is_ended`` the transaction continues."""

    reason: str
    is_ended: bool


TransactionOutcome = (
    TransactionFinished | TransactionDetached | TransactionLost | TransactionTimedOut
)


def follow_transaction(
    peer: system_bus.BusPeer,
    watch: deployments.TransactionWatch,
    *,
    clock: clocks.Clock,
    limits: backends.TransactionLimits,
    is_ours: bool,
) -> TransactionOutcome:
    """Start or join the transaction and report its progress until it ends.

    ``watch`` is called at every signal and at least once a second. A transaction that ``is_ours``
    is cancelled when the watcher cancels or a limit passes; from another one this detaches.
    """
    follower = _TransactionFollower(peer, watch, clock, limits, is_ours=is_ours)
    # Start of a running transaction returns False and joins it. The peer has subscribed before.
    # From then on it does not depend on its caller. Before, it ends when the caller leaves the bus.
    peer.call_method("Start", timeout_s=_CALL_S)
    peer.run_until(follower.handle_signal)
    return follower.outcome or TransactionLost()


class _TransactionFollower:
    def __init__(
        self,
        peer: system_bus.BusPeer,
        watch: deployments.TransactionWatch,
        clock: clocks.Clock,
        limits: backends.TransactionLimits,
        *,
        is_ours: bool,
    ) -> None:
        self.outcome: TransactionOutcome | None = None
        self._peer = peer
        self._watch = watch
        self._clock = clock
        self._limits = limits
        self._is_ours = is_ours
        self._parser = RpmOstreeProgress()
        self._started_at = self._last_signal_at = clock.monotonic()
        self._cancelled_at: float | None = None
        self._timeout_reason = ""

    def handle_signal(self, signal: system_bus.BusSignal | None) -> bool:
        """Handle a signal, or None once a second; return whether the outcome is known."""
        if signal is not None:
            self._last_signal_at = self._clock.monotonic()
            if signal.member == "Finished":
                match signal.values:
                    case (bool(success), str(text), *_):
                        self._record_outcome(is_success=success, text=sanitize.sanitize_text(text))
                    case _:
                        # The next try finds what it staged.
                        self._record_outcome(is_success=False, text=_UNKNOWN_RESULT)
                return True
            self._parser.read_signal(signal)
        verdict = self._watch(self._parser.progress)
        if self._cancelled_at is None:
            self._apply_verdict(verdict)
            self._check_limits()
        elif verdict is deployments.TransactionVerdict.DETACH:
            self.outcome = TransactionDetached()
        elif self._clock.monotonic() - self._cancelled_at >= self._limits.cancel_s:
            reason = f"no end {self._limits.cancel_s:g} s after it was cancelled"
            reason = f"{self._timeout_reason}, and {reason}" if self._timeout_reason else reason
            self.outcome = TransactionTimedOut(reason, is_ended=False)
        return self.outcome is not None

    def _record_outcome(self, *, is_success: bool, text: str) -> None:
        if is_success:
            self._watch(deployments.TransactionProgress(self._parser.progress.text, 100))
        if self._timeout_reason and not is_success:
            self.outcome = TransactionTimedOut(self._timeout_reason, is_ended=True)
        else:
            self.outcome = TransactionFinished(
                is_success, text, is_cancelled=self._cancelled_at is not None
            )

    def _apply_verdict(self, verdict: deployments.TransactionVerdict) -> None:
        match verdict:
            case deployments.TransactionVerdict.CONTINUE:
                pass
            case deployments.TransactionVerdict.CANCEL if self._is_ours:
                self._cancel_transaction()
            case deployments.TransactionVerdict.CANCEL | deployments.TransactionVerdict.DETACH:
                self.outcome = TransactionDetached()
            case _:
                assert_never(verdict)

    def _check_limits(self) -> None:
        now = self._clock.monotonic()
        if now - self._started_at >= self._limits.transaction_s:
            self._timeout_reason = f"no end within {self._limits.transaction_s:g} s"
        elif now - self._last_signal_at >= self._limits.stall_s:
            self._timeout_reason = f"no progress for {self._limits.stall_s:g} s"
        else:
            return
        if self._is_ours:
            self._cancel_transaction()
        else:
            self.outcome = TransactionTimedOut(self._timeout_reason, is_ended=False)

    def _cancel_transaction(self) -> None:
        self._cancelled_at = self._clock.monotonic()
        try:
            # This is a request: the transaction ends later, with Finished.
            self._peer.call_method("Cancel", timeout_s=_CALL_S)
        except errors.BusError as error:
            # The transaction has ended, which the peer notices, or the time limit ends the wait.
            log.warning("cannot cancel the transaction: %s", error)


class RpmOstreeProgress:
    """The last progress message of a transaction, and its percentage, which never falls.

    A container import has no percentage but counts its tasks: ``[3/15] Fetching …``. Other
    transactions send PercentProgress for one task.
    """

    def __init__(self) -> None:
        self.progress = deployments.TransactionProgress("", None)
        self._done = 0
        self._total = 0

    def read_signal(self, signal: system_bus.BusSignal) -> None:
        """Read a signal other than Finished."""
        match signal:
            case system_bus.BusSignal("Message", (str(text),)):
                self._set_progress(text, None)
            case system_bus.BusSignal("TaskBegin", (str(text),)):
                counted = _NUMBERED.search(text)
                if counted:
                    self._done, self._total = int(counted.group(1)) - 1, int(counted.group(2))
                self._set_progress(text, self._compute_percent(0))
            case system_bus.BusSignal("TaskEnd", _):
                task_percent = self._compute_percent(100)
                self._total = 0
                self._set_progress(self.progress.text, task_percent)
            case system_bus.BusSignal("PercentProgress", (str(text), int(percent))):
                self._set_progress(text, self._compute_percent(percent) if self._total else percent)
            case _:
                pass

    def _compute_percent(self, percent: int) -> int | None:
        return (self._done * 100 + percent) // self._total if self._total else None

    def _set_progress(self, text: str, percent: int | None) -> None:
        last = self.progress.percent
        if percent is None or last is None:
            percent = last if percent is None else min(percent, _MAX_UNFINISHED_PERCENT)
        else:
            percent = max(last, min(percent, _MAX_UNFINISHED_PERCENT))
        self.progress = deployments.TransactionProgress(
            sanitize.sanitize_text(text, limit=_TEXT_LIMIT), percent
        )
