"""The methods of rpm-ostree's OS interface, and the work that each one begins."""

from collections.abc import Callable
from dataclasses import replace

from gi.repository import GLib

from treenail_lab.machine.bus.objects import (
    FAILED,
    MethodCall,
    MethodCallback,
    MethodError,
    ReplyValues,
    read_option,
)
from treenail_lab.machine.ostree.steps import TransactionWork, emit_message
from treenail_lab.machine.ostree.sysroot import STATEROOT, SysrootDeployment
from treenail_lab.machine.rpmostree import operations
from treenail_lab.machine.rpmostree.operations import (
    KernelCommandLine,
    OperationContext,
    PackageChange,
    TransactionOptions,
)

DAEMON_FAILED = "org.projectatomic.rpmostreed.Error.Failed"

BeginTransaction = Callable[[MethodCall, str, Callable[[], TransactionWork]], ReplyValues]


class OsMethods:
    """The methods of the OS object; ``begin`` makes a transaction of work."""

    def __init__(self, host: OperationContext, begin: BeginTransaction) -> None:
        self._host = host
        self._begin = begin

    def build_table(self) -> dict[str, MethodCallback]:
        """Return the methods by their D-Bus names."""
        return {
            "Rebase": self._handle_rebase,
            "UpdateDeployment": self._handle_update_deployment,
            "Deploy": self._handle_deploy,
            "Upgrade": self._handle_upgrade,
            "Rollback": self._handle_rollback,
            "ClearRollbackTarget": self._handle_clear_rollback_target,
            "KernelArgs": self._handle_kernel_arguments,
            "Cleanup": self._handle_cleanup,
            "RefreshMd": self._handle_refresh_metadata,
            "FinalizeDeployment": self._handle_finalize,
            "GetDeploymentBootConfig": self._handle_boot_config,
        }

    def _handle_rebase(self, call: MethodCall) -> ReplyValues:
        refspec = call.arguments[1]
        options = TransactionOptions.from_variant(call.read_argument(0))
        return self._begin(
            call,
            options.command_line or f"rebase {refspec}",
            lambda: operations.rebase_deployment(self._host, refspec, options),
        )

    def _handle_update_deployment(self, call: MethodCall) -> ReplyValues:
        modifiers, options = (
            call.read_argument(0),
            TransactionOptions.from_variant(call.read_argument(1)),
        )
        packages = PackageChange.from_variant(modifiers)
        refspec = read_option(modifiers, "set-refspec", "s")
        revision = read_option(modifiers, "set-revision", "s")
        if refspec:
            chosen = replace(options, revision=revision or "")
            return self._begin(
                call,
                options.command_line or f"rebase {refspec}",
                lambda: operations.rebase_deployment(self._host, refspec, chosen, packages),
            )
        if revision:
            return self._begin(
                call,
                options.command_line or "deploy",
                lambda: operations.deploy_revision(self._host, revision, options),
            )
        if packages != PackageChange():
            return self._begin(
                call,
                options.command_line or "pkg-change",
                lambda: operations.change_packages(self._host, packages, options),
            )
        title = options.command_line or "upgrade"
        return self._begin(call, title, lambda: operations.upgrade_deployment(self._host, options))

    def _handle_deploy(self, call: MethodCall) -> ReplyValues:
        revision = call.arguments[0]
        options = TransactionOptions.from_variant(call.read_argument(1))
        return self._begin(
            call,
            options.command_line or "deploy",
            lambda: operations.deploy_revision(self._host, revision, options),
        )

    def _handle_upgrade(self, call: MethodCall) -> ReplyValues:
        options = TransactionOptions.from_variant(call.read_argument(0))
        title = options.command_line or "upgrade"
        return self._begin(call, title, lambda: operations.upgrade_deployment(self._host, options))

    def _handle_rollback(self, call: MethodCall) -> ReplyValues:
        options = TransactionOptions.from_variant(call.read_argument(0))
        title = options.command_line or "rollback"
        return self._begin(
            call, title, lambda: operations.roll_back_deployment(self._host, options)
        )

    def _handle_clear_rollback_target(self, call: MethodCall) -> ReplyValues:
        elements = ["rollback-deploy"]
        return self._begin(
            call, "cleanup", lambda: operations.clean_up_deployments(self._host, elements)
        )

    def _handle_kernel_arguments(self, call: MethodCall) -> ReplyValues:
        dictionary = call.read_argument(4)
        options = TransactionOptions.from_variant(dictionary)
        return self._begin(
            call, options.command_line or "kargs", lambda: self._change_arguments(call, options)
        )

    def _change_arguments(self, call: MethodCall, options: TransactionOptions) -> TransactionWork:
        existing, added, replaced, removed, _ = call.arguments
        dictionary = call.read_argument(4)
        final = read_option(dictionary, "final-kernel-args", "s")
        arguments = KernelCommandLine(existing if final is None else final)
        missing = read_option(dictionary, "append-if-missing", "as") or []
        present = read_option(dictionary, "delete-if-present", "as") or []
        for argument in removed:
            arguments.delete(argument)
        for argument in replaced:
            arguments.replace(argument)
        for argument in added:
            arguments.append(argument)
        changes = [arguments.append_if_missing(argument) for argument in missing]
        changes += [arguments.delete_if_present(argument) for argument in present]
        if changes and not any(changes) and not (added or replaced or removed or final):
            yield emit_message("No changes.")
            return
        yield from operations.change_kernel_arguments(self._host, arguments, options)

    def _handle_cleanup(self, call: MethodCall) -> ReplyValues:
        elements = call.arguments[0]
        for element in elements:
            if element not in operations.CLEANUP_ELEMENTS:
                raise MethodError(FAILED, f"Invalid cleanup type: {element}")
        return self._begin(
            call, "cleanup", lambda: operations.clean_up_deployments(self._host, elements)
        )

    def _handle_refresh_metadata(self, call: MethodCall) -> ReplyValues:
        title = read_option(call.read_argument(0), "initiating-command-line", "s") or "refresh-md"
        return self._begin(call, title, lambda: operations.refresh_metadata(self._host))

    def _handle_finalize(self, call: MethodCall) -> ReplyValues:
        dictionary = call.read_argument(0)
        title = read_option(dictionary, "initiating-command-line", "s") or "finalize-deployment"
        return self._begin(
            call, title, lambda: operations.finalize_deployment(self._host, dictionary)
        )

    def _handle_boot_config(self, call: MethodCall) -> ReplyValues:
        index, pending = call.arguments
        deployment = self._find_deployment(index, pending=pending)
        is_staged = deployment == self._host.sysroot.read_staged()
        config = operations.build_boot_config(deployment)
        # A staged deployment has no boot loader entry yet.
        shown = {key: config[key] for key in (("options",) if is_staged else config)}
        return (
            {
                "staged": GLib.Variant("b", is_staged),
                **{key: GLib.Variant("s", value) for key, value in shown.items()},
            },
        )

    def _find_deployment(self, index: str, *, pending: bool) -> SysrootDeployment:
        sysroot = self._host.sysroot
        if not index:
            deployment = sysroot.find_base() if pending else sysroot.find_booted()
            if deployment is None:
                raise MethodError(FAILED, f"No deployments found for os {STATEROOT}")
            return deployment
        if not index.isdecimal():
            text = f"Invalid deployment index {index}, must be a number and >= 0"
            raise MethodError(DAEMON_FAILED, text)
        deployments = sysroot.list_deployments()
        if int(index) >= len(deployments):
            text = f"Out of range deployment index {int(index)}, expected < {len(deployments)}"
            raise MethodError(DAEMON_FAILED, text)
        return deployments[int(index)]
