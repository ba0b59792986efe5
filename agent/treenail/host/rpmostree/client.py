"""A client of rpm-ostreed: registration, transactions and their outcome.

A transaction has a socket of its own, over which the client follows it to its end.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from treenail import clocks, errors, retry, sanitize
from treenail.host.ostree import backend_settings, deployments
from treenail.host.systemd import system_bus

log = logging.getLogger(__name__)

CLIENT = "treenail"
"""The client ID in rpm-ostree status, and the beginning of the titles of our transactions."""

_NAME = "org.projectatomic.rpmostree1"
_SYSROOT = system_bus.BusInterface(
    _NAME, "/org/projectatomic/rpmostree1/Sysroot", f"{_NAME}.Sysroot"
)
_BUS = system_bus.BusInterface(
    "org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus"
)

# The daemon loads and locks the sysroot within the call that makes a transaction.
# rpm-ostree's own client waits as long.
_CALL_S = 300.0
_PEER_S = 60.0
TRANSACTION_INTERFACE = f"{_NAME}.Transaction"

_TRANSACTION_CALL_S = 60.0
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
    limits: backend_settings.TransactionLimits,
    is_ours: bool,
) -> TransactionOutcome:
    """Start or join the transaction and report its progress until it ends.

    ``watch`` is called at every signal and at least once a second. A transaction that ``is_ours``
    is cancelled when the watcher cancels or a limit passes; from another one this detaches.
    """
    follower = _TransactionFollower(peer, watch, clock, limits, is_ours=is_ours)
    # Start of a running transaction returns False and joins it. The peer has subscribed before.
    # From then on it does not depend on its caller. Before, it ends when the caller leaves the bus.
    peer.call_method("Start", timeout_s=_TRANSACTION_CALL_S)
    peer.run_until(follower.handle_signal)
    return follower.outcome or TransactionLost()


class _TransactionFollower:
    def __init__(
        self,
        peer: system_bus.BusPeer,
        watch: deployments.TransactionWatch,
        clock: clocks.Clock,
        limits: backend_settings.TransactionLimits,
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
            self._peer.call_method("Cancel", timeout_s=_TRANSACTION_CALL_S)
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


class RpmOstreeClient:
    """A client of rpm-ostreed, for one thread. Raises only `HostError`.

    Every operation registers the client again: an rpm-ostreed that exited has no clients.
    """

    def __init__(
        self,
        bus: system_bus.SystemBus,
        clock: clocks.Clock,
        limits: backend_settings.TransactionLimits,
        *,
        heartbeat: Callable[[], None],
    ) -> None:
        """``heartbeat`` is called once a second while a transaction runs without a watcher."""
        self._bus = bus
        self._heartbeat = heartbeat
        self._clock = clock
        self._limits = limits
        self._is_registered = False

    def read_deployments(self) -> deployments.DeploymentStatus:
        """Read the deployments and the running transaction."""
        self._register_client()
        # Properties follow a transaction with a delay; Reload updates them.
        self._bus.call_method(_SYSROOT, "Reload", timeout_s=_CALL_S)
        return _parse_deployments(self._bus.read_properties(_SYSROOT, timeout_s=_PEER_S))

    def read_kernel_options(self, *, is_pending: bool) -> str:
        """Read the kernel arguments of the pending or booted deployment.

        With ``is_pending`` read those of the pending deployment, if there is one.
        """
        self._register_client()
        boot_config = self._bus.call_method(
            self._get_os(), "GetDeploymentBootConfig", "", is_pending, timeout_s=_CALL_S
        )
        text = boot_config.get("options") if isinstance(boot_config, dict) else None
        if not isinstance(text, str):
            raise errors.HostError(
                "cannot read the kernel arguments: rpm-ostree returned none",
                remedy="see: rpm-ostree kargs; journalctl -u rpm-ostreed",
            )
        return text

    def run_transaction(
        self, method: str, *arguments: object, watch: deployments.TransactionWatch | None = None
    ) -> TransactionOutcome:
        """Call the method, then start or join its transaction and follow it to the end."""
        self._register_client()
        address: object = None
        try:
            # A call with the same method and equal arguments as those of the running transaction
            # returns its address. Any other call fails as busy.
            address = self._bus.call_method(self._get_os(), method, *arguments, timeout_s=_CALL_S)
            return self.follow_transaction(
                str(address), watch or self._continue_watching, is_ours=True
            )
        except errors.BusyError as error:
            raise self._explain_busy(error) from error
        except errors.BusError as error:
            if not error.name or address is not None:
                # rpm-ostreed made the transaction, or may have made it without a reply. One that is
                # not started ends when its caller leaves the bus.
                self._bus.close_connection()
            raise

    def follow_transaction(
        self, address: str, watch: deployments.TransactionWatch, *, is_ours: bool
    ) -> TransactionOutcome:
        """Follow the transaction at the address to its end; cancel it only if ``is_ours``."""
        # rpm-ostreed is busy until every peer has closed its connection.
        # It closes a forgotten connection only 30 s after the end.
        with self._bus.open_peer(address, TRANSACTION_INTERFACE, timeout_s=_PEER_S) as peer:
            return follow_transaction(
                peer, watch, clock=self._clock, limits=self._limits, is_ours=is_ours
            )

    def cancel_own_transaction(self, transaction: deployments.ActiveTransaction) -> bool:
        """Cancel the transaction if treenail started it; return whether it did."""
        with self._bus.open_peer(
            transaction.address, TRANSACTION_INTERFACE, timeout_s=_PEER_S
        ) as peer:
            title = peer.read_properties(timeout_s=_PEER_S).get("Title")
            if not str(title).startswith(f"{CLIENT}: "):
                return False
            log.info("cancelling own transaction: %s", title)
            follow_transaction(
                peer, self._cancel_watched, clock=self._clock, limits=self._limits, is_ours=True
            )
            return True

    def describe_transaction(self, transaction: deployments.ActiveTransaction) -> str:
        """Describe the transaction and its caller for a message."""
        try:
            pid = self._bus.call_method(
                _BUS, "GetConnectionUnixProcessID", transaction.sender, timeout_s=_PEER_S
            )
        except errors.BusError:
            return f"{transaction.method}, called by {transaction.sender}, which left the bus"
        return f"{transaction.method}, called by process {pid} ({transaction.sender})"

    def make_busy_error(self, transaction: deployments.ActiveTransaction) -> errors.BusyError:
        """Make the error that names the running transaction."""
        return errors.BusyError(
            f"rpm-ostree is busy with {self.describe_transaction(transaction)}",
            remedy="see: rpm-ostree status",
        )

    def unregister_client(self) -> None:
        """Let rpm-ostreed exit when idle; the next operation starts it again."""
        if not self._is_registered:
            return
        self._is_registered = False
        try:
            # A call to a name without an owner would start rpm-ostreed by bus activation.
            if self._bus.call_method(_BUS, "NameHasOwner", _NAME, timeout_s=_PEER_S):
                self._bus.call_method(_SYSROOT, "UnregisterClient", {}, timeout_s=_PEER_S)
        except errors.BusError as error:
            log.warning("cannot unregister from rpm-ostreed, it keeps running: %s", error)

    def _register_client(self) -> None:
        def register() -> None:
            client = system_bus.make_options({"id": CLIENT})
            self._bus.call_method(_SYSROOT, "RegisterClient", client, timeout_s=_CALL_S)

        # rpm-ostreed exits after 60 s without a client (rpmostreed-daemon.cxx). A call at that time
        # gets NoReply, and the next one activates it again.
        retry.retry_bus_call(register, self._clock)
        self._is_registered = True

    def _get_os(self) -> system_bus.BusInterface:
        # GetOS("") crashes rpm-ostreed after its reply: it completes the invocation twice
        # (handle_get_os in rpmostreed-sysroot.cxx, 2026.2).
        path = self._bus.read_properties(_SYSROOT, timeout_s=_CALL_S).get("Booted")
        if not isinstance(path, str) or path == "/":
            raise errors.HostError(
                "rpm-ostree does not know which deployment is booted",
                remedy="see: rpm-ostree status",
            )
        return system_bus.BusInterface(_NAME, path, f"{_NAME}.OS")

    def _continue_watching(
        self, _: deployments.TransactionProgress
    ) -> deployments.TransactionVerdict:
        self._heartbeat()
        return deployments.TransactionVerdict.CONTINUE

    def _cancel_watched(self, _: deployments.TransactionProgress) -> deployments.TransactionVerdict:
        self._heartbeat()
        return deployments.TransactionVerdict.CANCEL

    def _explain_busy(self, error: errors.BusyError) -> errors.BusyError:
        # A lock of another program and a running transaction give the same error, G_IO_ERROR_BUSY.
        transaction = _parse_deployments(
            self._bus.read_properties(_SYSROOT, timeout_s=_PEER_S)
        ).transaction
        if transaction is not None:
            return self.make_busy_error(transaction)
        return errors.BusyError(
            "another program, such as bootc or ostree, holds the sysroot",
            name=error.name,
            remedy="see: rpm-ostree status",
        )


def _parse_deployments(properties: dict[str, object]) -> deployments.DeploymentStatus:
    listed = properties.get("Deployments")
    rows = listed if isinstance(listed, list) else []
    # Method, caller and object path, or three empty strings; the socket is a property of its own.
    active = properties.get("ActiveTransaction")
    address = str(properties.get("ActiveTransactionPath") or "")
    transaction = None
    if isinstance(active, tuple) and len(active) >= 2 and address:
        transaction = deployments.ActiveTransaction(str(active[0]), str(active[1]), address)
    in_boot_order = tuple(
        deployments.parse_deployment(row) for row in rows if isinstance(row, dict)
    )
    return deployments.DeploymentStatus(in_boot_order, transaction)


def check_outcome(outcome: TransactionOutcome, operation: str) -> None:
    """Raise unless the operation succeeded; ``operation`` is its verb and object."""
    match outcome:
        case TransactionFinished(is_success=True):
            return
        case TransactionDetached():
            raise errors.CancelledError(
                f"stopped waiting for rpm-ostree to {operation}; the transaction continues"
            )
        case TransactionFinished(text=text, is_cancelled=cancelled):
            # Any local process may have cancelled it: the socket is open to all users, and Cancel
            # is not subject to polkit.
            if cancelled or "cancelled" in text.lower():
                raise errors.CancelledError(f"rpm-ostree did not {operation}: it was cancelled")
            raise errors.TransactionError(
                f"rpm-ostree cannot {operation}: {text or 'it gave no reason'}",
                remedy=backend_settings.find_remedy(text, "see: journalctl -u rpm-ostreed"),
            )
        case TransactionLost():
            # No TransactionError: rpm-ostreed may have restarted, and a retry can succeed.
            raise errors.BusError(
                f"rpm-ostree cannot {operation}: rpm-ostreed exited",
                remedy="see: journalctl -u rpm-ostreed",
            )
        case TransactionTimedOut(reason=reason):
            raise errors.TransactionError(
                f"rpm-ostree cannot {operation}: {reason}", remedy="see: rpm-ostree status"
            )
        case _:
            assert_never(outcome)
