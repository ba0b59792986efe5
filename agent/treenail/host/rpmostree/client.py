"""The rpm-ostree daemon as its client: registering, running transactions, saying how they ended."""

import logging
from collections.abc import Callable
from typing import assert_never

from treenail.clock import Clock
from treenail.errors import BusError, BusyError, CancelledError, HostError, TransactionError
from treenail.host.ostree.deployments import (
    Deployments,
    Progress,
    Transaction,
    Verdict,
    deployment,
)
from treenail.host.ostree.remedies import remedy_for
from treenail.host.ostree.watch import Limits, Watch
from treenail.host.rpmostree.transaction import (
    INTERFACE,
    Ending,
    Finished,
    Left,
    Overdue,
    Vanished,
    follow,
)
from treenail.host.systemd.bus import NO_REPLY, Peer, SystemBus, Target, options

log = logging.getLogger(__name__)

CLIENT = "treenail"
"""What rpm-ostree shows as the one who asked; the titles of our transactions begin with it."""

_NAME = "org.projectatomic.rpmostree1"
_SYSROOT = Target(_NAME, "/org/projectatomic/rpmostree1/Sysroot", f"{_NAME}.Sysroot")
_BUS = Target("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")

# The daemon loads and locks the sysroot within the call that makes a transaction.
_CALL_S = 300.0
_PEER_S = 60.0
_ATTEMPTS = 5


class Rpmostreed:
    """A client of rpm-ostreed. Raises `HostError` alone; to be used by one thread.

    Every operation registers this program as a client first, because rpm-ostreed exits when idle
    and forgets its clients; `release` lets it.
    """

    def __init__(
        self, bus: SystemBus, clock: Clock, limits: Limits, *, alive: Callable[[], None]
    ) -> None:
        """``alive`` is called once a second while a transaction runs that nobody watches."""
        self._bus = bus
        self._alive = alive
        self._clock = clock
        self._limits = limits
        self._registered = False

    def look(self) -> Deployments:
        """The deployments and the transaction that runs, as they are now."""
        self._register()
        # Properties follow a transaction with a delay; this makes them be read anew.
        self._bus.call(_SYSROOT, "Reload", timeout_s=_CALL_S)
        return _deployments(self._bus.properties(_SYSROOT, timeout_s=_PEER_S))

    def kernel_options(self, *, pending: bool) -> str:
        """The kernel's command line of the pending deployment if there is one, or of the booted."""
        self._register()
        found = self._bus.call(
            self._os(), "GetDeploymentBootConfig", "", pending, timeout_s=_CALL_S
        )
        text = found.get("options") if isinstance(found, dict) else None
        if not isinstance(text, str):
            raise HostError("rpm-ostree does not know the kernel arguments of this machine")
        return text

    def run(self, method: str, *arguments: object, watch: Watch | None = None) -> Ending:
        """Call the method, then start or join the transaction it answers, and see its end."""
        self._register()
        try:
            address = self._bus.call(self._os(), method, *arguments, timeout_s=_CALL_S)
            return self.follow(str(address), watch or self._patient, ours=True)
        except BusyError as error:
            raise self._why_busy(error) from error
        except BusError as error:
            if not error.name:
                # A transaction that is made but not started lasts while its caller is on the bus.
                self._bus.close()
            raise

    def follow(self, address: str, watch: Watch, *, ours: bool) -> Ending:
        """See the end of the transaction at the address; only ``ours`` is ever cancelled."""
        # Until every peer has hung up, the daemon takes no other transaction.
        with Peer(address, INTERFACE, timeout_s=_PEER_S) as peer:
            return follow(peer, watch, clock=self._clock, limits=self._limits, ours=ours)

    def end_ours(self, transaction: Transaction) -> bool:
        """End the transaction if it is one of this program; says whether it was."""
        with Peer(transaction.address, INTERFACE, timeout_s=_PEER_S) as peer:
            title = peer.properties(timeout_s=_PEER_S).get("Title")
            if not str(title).startswith(f"{CLIENT}: "):
                return False
            log.info("ending our transaction: %s", title)
            follow(peer, self._unwilling, clock=self._clock, limits=self._limits, ours=True)
            return True

    def naming(self, transaction: Transaction) -> str:
        """The transaction and who called it, for a message."""
        try:
            pid = self._bus.call(
                _BUS, "GetConnectionUnixProcessID", transaction.sender, timeout_s=_PEER_S
            )
        except BusError:
            return f"{transaction.method}, whose caller {transaction.sender} has left"
        return f"{transaction.method}, called by process {pid} ({transaction.sender})"

    def busy(self, transaction: Transaction) -> BusyError:
        """The error that the transaction is in the way."""
        return BusyError(
            f"rpm-ostree is busy with {self.naming(transaction)}", remedy="see: rpm-ostree status"
        )

    def release(self) -> None:
        """Let rpm-ostreed exit when idle; the next operation starts it again."""
        if not self._registered:
            return
        self._registered = False
        try:
            # Not told blindly, for that would start it.
            if self._bus.call(_BUS, "NameHasOwner", _NAME, timeout_s=_PEER_S):
                self._bus.call(_SYSROOT, "UnregisterClient", {}, timeout_s=_PEER_S)
        except BusError as error:
            log.warning("rpm-ostreed runs on for nothing: %s", error)

    def _register(self) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                client = options({"id": CLIENT})
                self._bus.call(_SYSROOT, "RegisterClient", client, timeout_s=_CALL_S)
            except BusError as error:
                # It was about to exit for idleness; asked again, the bus starts it anew.
                if error.name != NO_REPLY or attempt == _ATTEMPTS:
                    raise
            else:
                self._registered = True
                return

    def _os(self) -> Target:
        path = str(self._bus.call(_SYSROOT, "GetOS", "", timeout_s=_CALL_S))
        return Target(_NAME, path, f"{_NAME}.OS")

    def _patient(self, _: Progress) -> Verdict:
        self._alive()
        return Verdict.GO_ON

    def _unwilling(self, _: Progress) -> Verdict:
        self._alive()
        return Verdict.CANCEL

    def _why_busy(self, error: BusyError) -> BusyError:
        transaction = _deployments(self._bus.properties(_SYSROOT, timeout_s=_PEER_S)).transaction
        if transaction is not None:
            return self.busy(transaction)
        return BusyError(
            "another program, such as bootc or ostree, holds the sysroot",
            name=error.name,
            remedy="see: rpm-ostree status",
        )


