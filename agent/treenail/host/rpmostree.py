"""rpm-ostree over D-Bus: deployments, and the transactions that change them."""

import logging
from collections.abc import Callable, Sequence
from typing import assert_never

from treenail.clock import Clock
from treenail.errors import BusError, BusyError, CancelledError, HostError, TransactionError
from treenail.host.bus import NO_REPLY, Option, Peer, SystemBus, Target, options
from treenail.host.deployments import (
    Change,
    Deployment,
    Deployments,
    Progress,
    Transaction,
    Verdict,
    deployment,
    digest_of,
)
from treenail.host.transaction import (
    INTERFACE,
    Ending,
    Finished,
    Left,
    Limits,
    Overdue,
    Vanished,
    Watch,
    follow,
)

log = logging.getLogger(__name__)

_NAME = "org.projectatomic.rpmostree1"
_SYSROOT = Target(_NAME, "/org/projectatomic/rpmostree1/Sysroot", f"{_NAME}.Sysroot")
_BUS = Target("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")
_CLIENT = "treenail"
_REGISTRY = "ostree-unverified-registry:"

# The daemon loads and locks the sysroot within the call that makes a transaction.
_CALL_S = 300.0
_PEER_S = 60.0
_ATTEMPTS = 5
_LIMITS = Limits()
_REMEDIES = (
    ("unauthorized", "check the pull secret for the image's registry"),
    ("authentication required", "check the pull secret for the image's registry"),
    ("denied", "check that the pull secret may read the image"),
    ("manifest unknown", "check that the registry has the image by this digest"),
    ("no such host", "check the name of the registry and this node's DNS"),
    ("no space left", "free space in /sysroot and /boot"),
    ("inhibitor", "see who holds it with: systemd-inhibit --list"),
)


