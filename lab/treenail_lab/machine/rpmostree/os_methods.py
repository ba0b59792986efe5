"""The methods of rpm-ostree's OS interface: which work each one begins."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gi.repository import GLib

from treenail_lab.machine.bus.objects import FAILED, Call, Method, Refusal, Values, option
from treenail_lab.machine.ostree.kernel_arguments import KernelArguments
from treenail_lab.machine.ostree.steps import Work, message
from treenail_lab.machine.ostree.sysroot import Deployment
from treenail_lab.machine.rpmostree import operations
from treenail_lab.machine.rpmostree.operations import Host, Options, Packages

Begin = Callable[[Call, str, Callable[[], Work]], Values]


class OsMethods:
    """The OS object's methods over one host; ``begin`` makes a transaction of work."""

    def __init__(self, host: Host, begin: Begin) -> None:
        self._host = host
        self._begin = begin

    def table(self) -> dict[str, Method]:
        """The methods by their D-Bus names."""
        return {
            "Rebase": self._rebase,
            "UpdateDeployment": self._update_deployment,
            "Deploy": self._deploy,
            "Upgrade": self._upgrade,
            "Rollback": self._rollback,
            "ClearRollbackTarget": self._clear_rollback_target,
            "KernelArgs": self._kernel_arguments,
            "Cleanup": self._cleanup,
            "RefreshMd": self._refresh_metadata,
            "FinalizeDeployment": self._finalize,
            "GetDeploymentBootConfig": self._boot_config,
        }

    def _rebase(self, call: Call) -> Values:
        refspec = call.values[1]
        options = Options.read(call.argument(0))
        return self._begin(
            call,
            options.command_line or f"rebase {refspec}",
            lambda: operations.rebase(self._host, refspec, options),
        )

    def _update_deployment(self, call: Call) -> Values:
        modifiers, options = call.argument(0), Options.read(call.argument(1))
        packages = Packages.read(modifiers)
        refspec = option(modifiers, "set-refspec", "s")
        revision = option(modifiers, "set-revision", "s")
        if refspec:
            chosen = replace(options, revision=revision or "")
            return self._begin(
                call,
                options.command_line or f"rebase {refspec}",
                lambda: operations.rebase(self._host, refspec, chosen, packages),
            )
        if revision:
            return self._begin(
                call,
                options.command_line or "deploy",
                lambda: operations.deploy(self._host, revision, options),
            )
        if packages != Packages():
            return self._begin(
                call,
                options.command_line or "pkg-change",
                lambda: operations.change_packages(self._host, packages, options),
            )
        title = options.command_line or "upgrade"
        return self._begin(call, title, lambda: operations.upgrade(self._host, options))

    def _deploy(self, call: Call) -> Values:
        revision = call.values[0]
        options = Options.read(call.argument(1))
        return self._begin(
            call,
            options.command_line or "deploy",
            lambda: operations.deploy(self._host, revision, options),
        )

    def _upgrade(self, call: Call) -> Values:
        options = Options.read(call.argument(0))
        title = options.command_line or "upgrade"
        return self._begin(call, title, lambda: operations.upgrade(self._host, options))

    def _rollback(self, call: Call) -> Values:
        options = Options.read(call.argument(0))
        title = options.command_line or "rollback"
        return self._begin(call, title, lambda: operations.rollback(self._host, options))

    def _clear_rollback_target(self, call: Call) -> Values:
        elements = ["rollback-deploy"]
        return self._begin(call, "cleanup", lambda: operations.cleanup(self._host, elements))

    def _kernel_arguments(self, call: Call) -> Values:
        dictionary = call.argument(4)
        options = Options.read(dictionary)
        return self._begin(
            call, options.command_line or "kargs", lambda: self._changed_arguments(call, options)
        )

    def _changed_arguments(self, call: Call, options: Options) -> Work:
        existing, added, replaced, removed, _ = call.values
        dictionary = call.argument(4)
        final = option(dictionary, "final-kernel-args", "s")
        arguments = KernelArguments(existing if final is None else final)
        missing = option(dictionary, "append-if-missing", "as") or []
        present = option(dictionary, "delete-if-present", "as") or []
        for argument in removed:
            arguments.delete(argument)
        for argument in replaced:
            arguments.replace(argument)
        for argument in added:
            arguments.append(argument)
        changes = [arguments.append_if_missing(argument) for argument in missing]
        changes += [arguments.delete_if_present(argument) for argument in present]
        if changes and not any(changes) and not (added or replaced or removed or final):
            yield message("No changes.")
            return
        yield from operations.change_kernel_arguments(self._host, arguments, options)

    def _cleanup(self, call: Call) -> Values:
        elements = call.values[0]
        return self._begin(call, "cleanup", lambda: operations.cleanup(self._host, elements))

    def _refresh_metadata(self, call: Call) -> Values:
        title = option(call.argument(0), "initiating-command-line", "s") or "refresh-md"
        return self._begin(call, title, lambda: operations.refresh_metadata(self._host))

    def _finalize(self, call: Call) -> Values:
        dictionary = call.argument(0)
        title = option(dictionary, "initiating-command-line", "s") or "finalize-deployment"
        return self._begin(call, title, lambda: operations.finalize(self._host, dictionary))

    def _boot_config(self, call: Call) -> Values:
        name, pending = call.values
        deployment = self._named(name, pending=pending)
        config = operations.boot_config(deployment)
        return ({key: _text(value) for key, value in config.items()},)

    def _named(self, name: str, *, pending: bool) -> Deployment:
        sysroot = self._host.sysroot
        if name:
            found = next((d for d in sysroot.everything() if d.id == name), None)
        else:
            found = sysroot.base() if pending else sysroot.booted()
        if found is None:
            raise Refusal(FAILED, f"Invalid deployment id {name}" if name else "Not booted")
        return found


def _text(value: str) -> Any:
    return GLib.Variant("s", value)
