"""The back end for rpm-ostree over D-Bus: reads, stages, finalizes and rolls back deployments.

After a change is staged, it compares the deployment with the expected one.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, assert_never

from treenail import deployment_change, errors
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.ostree import admin, deployments, sysroot
from treenail.host.rpmostree import client
from treenail.host.systemd import system_bus

if TYPE_CHECKING:
    from treenail.host.rpmostree.extensions import ExtensionsRepository


log = logging.getLogger(__name__)

# The schemes of ostree-ext. The second one demands a containers-policy.json(5) whose default is not
# insecureAcceptAnything.
_REGISTRY = "ostree-unverified-registry:"
_SIGNED = "ostree-image-signed:docker://"
_STATUS_REMEDY = "see: rpm-ostree status"
# The text with which rpm-ostreed refuses all calls once a transaction has requested the reboot.
_REBOOT_INITIATED = "Reboot initiated"
_CHECKSUM_MISMATCH = "expected staged base checksum"


@dataclass(frozen=True, slots=True)
class ExpectedDeployment:
    """The properties that a `DeploymentChange` sets, except kernel arguments."""

    image: str
    digest: str
    base_checksum: str
    """The commit of the image, where there is neither a digest nor a name."""
    packages: frozenset[str]
    removed_packages: frozenset[str]

    def list_differences(self, deployment: deployments.OstreeDeployment) -> tuple[str, ...]:
        """Return the differences of the deployment, as ends of a sentence after ``it``."""
        layered, removed = {*deployment.requested_packages}, {*deployment.requested_base_removals}
        is_other = not self._has_same_image(deployment)
        return (
            *((f"is of {_describe_origin(deployment)}, not {self._origin}",) if is_other else ()),
            *_format_difference("lacks", self.packages - layered),
            *_format_difference("has", layered - self.packages),
            *_format_difference("has not left out", self.removed_packages - removed),
            *_format_difference("has left out", removed - self.removed_packages),
        )

    @property
    def _origin(self) -> str:
        return self.image or self.digest or self.base_checksum

    def _has_same_image(self, deployment: deployments.OstreeDeployment) -> bool:
        if self.digest:
            return deployment.has_image(self.digest)
        return (
            deployment.image == self.image
            if self.image
            else deployment.base_checksum == self.base_checksum
        )


def compute_expected(
    booted: deployments.OstreeDeployment, change: deployment_change.DeploymentChange
) -> ExpectedDeployment:
    """Return the deployment that the change derives from the booted one."""
    return ExpectedDeployment(
        image=change.image or booted.image,
        digest=deployments.parse_digest(change.image) if change.image else booted.digest,
        base_checksum=booted.base_checksum,
        packages=frozenset(booted.requested_packages) - {*change.uninstall_packages}
        | {*change.install_packages},
        removed_packages=frozenset(booted.requested_base_removals) - {*change.override_reset}
        | {*change.override_remove},
    )


def _describe_origin(deployment: deployments.OstreeDeployment) -> str:
    return deployment.image or deployment.origin or deployment.base_checksum


def _format_difference(verb: str, names: Iterable[str]) -> tuple[str, ...]:
    ordered = sorted(names)
    return (f"{verb} {', '.join(ordered)}",) if ordered else ()


class RpmOstreeBackend:
    """The deployments of a host with rpm-ostree. Raises only `HostError`; for one thread."""

    def __init__(
        self,
        machine: Machine,
        *,
        needs_signature: Callable[[str], bool] = lambda _image: False,
    ) -> None:
        """``needs_signature`` returns whether an image must have a valid signature."""
        self._machine = machine
        self._needs_signature = needs_signature
        self._client = client.RpmOstreeClient(
            machine.bus, machine.clock, machine.limits, heartbeat=machine.heartbeat
        )

    @property
    def name(self) -> str:
        """The name of the back end in messages."""
        return "rpm-ostree"

    @cached_property
    def _extensions(self) -> "ExtensionsRepository":
        # Import late: a command that only reads deployments needs neither podman nor SELinux.
        from treenail.host.rpmostree.extensions import ExtensionsRepository  # noqa: PLC0415

        machine = self._machine
        return ExtensionsRepository(
            machine.root,
            machine.labelled_files,
            machine.podman,
            machine.transient_units,
            machine.jobs,
            timeout_s=machine.limits.transaction_s,
        )

    def read_deployments(self) -> deployments.DeploymentStatus:
        """Read the deployments and the running transaction from rpm-ostreed."""
        status = self._client.read_deployments()
        if status.staged is None or status.staged.is_locked:
            return status
        is_locked = sysroot.is_staged_locked(self._machine.root)
        return replace(
            status,
            in_boot_order=tuple(
                replace(deployment, is_locked=is_locked) if deployment.is_staged else deployment
                for deployment in status.in_boot_order
            ),
        )

    def stage_deployment(
        self, change: deployment_change.DeploymentChange, *, watch: deployments.TransactionWatch
    ) -> None:
        """Stage all of the change in one locked deployment.

        Image and packages are one transaction, kernel arguments a second one on its result. A call
        after an interruption continues between the two, and joins the same transaction if it runs.
        A change that is staged or booted already needs no transaction. The staged deployment is
        compared with the change, and dropped if it differs.

        Raises `HostError` when another deployment is pending, because rpm-ostree would derive the
        new one from it; `BusyError` when another transaction runs; `TransactionError`;
        `CancelledError`, also when the watcher detached and the transaction continues.
        """
        status = self.read_deployments()
        booted = status.booted
        if booted is None:
            raise errors.HostError(
                "rpm-ostree does not know which deployment is booted", remedy=_STATUS_REMEDY
            )
        expected = compute_expected(booted, change)
        self._refuse_other_pending(status, expected, change)
        try:
            if expected.list_differences(status.pending or booted):
                if change.extensions_image and status.transaction is None:
                    self._extensions.offer_packages(change.extensions_image, watch=watch)
                with self._dropping_failed_result(expected):
                    self._update_deployment(change, booted, watch)
        finally:
            self._withdraw_packages()
        with self._dropping_failed_result(expected):
            self._set_kernel_arguments(change, watch)
        self._verify_staged(expected, change)

    @contextmanager
    def open_staged_tree(self, staged_id: str, paths: Sequence[str]) -> Iterator[Root]:  # noqa: ARG002  # bootc needs them
        """Open the tree of the staged deployment with this ID; raise `HostError` without it."""
        staged = self.read_deployments().staged
        if staged is None or staged.id != staged_id:
            raise errors.HostError(
                f"cannot read the content of {staged_id}: it is no longer staged",
                remedy=_STATUS_REMEDY,
            )
        yield sysroot.open_deployment_tree(self._machine.root, staged)

    def wait_for_other_transaction(self, *, watch: deployments.TransactionWatch) -> bool:
        """Wait until the running transaction has ended or the watcher detaches; return True.

        Return False when none runs. Raises `BusyError` when it exceeds the limits; the transaction
        is never cancelled.
        """
        transaction = self.read_deployments().transaction
        if transaction is None:
            return False
        try:
            outcome = self._client.follow_transaction(transaction.address, watch, is_ours=False)
        except errors.BusError:
            # It may have ended before this connection to its socket.
            if self.read_deployments().transaction == transaction:
                raise
            return True
        match outcome:
            case (
                client.TransactionFinished()
                | client.TransactionDetached()
                | client.TransactionLost()
            ):
                log.info("waited for %s of another client", transaction.method)
                return True
            case client.TransactionTimedOut(reason=reason):
                description = self._client.describe_transaction(transaction)
                raise errors.BusyError(
                    f"rpm-ostree is busy with {description}: {reason}",
                    remedy=f"{_STATUS_REMEDY}; to end it: rpm-ostree cancel",
                )
            case _:
                assert_never(outcome)

    def read_finalization_error(self) -> str:
        """Return why ostree did not finalize a deployment at the last shutdown; empty if it did."""
        return self._machine.journal.read_previous_boot_error(admin.FINALIZE_UNIT)

    def drop_staged(self, staged_id: str) -> None:
        """Cancel our own transaction, and drop the pending deployment with this ID or its result.

        Idempotent. Deployments that another client staged stay.
        """
        status = self.read_deployments()
        ours = {staged_id}
        if status.transaction is not None:
            try:
                was_ours = self._client.cancel_own_transaction(status.transaction)
            except errors.BusError as error:
                log.info("did not cancel the transaction, it may have ended: %s", error)
                was_ours = False
            before, status = status, self.read_deployments()
            # It may have staged its deployment before the cancellation arrived.
            if was_ours and before.pending is None and status.pending is not None:
                ours.add(status.pending.id)
        if status.pending is not None and status.pending.id in ours:
            self._drop_pending()
        self._withdraw_packages()

    def finalize_staged(self, staged_id: str, *, is_soft: bool = False) -> None:
        """Unlock the staged deployment with this ID; rpm-ostreed reboots unless ``is_soft``.

        Raises `HostError` when another deployment is staged, or when a block inhibitor forbids the
        shutdown. Idempotent while that reboot is in progress.
        """
        staged = self.read_deployments().staged
        if staged is None or staged.id != staged_id:
            raise errors.HostError(
                f"cannot reboot into {staged_id}: {staged.id if staged else 'nothing'} is staged",
                remedy=_STATUS_REMEDY,
            )
        self._machine.reservation.reserve_space()
        if is_soft:
            self._unlock_for_soft_reboot(staged)
            return
        # FinalizeDeployment compares the manifest digest; older versions of rpm-ostreed compare the
        # base commit, without layered packages.
        for checksum in filter(None, (staged.digest, staged.base_checksum)):
            try:
                self._finalize_deployment(checksum, staged.image or staged.id)
            except errors.TransactionError as error:
                if checksum == staged.base_checksum or _CHECKSUM_MISMATCH not in str(error).lower():
                    raise
            else:
                return

    def roll_back(self) -> None:
        """Make the previous deployment the default; nothing reboots.

        A staged deployment is dropped whichever client staged it: the shutdown would make it the
        default again. Idempotent.
        """
        self._machine.reservation.release_space()
        status = self.read_deployments()
        if status.staged is not None:
            log.warning("dropping staged %s to roll back", status.staged.id)
            self._drop_pending()
            status = self.read_deployments()
        if status.pending is not None:
            # A second Rollback would make the booted deployment the default again.
            log.info("%s is the default already", status.pending.id)
            return
        if status.rollback is None:
            raise errors.HostError(
                "cannot roll back: there is no previous deployment", remedy=_STATUS_REMEDY
            )
        options: dict[str, system_bus.BusOption] = {
            # This text becomes the Title of the transaction, by which an agent recognizes its own.
            "initiating-command-line": f"{client.CLIENT}: roll back"
        }
        client.check_outcome(
            self._client.run_transaction("Rollback", system_bus.make_options(options)), "roll back"
        )

    def release_daemon(self) -> None:
        """Let rpm-ostreed exit when idle; the next operation starts it again."""
        self._withdraw_packages()
        self._client.unregister_client()

    def _refuse_other_pending(
        self,
        status: deployments.DeploymentStatus,
        expected: ExpectedDeployment,
        change: deployment_change.DeploymentChange,
    ) -> None:
        """Raise `HostError` if the pending deployment differs from the one to stage."""
        pending = status.pending
        if pending is None:
            return
        differences = expected.list_differences(pending)
        if status.transaction is not None:
            if differences:
                raise self._client.make_busy_error(status.transaction)
            return
        if pending.is_staged and not pending.is_locked:
            differences += ("is staged and not locked",)
        if differences:
            raise errors.HostError(
                f"cannot stage {change}: {pending.image or pending.id} is pending; "
                f"it {', and it '.join(differences)}",
                remedy="drop it with: rpm-ostree cleanup --pending",
            )

    def _withdraw_packages(self) -> None:
        """Remove the offered packages, unless a running transaction may read them."""
        if self._extensions.is_offered and self.read_deployments().transaction is None:
            self._extensions.withdraw_packages()

    def _update_deployment(
        self,
        change: deployment_change.DeploymentChange,
        booted: deployments.OstreeDeployment,
        watch: deployments.TransactionWatch,
    ) -> None:
        """Stage image and packages; equal changes make equal calls, which rpm-ostreed can join."""
        # rpm-ostreed ignores an unknown key, and a value of another type than it expects, without
        # an error.
        layered, removed = booted.requested_packages, booted.requested_base_removals
        modifiers: dict[str, system_bus.BusOption] = {
            "install-packages": [n for n in change.install_packages if n not in layered],
            "uninstall-packages": [n for n in change.uninstall_packages if n in layered],
            "override-remove-packages": [n for n in change.override_remove if n not in removed],
            "override-reset-packages": [n for n in change.override_reset if n in removed],
        }
        modifiers = {key: names for key, names in modifiers.items() if names}
        options: dict[str, system_bus.BusOption] = {
            "lock-finalization": True,
            "initiating-command-line": f"{client.CLIENT}: stage {change}",
        }
        if modifiers:
            # As rpm-ostree install --idempotent: a package that is requested already is no error
            # (rpm-ostree(1)).
            options["idempotent-layering"] = True
        # rpm-ostree refuses to rebase to the booted image.
        if change.image and compute_expected(
            booted, deployment_change.DeploymentChange(change.image)
        ).list_differences(booted):
            scheme = _SIGNED if self._needs_signature(change.image) else _REGISTRY
            modifiers["set-refspec"] = scheme + change.image
            # As rpm-ostree rebase --skip-purge: keep the refspec of the booted image
            # (rpm-ostree(1)).
            options["skip-purge"] = True
        else:
            # Otherwise it would also look for a newer image. rpm-ostreed rejects the option with a
            # refspec.
            options["no-pull-base"] = True
        client.check_outcome(
            self._client.run_transaction(
                "UpdateDeployment",
                system_bus.make_options(modifiers),
                system_bus.make_options(options),
                watch=watch,
            ),
            f"stage {change}",
        )

    def _set_kernel_arguments(
        self, change: deployment_change.DeploymentChange, watch: deployments.TransactionWatch
    ) -> None:
        """Stage the pending deployment, or else the booted one, with the kernel arguments."""
        # KernelArgs replaces the whole command line: start from that of the pending deployment.
        existing = self._client.read_kernel_options(is_pending=True)
        arguments = deployment_change.split_arguments(existing)
        if deployment_change.is_applied(arguments, change):
            return
        changed = deployment_change.apply_edit(arguments, change)
        options: dict[str, system_bus.BusOption] = {
            "lock-finalization": True,
            "initiating-command-line": f"{client.CLIENT}: stage {change}",
            # As rpm-ostree kargs --editor. Its removal takes the first of equal arguments, which
            # belongs to the machine (ostree_kernel_args_delete in ostree-kernel-args.c).
            "final-kernel-args": " ".join(changed),
        }
        nothing: list[str] = []
        outcome = self._client.run_transaction(
            "KernelArgs",
            existing,
            nothing,
            nothing,
            nothing,
            system_bus.make_options(options),
            watch=watch,
        )
        client.check_outcome(outcome, f"stage {change}")

    @contextmanager
    def _dropping_failed_result(self, expected: ExpectedDeployment) -> Iterator[None]:
        """Drop the deployment that our transaction staged before it failed.

        rpm-ostreed runs /usr/bin/true of the new tree only after it staged the tree
        (rpmostree-sysroot-upgrader.cxx). The next call would take it for the complete change.
        """
        before = self.read_deployments().pending
        try:
            yield
        except (errors.TransactionError, errors.CancelledError):
            self._drop_failed(expected, before)
            raise

    def _drop_failed(
        self, expected: ExpectedDeployment, before: deployments.OstreeDeployment | None
    ) -> None:
        try:
            status = self.read_deployments()
            pending = status.pending
            if (
                status.transaction is not None
                or pending is None
                or expected.list_differences(pending)
            ):
                return
            if before is None or pending.id != before.id:
                log.warning("dropping %s: rpm-ostree failed after it staged it", pending.id)
                self._drop_pending()
        except errors.HostError as error:
            log.warning("cannot drop the result of the failed transaction: %s", error)

    def _verify_staged(
        self, expected: ExpectedDeployment, change: deployment_change.DeploymentChange
    ) -> None:
        """Log the staged deployment; drop it and raise if it differs from the change."""
        status = self.read_deployments()
        deployment = status.pending or status.booted
        if deployment is None:
            raise errors.HostError(
                "rpm-ostree reports neither a pending nor a booted deployment",
                remedy=_STATUS_REMEDY,
            )
        differences = expected.list_differences(deployment)
        arguments = deployment_change.split_arguments(
            self._client.read_kernel_options(is_pending=True)
        )
        if not deployment_change.is_applied(arguments, change):
            differences += (f"has the kernel arguments {' '.join(arguments)}",)
        if deployment is status.pending and not deployment.is_locked:
            differences += ("is not locked",)
        if not differences:
            log.info(
                "%s %s",
                deployment.id,
                "is staged" if deployment.is_staged else "already has the change",
            )
            return
        if deployment is status.pending:
            self._drop_pending()
        raise errors.TransactionError(
            f"rpm-ostree did not stage {change}: it {', and it '.join(differences)}",
            remedy="see: journalctl -u rpm-ostreed",
        )

    def _unlock_for_soft_reboot(self, staged: deployments.OstreeDeployment) -> None:
        if staged.is_locked:
            self._machine.soft_reboot.unlock_staged()
        current = self.read_deployments().staged
        if current is None or current.is_locked:
            raise errors.TransactionError(
                f"ostree did not unlock {staged.id}",
                remedy='set reboot = "full" in agent.toml',
            )

    def _finalize_deployment(self, checksum: str, name: str) -> None:
        options: dict[str, system_bus.BusOption] = {
            "checksum": checksum,
            # Allows a repetition after a kill between the unlock and the reboot.
            "allow-unlocked": True,
            "initiating-command-line": f"{client.CLIENT}: reboot into {name}",
        }
        try:
            outcome = self._client.run_transaction(
                "FinalizeDeployment", system_bus.make_options(options)
            )
        except errors.BusError as error:
            if _REBOOT_INITIATED not in str(error):
                raise
            log.info("rpm-ostree is rebooting already")
            return
        client.check_outcome(outcome, f"reboot into {name}")

    def _drop_pending(self) -> None:
        client.check_outcome(
            # It also prunes layers that only this deployment had: staging it again downloads them
            # again (rpmostree-sysroot-core.cxx).
            self._client.run_transaction("Cleanup", ["pending-deploy"]),
            "drop the pending deployment",
        )