class RpmOstree:
    """The deployments of this machine. Raises `HostError` alone; to be used by one thread.

    Every operation registers this program as a client first, because rpm-ostreed exits when idle
    and forgets its clients; `release` lets it.
    """

    def __init__(
        self,
        bus: SystemBus,
        clock: Clock,
        limits: Limits = _LIMITS,
        *,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """``alive`` is called once a second while a transaction runs that nobody watches."""
        self._bus = bus
        self._alive = alive
        self._clock = clock
        self._limits = limits
        self._registered = False

    @property
    def name(self) -> str:
        """What drives the deployments, for people."""
        return "rpm-ostree"

    def look(self) -> Deployments:
        """The deployments and the transaction that runs, as they are now."""
        self._register()
        # Properties follow a transaction with a delay; this makes them be read anew.
        self._bus.call(_SYSROOT, "Reload", timeout_s=_CALL_S)
        return _deployments(self._bus.properties(_SYSROOT, timeout_s=_PEER_S))

    def stage(self, change: Change, *, watch: Watch) -> None:
        """Return once the change is staged and locked; at once when it already is.

        A transaction that already stages it is joined, whoever started it.

        Raises `HostError` when another deployment is pending, for the new one would be derived
        from that; `BusyError` when another transaction runs; `TransactionError`; `CancelledError`,
        also when the watcher said to leave, and the transaction runs on.
        """
        image = change.image
        if change != Change(image=image):
            raise HostError("kernel arguments and packages can't be staged yet")
        found = self.look()
        if found.transaction is None and found.pending is not None:
            if _is(found.pending, image) and found.pending.locked:
                log.info("%s is staged already", image)
                return
            raise HostError(
                f"can't stage {image}: {found.pending.image or found.pending.id} is pending"
                f"{', staged and not locked' if found.pending.staged else ''}",
                remedy="drop what is pending with: rpm-ostree cleanup --pending",
            )
        ending = self._run(
            "UpdateDeployment",
            options({"set-refspec": _REGISTRY + image}),
            options({
                "lock-finalization": True,
                "skip-purge": True,
                "initiating-command-line": f"{_CLIENT}: stage {image}",
            }),
            watch=watch,
        )  # fmt: skip
        _check(ending, f"stage {image}")

    def wait_for_other(self, *, watch: Watch) -> None:
        """Return once the transaction that runs has ended, however; or the watcher wants no more.

        Raises `BusyError` when it exceeds the limits; it is never cancelled.
        """
        transaction = self.look().transaction
        if transaction is None:
            return
        try:
            ending = self._follow(transaction.address, watch, ours=False)
        except BusError:
            if self.look().transaction == transaction:
                raise
            return
        match ending:
            case Finished() | Left() | Vanished():
                log.info("waited for %s, called by another", transaction.method)
            case Overdue(why=why):
                raise BusyError(
                    f"rpm-ostree is busy with {self._naming(transaction)}: {why}",
                    remedy="see: rpm-ostree status; to end it: rpm-ostree cancel",
                )
            case _:
                assert_never(ending)

    def drop(self, staged_id: str) -> None:
        """End our own transaction, and drop what is pending if it has this id, or came of that.

        Harmless when there is nothing; what others staged is left to them.
        """
        found = self.look()
        ours = {staged_id}
        if found.transaction is not None:
            try:
                ended = self._end_ours(found.transaction)
            except BusError as error:
                log.info("not ended, as it may be over: %s", error)
                ended = False
            before, found = found, self.look()
            if ended and before.pending is None and found.pending is not None:
                ours.add(found.pending.id)
        if found.pending is not None and found.pending.id in ours:
            _check(self._run("Cleanup", ["pending-deploy"]), "drop the pending deployment")

    def finalize(self, staged_id: str) -> None:
        """Unlock the staged deployment of this id, and have rpm-ostreed reboot.

        Refused when another is staged, or when a block inhibitor forbids the shutdown.
        """
        staged = self.look().staged
        if staged is None or staged.id != staged_id:
            raise HostError(
                f"can't reboot into {staged_id}: {staged.id if staged else 'nothing'} is staged",
                remedy="see: rpm-ostree status",
            )
        what = staged.image or staged.id
        given: dict[str, Option] = {
            "checksum": staged.digest or staged.checksum,
            # Else one that was killed between unlocking and rebooting could not do it again.
            "allow-unlocked": True,
            "initiating-command-line": f"{_CLIENT}: reboot into {what}",
        }
        _check(self._run("FinalizeDeployment", options(given)), f"reboot into {what}")

    def roll_back(self) -> None:
        """Make the previous deployment the default, and return; nothing reboots.

        What is staged is dropped, whoever staged it, for the shutdown would make it the default
        again. Repeatable: when the previous one is the default already, nothing is done.
        """
        found = self.look()
        if found.staged is not None:
            log.warning("dropping %s, which is staged, to roll back", found.staged.id)
            _check(self._run("Cleanup", ["pending-deploy"]), "drop the pending deployment")
            found = self.look()
        if found.pending is not None:
            # Asked again, rpm-ostree would put the booted one back on top.
            log.info("%s is the default already", found.pending.id)
            return
        if found.rollback is None:
            raise HostError("there is no previous deployment to go back to")
        given: dict[str, Option] = {"initiating-command-line": f"{_CLIENT}: roll back"}
        _check(self._run("Rollback", options(given)), "roll back")

    def kernel_args(self, *, pending: bool) -> str:
        """The kernel arguments of the pending deployment, or else of the booted one."""
        self._register()
        booted = self._os()
        found = self._bus.call(booted, "GetDeploymentBootConfig", "", pending, timeout_s=_CALL_S)
        text = found.get("options") if isinstance(found, dict) else None
        if not isinstance(text, str):
            raise HostError("rpm-ostree does not know the kernel arguments of this machine")
        return text

    def set_kernel_args(
        self,
        existing: str,
        append: Sequence[str],
        delete: Sequence[str],
        *,
        watch: Watch,
    ) -> None:
        """Stage, locked, a deployment with these arguments; repeatable, and raises as `stage`.

        The result is made of ``existing``: take it from `kernel_args` right before.
        """
        given: dict[str, Option] = {
            "append-if-missing": append,
            "delete-if-present": delete,
            "lock-finalization": True,
            "initiating-command-line": f"{_CLIENT}: kernel arguments",
        }
        nothing: list[str] = []
        ending = self._run(
            "KernelArgs", existing, nothing, nothing, nothing, options(given), watch=watch
        )
        _check(ending, "set the kernel arguments")

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
                client = options({"id": _CLIENT})
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

    def _run(self, method: str, *arguments: object, watch: Watch | None = None) -> Ending:
        self._register()
        try:
            address = self._bus.call(self._os(), method, *arguments, timeout_s=_CALL_S)
            return self._follow(str(address), watch or self._patient, ours=True)
        except BusyError as error:
            raise self._busy(error) from error
        except BusError as error:
            if not error.name:
                # A transaction that is made but not started lasts while its caller is on the bus.
                self._bus.close()
            raise

    def _follow(self, address: str, watch: Watch, *, ours: bool) -> Ending:
        # Until every peer has hung up, the daemon takes no other transaction.
        with Peer(address, INTERFACE, timeout_s=_PEER_S) as peer:
            return follow(peer, watch, clock=self._clock, limits=self._limits, ours=ours)

    def _end_ours(self, transaction: Transaction) -> bool:
        with Peer(transaction.address, INTERFACE, timeout_s=_PEER_S) as peer:
            title = peer.properties(timeout_s=_PEER_S).get("Title")
            if not str(title).startswith(f"{_CLIENT}: "):
                return False
            log.info("ending our transaction: %s", title)
            follow(peer, self._unwilling, clock=self._clock, limits=self._limits, ours=True)
            return True

    def _patient(self, _: Progress) -> Verdict:
        self._alive()
        return Verdict.GO_ON

    def _unwilling(self, _: Progress) -> Verdict:
        self._alive()
        return Verdict.CANCEL

    def _busy(self, error: BusyError) -> BusyError:
        transaction = _deployments(self._bus.properties(_SYSROOT, timeout_s=_PEER_S)).transaction
        if transaction is None:
            text = "another program, such as bootc or ostree, holds the sysroot"
        else:
            text = f"rpm-ostree is busy with {self._naming(transaction)}"
        return BusyError(text, name=error.name, remedy="see: rpm-ostree status")

    def _naming(self, transaction: Transaction) -> str:
        try:
            pid = self._bus.call(
                _BUS, "GetConnectionUnixProcessID", transaction.sender, timeout_s=_PEER_S
            )
        except BusError:
            return f"{transaction.method}, whose caller {transaction.sender} has left"
        return f"{transaction.method}, called by process {pid} ({transaction.sender})"


def _deployments(properties: dict[str, object]) -> Deployments:
    found = properties.get("Deployments")
    each = found if isinstance(found, list) else []
    active = properties.get("ActiveTransaction")
    address = str(properties.get("ActiveTransactionPath") or "")
    transaction = None
    if isinstance(active, tuple) and address:
        transaction = Transaction(str(active[0]), str(active[1]), address)
    return Deployments(tuple(map(deployment, each)), transaction)


def _is(staged: Deployment, image: str) -> bool:
    digest = digest_of(image)
    return staged.digest == digest if digest else staged.image == image


def _check(ending: Ending, what: str) -> None:
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
                remedy=_remedy(text),
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


def _remedy(text: str) -> str:
    lowered = text.lower()
    known = (remedy for sign, remedy in _REMEDIES if sign in lowered)
    return next(known, "see: journalctl -u rpm-ostreed")
