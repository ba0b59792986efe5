"""The operating system by rpm-ostree over D-Bus: what is deployed, and changing it in one go."""

import logging
from collections.abc import Callable
from typing import assert_never

from treenail.clock import Clock
from treenail.errors import BusError, BusyError, HostError, TransactionError
from treenail.host.ostree.deployments import Change, Deployment, Deployments
from treenail.host.ostree.watch import Limits, Watch
from treenail.host.rpmostree.client import CLIENT, Rpmostreed, check
from treenail.host.rpmostree.expected import Intended, intended
from treenail.host.rpmostree.extensions import Extensions
from treenail.host.rpmostree.transaction import Finished, Left, Overdue, Vanished
from treenail.host.system.kernel_arguments import edit, split_arguments, stand
from treenail.host.system.reservation import Reserve
from treenail.host.systemd.bus import Option, SystemBus, options

log = logging.getLogger(__name__)

_REGISTRY = "ostree-unverified-registry:"
_SIGNED = "ostree-image-signed:docker://"
_LIMITS = Limits()
_STATUS = "see: rpm-ostree status"
_REBOOTING = "Reboot initiated"
_ANOTHER_CHECKSUM = "expected staged base checksum"


class RpmOstree:
    """The deployments of this machine. Raises `HostError` alone; to be used by one thread."""

    def __init__(
        self,
        bus: SystemBus,
        clock: Clock,
        limits: Limits = _LIMITS,
        *,
        alive: Callable[[], None] = lambda: None,
        verifies: Callable[[str], bool] = lambda _: False,
        unlock: Callable[[], None] | None = None,
        extensions: Extensions | None = None,
        reserve: Reserve | None = None,
    ) -> None:
        """``alive`` is called once a second while a transaction runs that nobody watches.

        ``unlock`` unlocks what is staged and does not reboot, as rpm-ostreed would.

        ``verifies`` says whether an image is to be taken with a good signature alone. Without
        ``extensions`` no packages come out of an image. ``reserve`` is kept from the reboot on for
        the way back.
        """
        self._extensions = extensions
        self._reserve = reserve
        self._verifies = verifies
        self._unlock = unlock
        self._daemon = Rpmostreed(bus, clock, limits, alive=alive)

    @property
    def name(self) -> str:
        """What drives the deployments, for people."""
        return "rpm-ostree"

    def look(self) -> Deployments:
        """The deployments and the transaction that runs, as they are now."""
        return self._daemon.look()

    def stage(self, change: Change, *, watch: Watch) -> None:
        """Return once all of the change is staged in one deployment, and locked.

        Image and packages are one transaction, kernel arguments another one on what that staged;
        one that was cut short between the two is taken up, and one that runs is joined, whoever
        started it. Nothing is done when it is all staged, or booted, already. What was staged is
        compared with what was asked, and dropped if it is something else.

        Raises `HostError` when another deployment is pending, for the new one would be derived
        from that; `BusyError` when another transaction runs; `TransactionError`; `CancelledError`,
        also when the watcher said to leave, and the transaction runs on.
        """
        found = self.look()
        booted = found.booted
        if booted is None:
            raise HostError("rpm-ostree does not know which deployment is booted", remedy=_STATUS)
        goal = intended(booted, change)
        self._refuse_other(found, goal, change)
        try:
            if goal.differences(found.pending or booted):
                if change.packages_from and found.transaction is None:
                    self._offer(change.packages_from, watch)
                self._update(change, booted, watch)
        finally:
            self._withdraw()
        self._arrange(change, watch)
        self._verify(goal, change)

    def wait_for_other(self, *, watch: Watch) -> bool:
        """Return once the transaction that runs has ended, however; or the watcher wants no more.

        False when none runs. Raises `BusyError` when it exceeds the limits; it is never cancelled.
        """
        transaction = self.look().transaction
        if transaction is None:
            return False
        try:
            ending = self._daemon.follow(transaction.address, watch, ours=False)
        except BusError:
            if self.look().transaction == transaction:
                raise
            return True
        match ending:
            case Finished() | Left() | Vanished():
                log.info("waited for %s, called by another", transaction.method)
                return True
            case Overdue(why=why):
                raise BusyError(
                    f"rpm-ostree is busy with {self._daemon.naming(transaction)}: {why}",
                    remedy=f"{_STATUS}; to end it: rpm-ostree cancel",
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
                ended = self._daemon.end_ours(found.transaction)
            except BusError as error:
                log.info("not ended, as it may be over: %s", error)
                ended = False
            before, found = found, self.look()
            if ended and before.pending is None and found.pending is not None:
                ours.add(found.pending.id)
        if found.pending is not None and found.pending.id in ours:
            self._clean_up()
        self._withdraw()

    def finalize(self, staged_id: str, *, softly: bool = False) -> None:
        """Unlock the staged deployment of this id, and have rpm-ostreed reboot unless ``softly``.

        Refused when another is staged, or when a block inhibitor forbids the shutdown. Nothing is
        done when that reboot is under way already.
        """
        staged = self.look().staged
        if staged is None or staged.id != staged_id:
            raise HostError(
                f"can't reboot into {staged_id}: {staged.id if staged else 'nothing'} is staged",
                remedy=_STATUS,
            )
        if self._reserve is not None:
            self._reserve.keep()
        if softly and self._unlock is not None:
            self._unlock_gently(staged, self._unlock)
            return
        # The daemon compares the manifest's digest; before it knew images by that, the commit of
        # the image, without the packages on it.
        for known_as in filter(None, (staged.digest, staged.base)):
            try:
                self._finalize(known_as, staged.image or staged.id)
            except TransactionError as error:
                if known_as == staged.base or _ANOTHER_CHECKSUM not in str(error).lower():
                    raise
            else:
                return

    def roll_back(self) -> None:
        """Make the previous deployment the default, and return; nothing reboots.

        What is staged is dropped, whoever staged it, for the shutdown would make it the default
        again. Repeatable: when the previous one is the default already, nothing is done.
        """
        if self._reserve is not None:
            self._reserve.let_go()
        found = self.look()
        if found.staged is not None:
            log.warning("dropping %s, which is staged, to roll back", found.staged.id)
            self._clean_up()
            found = self.look()
        if found.pending is not None:
            # Asked again, rpm-ostree would put the booted one back on top.
            log.info("%s is the default already", found.pending.id)
            return
        if found.rollback is None:
            raise HostError("there is no previous deployment to go back to", remedy=_STATUS)
        given: dict[str, Option] = {"initiating-command-line": f"{CLIENT}: roll back"}
        check(self._daemon.run("Rollback", options(given)), "roll back")

    def release(self) -> None:
        """Let rpm-ostreed exit when idle; the next operation starts it again."""
        self._withdraw()
        self._daemon.release()

    def _refuse_other(self, found: Deployments, goal: Intended, change: Change) -> None:
        """Raise if what is pending is nothing that this change was about to stage."""
        pending = found.pending
        if pending is None:
            return
        differences = goal.differences(pending)
        if found.transaction is not None:
            if differences:
                raise self._daemon.busy(found.transaction)
            return
        if pending.staged and not pending.locked:
            differences += ("is staged and not locked",)
        if differences:
            raise HostError(
                f"can't stage {change}: {pending.image or pending.id} is pending; "
                f"it {', and it '.join(differences)}",
                remedy="drop what is pending with: rpm-ostree cleanup --pending",
            )

    def _offer(self, image: str, watch: Watch) -> None:
        if self._extensions is None:
            raise HostError(f"nobody here can unpack packages from {image}")
        self._extensions.offer(image, watch=watch)

    def _withdraw(self) -> None:
        """Packages that were offered are so no more, unless a transaction may need them."""
        extensions = self._extensions
        if extensions is not None and extensions.offered and self.look().transaction is None:
            extensions.withdraw()

    def _update(self, change: Change, booted: Deployment, watch: Watch) -> None:
        """Stage image and packages; the same call for the same change, so that it can be joined."""
        modifiers: dict[str, Option] = {
            "install-packages": [each for each in change.install if each not in booted.packages],
            "uninstall-packages": [each for each in change.uninstall if each in booted.packages],
            "override-remove-packages": [x for x in change.remove if x not in booted.removed],
            "override-reset-packages": [each for each in change.reset if each in booted.removed],
        }
        modifiers = {key: names for key, names in modifiers.items() if names}
        given: dict[str, Option] = {
            "lock-finalization": True,
            "initiating-command-line": f"{CLIENT}: stage {change}",
        }
        if modifiers:
            given["idempotent-layering"] = True
        # rpm-ostree refuses to rebase to what it is at.
        if change.image and intended(booted, Change(change.image)).differences(booted):
            scheme = _SIGNED if self._verifies(change.image) else _REGISTRY
            modifiers["set-refspec"] = scheme + change.image
            given["skip-purge"] = True
        else:
            given["no-pull-base"] = True
        check(
            self._daemon.run("UpdateDeployment", options(modifiers), options(given), watch=watch),
            f"stage {change}",
        )

    def _arrange(self, change: Change, watch: Watch) -> None:
        """Stage the pending deployment, or else the booted one, with the kernel arguments."""
        # What is not in here is taken away: it has to be as of now, and of that deployment.
        existing = self._daemon.kernel_options(pending=True)
        removed, added = edit(split_arguments(existing), change.append, change.delete)
        if not removed and not added:
            return
        given: dict[str, Option] = {
            "lock-finalization": True,
            "initiating-command-line": f"{CLIENT}: stage {change}",
        }
        replaced: list[str] = []
        ending = self._daemon.run(
            "KernelArgs",
            existing,
            list(added),
            replaced,
            list(removed),
            options(given),
            watch=watch,
        )
        check(ending, f"stage {change}")

    def _verify(self, goal: Intended, change: Change) -> None:
        """Log what is staged; raise, with nothing left, if it is not what was asked for."""
        found = self.look()
        there = found.pending or found.booted
        if there is None:
            raise HostError("rpm-ostree does not know its deployments any more", remedy=_STATUS)
        differences = goal.differences(there)
        arguments = split_arguments(self._daemon.kernel_options(pending=True))
        if not stand(arguments, change.append, change.delete):
            differences += (f"has the kernel arguments {' '.join(arguments)}",)
        if there is found.pending and not there.locked:
            differences += ("is not locked",)
        if not differences:
            log.info("%s %s", there.id, "is staged" if there.staged else "is as asked for already")
            return
        if there is found.pending:
            self._clean_up()
        raise TransactionError(
            f"rpm-ostree did not stage {change}: it {', and it '.join(differences)}",
            remedy="see: journalctl -u rpm-ostreed",
        )

    def _unlock_gently(self, staged: Deployment, unlock: Callable[[], None]) -> None:
        if staged.locked:
            unlock()
        found = self.look().staged
        if found is None or found.locked:
            raise TransactionError(
                f"ostree did not unlock {staged.id}",
                remedy='set reboot = "full" in agent.toml',
            )

    def _finalize(self, checksum: str, what: str) -> None:
        given: dict[str, Option] = {
            "checksum": checksum,
            # Else one that was killed between unlocking and rebooting could not do it again.
            "allow-unlocked": True,
            "initiating-command-line": f"{CLIENT}: reboot into {what}",
        }
        try:
            ending = self._daemon.run("FinalizeDeployment", options(given))
        except BusError as error:
            if _REBOOTING not in str(error):
                raise
            log.info("rpm-ostree is about to reboot already")
            return
        check(ending, f"reboot into {what}")

    def _clean_up(self) -> None:
        check(self._daemon.run("Cleanup", ["pending-deploy"]), "drop the pending deployment")
