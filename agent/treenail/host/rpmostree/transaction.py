"""One rpm-ostree transaction, followed over its private socket to its end."""

import logging
import re
from dataclasses import dataclass
from typing import assert_never

from treenail.clock import Clock
from treenail.errors import BusError
from treenail.host.ostree.deployments import Progress, Verdict
from treenail.host.ostree.watch import Limits, Watch
from treenail.host.system.sanitize import scrub
from treenail.host.systemd.bus import Peer, Signal

log = logging.getLogger(__name__)

INTERFACE = "org.projectatomic.rpmostree1.Transaction"

_CALL_S = 60.0
_NUMBERED = re.compile(r"\[(\d+)/(\d+)\]")
_TEXT_LIMIT = 200
# A transaction is not over when its last counted task is: 100 is for success alone.
_ALMOST = 99


@dataclass(frozen=True, slots=True)
class Finished:
    """It said how it ended; ``cancelled``: after it was asked to end."""

    success: bool
    text: str
    cancelled: bool


@dataclass(frozen=True, slots=True)
class Left:
    """We hung up, because the watcher said so; it runs on."""


@dataclass(frozen=True, slots=True)
class Vanished:
    """It hung up without a word: rpm-ostreed ended."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """A limit passed; ``ended`` tells whether it was cancelled for that, or runs on."""

    why: str
    ended: bool


Ending = Finished | Left | Vanished | Overdue


def follow(peer: Peer, watch: Watch, *, clock: Clock, limits: Limits, ours: bool) -> Ending:
    """Start or join the transaction and report its progress until it ends.

    ``watch`` is asked at every sign of progress and at least once a second. Only a transaction
    that is ``ours`` is cancelled, by the watcher's word or when a limit passes; another one is
    left alone instead.
    """
    follower = _Follower(peer, watch, clock, limits, ours=ours)
    peer.call("Start", timeout_s=_CALL_S)
    peer.run(follower.each)
    return follower.ending or Vanished()


class _Follower:
    def __init__(
        self, peer: Peer, watch: Watch, clock: Clock, limits: Limits, *, ours: bool
    ) -> None:
        self.ending: Ending | None = None
        self._peer = peer
        self._watch = watch
        self._clock = clock
        self._limits = limits
        self._ours = ours
        self._gauge = Gauge()
        self._began = self._heard = clock.monotonic()
        self._cancelled_at: float | None = None
        self._overdue = ""

    def each(self, signal: Signal | None) -> bool:
        """Whether it is over, as of this signal or this second."""
        if signal is not None:
            self._heard = self._clock.monotonic()
            if signal.member == "Finished":
                success, text = signal.values
                self._finish(success=success is True, text=scrub(str(text)))
                return True
            self._gauge.read(signal)
        verdict = self._watch(self._gauge.progress)
        if self._cancelled_at is None:
            self._obey(verdict)
            self._keep_limits()
        elif verdict is Verdict.LEAVE:
            self.ending = Left()
        elif self._clock.monotonic() - self._cancelled_at >= self._limits.cancel_s:
            why = f"it has not ended {self._limits.cancel_s:g} s after it was cancelled"
            why = f"{self._overdue}, and {why}" if self._overdue else why
            self.ending = Overdue(why, ended=False)
        return self.ending is not None

    def _finish(self, *, success: bool, text: str) -> None:
        if success:
            self._watch(Progress(self._gauge.progress.text, 100))
        if self._overdue and not success:
            self.ending = Overdue(self._overdue, ended=True)
        else:
            self.ending = Finished(success, text, cancelled=self._cancelled_at is not None)

    def _obey(self, verdict: Verdict) -> None:
        match verdict:
            case Verdict.GO_ON:
                pass
            case Verdict.CANCEL if self._ours:
                self._cancel()
            case Verdict.CANCEL | Verdict.LEAVE:
                self.ending = Left()
            case _:
                assert_never(verdict)

    def _keep_limits(self) -> None:
        now = self._clock.monotonic()
        if now - self._began >= self._limits.transaction_s:
            self._overdue = f"it has not ended within {self._limits.transaction_s:g} s"
        elif now - self._heard >= self._limits.stall_s:
            self._overdue = f"it has said nothing for {self._limits.stall_s:g} s"
        else:
            return
        if self._ours:
            self._cancel()
        else:
            self.ending = Overdue(self._overdue, ended=False)

    def _cancel(self) -> None:
        self._cancelled_at = self._clock.monotonic()
        try:
            self._peer.call("Cancel", timeout_s=_CALL_S)
        except BusError as error:
            # Either it is gone, which the peer notices, or its end is waited for in vain.
            log.warning("%s", error)


class Gauge:
    """What a transaction last said, and how far that makes it.

    Container imports count their tasks, ``[3/15] Fetching …``; other work has one task of its own
    percentage. The percentage never falls.
    """

    def __init__(self) -> None:
        self.progress = Progress("", None)
        self._done = 0
        self._total = 0

    def read(self, signal: Signal) -> None:
        """Take note of a signal other than Finished."""
        match signal:
            case Signal("Message", (str(text),)):
                self._say(text, None)
            case Signal("TaskBegin", (str(text),)):
                counted = _NUMBERED.search(text)
                if counted:
                    self._done, self._total = int(counted.group(1)) - 1, int(counted.group(2))
                self._say(text, self._share(0))
            case Signal("TaskEnd", _):
                share = self._share(100)
                self._total = 0
                self._say(self.progress.text, share)
            case Signal("PercentProgress", (str(text), int(percent))):
                self._say(text, self._share(percent) if self._total else percent)
            case _:
                pass

    def _share(self, percent: int) -> int | None:
        return (self._done * 100 + percent) // self._total if self._total else None

    def _say(self, text: str, percent: int | None) -> None:
        last = self.progress.percent
        if percent is None or last is None:
            percent = last if percent is None else min(percent, _ALMOST)
        else:
            percent = max(last, min(percent, _ALMOST))
        self.progress = Progress(scrub(text, limit=_TEXT_LIMIT), percent)