def _deployments(properties: dict[str, object]) -> Deployments:
    found = properties.get("Deployments")
    each = found if isinstance(found, list) else []
    active = properties.get("ActiveTransaction")
    address = str(properties.get("ActiveTransactionPath") or "")
    transaction = None
    if isinstance(active, tuple) and address:
        transaction = Transaction(str(active[0]), str(active[1]), address)
    return Deployments(tuple(map(deployment, each)), transaction)


def check(ending: Ending, what: str) -> None:
    """Raise what became of an operation, ``what`` being its verb and object, unless it is done."""
    match ending:
        case Finished(success=True):
            return
        case Left():
            raise CancelledError(f"rpm-ostree goes on to {what}, and is not waited for any more")
        case Finished(text=text, cancelled=cancelled):
            if cancelled or "cancelled" in text.lower():
                raise CancelledError(f"rpm-ostree did not {what}: it was cancelled")
            raise TransactionError(
                f"rpm-ostree could not {what}: {text or 'it gave no reason'}",
                remedy=remedy_for(text, "see: journalctl -u rpm-ostreed"),
            )
        case Vanished():
            # Restarted perhaps, and back in a moment; no verdict on what was asked of it.
            raise BusError(
                f"rpm-ostree could not {what}: rpm-ostreed went away",
                remedy="see: journalctl -u rpm-ostreed",
            )
        case Overdue(why=why):
            raise TransactionError(
                f"rpm-ostree could not {what}: {why}", remedy="see: rpm-ostree status"
            )
        case _:
            assert_never(ending)
