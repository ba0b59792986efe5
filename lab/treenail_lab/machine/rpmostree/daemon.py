"""An emulated rpm-ostreed: ``org.projectatomic.rpmostree1`` over a directory.

    python -m treenail_lab.machine.rpmostree.daemon --root ROOT --images CATALOGUE [--settings FILE]

It serves the bus of ``DBUS_SYSTEM_BUS_ADDRESS``. ROOT is a machine's root directory with a booted
deployment; CATALOGUE is a file of `treenail_lab.images`, FILE one of
`treenail_lab.machine.settings`. A test that needs only this service writes::

    with tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as directory:
        with RpmOstreeHost(Path(directory), booted=image_a, images=(image_a, image_b)) as host:
            ...  # DBUS_SYSTEM_BUS_ADDRESS=host.address; paths below host.root

with `RpmOstreeHost` from `treenail_lab.machine.node.daemons`. The bus activates the daemon
on the first call, as the real one. The path of the directory must be short: the transaction's
socket is below ROOT, and a socket's path has at most 107 bytes (unix(7)).
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gi.repository import Gio, GLib

from treenail_lab.machine import settings
from treenail_lab.machine.bus.objects import (
    BUSY,
    FAILED,
    NOT_FOUND,
    ExportedObject,
    MethodCall,
    MethodError,
    ReplyValues,
    call_method,
    load_interfaces,
    open_connection,
    query_credential,
    read_option,
)
from treenail_lab.machine.container.pull import pull_deployment
from treenail_lab.machine.ostree.steps import OperationError, TransactionWork
from treenail_lab.machine.ostree.sysroot import STATEROOT, Sysroot, SysrootDeployment
from treenail_lab.machine.rpmostree import operations
from treenail_lab.machine.rpmostree.operations import (
    OperationContext,
    PullFunction,
    SysrootInterface,
)
from treenail_lab.machine.rpmostree.os_methods import OsMethods
from treenail_lab.machine.rpmostree.transaction import EmulatedTransaction, TransactionRequest

_EMPTY_PROPERTIES = {
    "requested-local-packages": "as",
    "requested-local-fileoverride-packages": "as",
    "requested-base-local-replacements": "as",
    "base-local-replacements": "a(vv)",
    "base-remote-replacements": "a{sv}",
}


def build_deployment_values(
    deployment: SysrootDeployment, sysroot: SysrootInterface
) -> dict[str, Any]:
    """Return the ``a{sv}`` of a deployment, with every key of a container deployment."""
    staged = deployment == sysroot.read_staged()
    booted = not staged and deployment == sysroot.find_booted()
    values = {
        "id": GLib.Variant("s", deployment.id),
        "osname": GLib.Variant("s", deployment.osname),
        "checksum": GLib.Variant("s", deployment.checksum),
        "serial": GLib.Variant("i", deployment.serial),
        "booted": GLib.Variant("b", booted),
        "staged": GLib.Variant("b", staged),
        "pinned": GLib.Variant("b", deployment.pinned),
        "unlocked": GLib.Variant("s", "none"),
        "regenerate-initramfs": GLib.Variant("b", False),  # noqa: FBT003  gi's own signature
        "timestamp": GLib.Variant("t", deployment.timestamp),
        "version": GLib.Variant("s", deployment.version),
        "container-image-reference": GLib.Variant("s", deployment.refspec),
        "container-image-reference-digest": GLib.Variant("s", deployment.digest),
        "base-commit-meta": GLib.Variant("a{sv}", _build_commit_metadata(deployment)),
    }
    for key, names in {
        "packages": deployment.packages,
        "requested-packages": deployment.packages,
        "requested-base-removals": deployment.removals,
    }.items():
        values[key] = GLib.Variant("as", names)
    removed = [GLib.Variant("s", name) for name in deployment.removals]
    values["base-removals"] = GLib.Variant("av", removed)
    if deployment.base:
        values["base-checksum"] = GLib.Variant("s", deployment.base)
        values["base-version"] = values["version"]
        values["base-timestamp"] = values["timestamp"]
        values["layered-commit-meta"] = GLib.Variant("a{sv}", {})
    for key, signature in _EMPTY_PROPERTIES.items():
        values[key] = GLib.Variant(signature, {} if signature == "a{sv}" else [])
    # No finalization-locked: rpm-ostreed 2026.2 looks for a file that libostree no longer writes.
    if deployment.custom_origin is not None:
        values["custom-origin"] = GLib.Variant("(ss)", deployment.custom_origin)
    return values


def _build_commit_metadata(deployment: SysrootDeployment) -> dict[str, Any]:
    return {
        "version": GLib.Variant("s", deployment.version),
        "ostree.manifest": GLib.Variant("s", deployment.manifest),
        "ostree.manifest-digest": GLib.Variant("s", deployment.digest),
        "ostree.container.image-config": GLib.Variant("s", deployment.configuration),
    }


class RegisteredClients:
    """The registered clients; one that leaves the bus is unregistered."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._names: dict[str, str] = {}
        self._watches: dict[str, int] = {}

    @property
    def client_count(self) -> int:
        return len(self._names)

    def register_client(self, call: MethodCall) -> None:
        """Register the caller with the ``id`` in its options."""
        sender = call.sender
        self._names[sender] = read_option(call.read_argument(0), "id", "s") or ""
        if sender not in self._watches:
            self._watches[sender] = Gio.bus_watch_name_on_connection(
                self._connection,
                sender,
                Gio.BusNameWatcherFlags.NONE,
                None,
                lambda _connection, name: self.unregister_client(name),
            )

    def unregister_client(self, sender: str) -> None:
        """Unregister the caller, if it is registered."""
        self._names.pop(sender, None)
        watch = self._watches.pop(sender, 0)
        if watch:
            Gio.bus_unwatch_name(watch)

    def describe_client(self, sender: str) -> str:
        """Describe the caller as the journal and ``rpm-ostree status`` do."""
        name = self._names.get(sender)
        identity = f"id:{name} " if name else ""
        user = query_credential(self._connection, "GetConnectionUnixUser", sender)
        return f"client({identity}dbus:{sender.removeprefix(':')} uid:{user})"


log = logging.getLogger(__name__)

NAME = "org.projectatomic.rpmostree1"
BASE_PATH = "/org/projectatomic/rpmostree1"
SYSROOT_PATH = f"{BASE_PATH}/Sysroot"
TRANSACTION_SOCKET = "run/rpm-ostree-transaction.sock"
_LOGIN1 = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")


def build_object_path(osname: str) -> str:
    """Return the path of the OS object, escaped as rpm-ostree does."""
    return f"{BASE_PATH}/" + "".join(map(_escape_character, osname))


class WatchedSysroot(SysrootInterface, Protocol):
    """A sysroot that can be locked and watched for changes of other programs."""

    @property
    def watched_directory(self) -> Path: ...
    def acquire_lock(self) -> int | None: ...


class EmulatedRpmOstree:
    """The daemon: the Sysroot and OS objects, and at most one transaction."""

    def __init__(
        self,
        connection: Any,
        root: Path,
        sysroot: WatchedSysroot,
        fetch: PullFunction,
        settings_file: Path | None = None,
    ) -> None:
        self._connection = connection
        self._root = root
        self._sysroot = sysroot
        self._settings_file = settings_file
        self._transaction: EmulatedTransaction | None = None
        self._lock: int | None = None
        self._is_rebooting = False
        self._reload_source = 0
        self._interfaces = load_interfaces("rpmostree1.xml")
        self._clients = RegisteredClients(connection)
        host = OperationContext(
            sysroot=sysroot,
            fetch=fetch,
            settings=self.read_settings,
            packages=lambda: operations.list_packages(self._root),
            blockers=self._list_blockers,
            reboot=self._schedule_reboot,
        )
        self._sysroot_object = ExportedObject(
            connection,
            SYSROOT_PATH,
            self._interfaces[f"{NAME}.Sysroot"],
            {
                "RegisterClient": self._handle_register,
                "UnregisterClient": self._handle_unregister,
                "Reload": self._handle_reload,
                "ReloadConfig": self._handle_reload,
                "GetOS": self._handle_get_os,
            },
        )
        self._os_object = ExportedObject(
            connection,
            build_object_path(STATEROOT),
            self._interfaces[f"{NAME}.OS"],
            OsMethods(host, self._begin_transaction).build_table(),
        )
        self._object_manager = ExportedObject(
            connection,
            BASE_PATH,
            self._interfaces["org.freedesktop.DBus.ObjectManager"],
            {"GetManagedObjects": self._handle_managed_objects},
        )
        self._sysroot_object.set_properties(
            Path="/",
            AutomaticUpdatePolicy="none",
            ActiveTransaction=("", "", ""),
            ActiveTransactionPath="",
        )
        self._publish_properties()
        watched = Gio.File.new_for_path(str(self._sysroot.watched_directory))
        self._monitor = watched.monitor_directory(Gio.FileMonitorFlags.NONE, None)
        self._monitor.connect("changed", self._on_deployments_change)

    def read_settings(self) -> settings.MachineSettings:
        """Read the current settings."""
        return settings.load_settings(self._settings_file)

    def is_idle(self) -> bool:
        """Return whether there is neither a client nor a transaction."""
        return not self._clients.client_count and self._transaction is None

    def _handle_register(self, call: MethodCall) -> ReplyValues:
        self._clients.register_client(call)
        return ()

    def _handle_unregister(self, call: MethodCall) -> ReplyValues:
        self._clients.unregister_client(call.sender)
        return ()

    def _handle_reload(self, call: MethodCall) -> None:
        def answer() -> bool:
            self._publish_properties()
            call.send_reply()
            return False

        # Low priority, so that pending updates of properties come first, as in rpm-ostreed.
        GLib.idle_add(answer, priority=GLib.PRIORITY_LOW)

    def _handle_get_os(self, call: MethodCall) -> ReplyValues:
        (name,) = call.arguments
        if name not in ("", STATEROOT):
            raise MethodError(NOT_FOUND, f'OS name "{name}" not found')
        return (build_object_path(STATEROOT),)

    def _handle_managed_objects(self, _call: MethodCall) -> ReplyValues:
        objects = (self._sysroot_object, self._os_object)
        return (
            {managed.path: {managed.interface: managed.read_properties()} for managed in objects},
        )

    def _begin_transaction(
        self, call: MethodCall, title: str, work: Callable[[], TransactionWork]
    ) -> ReplyValues:
        if self._is_rebooting:
            raise MethodError(FAILED, "Reboot initiated, cannot start new transaction")
        current = self._transaction
        if current is not None:
            if current.is_same_as(call):
                return (current.address,)
            raise MethodError(
                BUSY,
                f"Transaction in progress: {current.title}\n You can cancel the current "
                "transaction with `rpm-ostree cancel`",
            )
        self._lock = self._sysroot.acquire_lock()
        if self._lock is None:
            raise MethodError(BUSY, "System transaction in progress")
        transaction = EmulatedTransaction(
            TransactionRequest(call, title, self._clients.describe_client(call.sender), work()),
            interface=self._interfaces[f"{NAME}.Transaction"],
            socket=self._root / TRANSACTION_SOCKET,
            force_close_s=self.read_settings().force_close_s,
            on_end=self._on_transaction_end,
            on_close=self._on_transaction_close,
        )
        self._transaction = transaction
        self._sysroot_object.set_properties(
            ActiveTransaction=transaction.identity, ActiveTransactionPath=transaction.address
        )
        return (transaction.address,)

    def _on_transaction_end(self, success: bool) -> None:  # noqa: FBT001  the callback's one value
        self._release_lock()
        if success and not self._reload_source:
            # rpm-ostreed updates its properties in idles, which may run after Finished. Here they
            # always do, so that a client that does not call Reload fails.
            lag_ms = round(self.read_settings().properties_lag_s * 1000)
            self._reload_source = GLib.timeout_add(lag_ms, self._reload_properties)

    def _reload_properties(self) -> bool:
        self._reload_source = 0
        self._publish_properties()
        return False

    def _release_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _on_transaction_close(self) -> None:
        self._transaction = None
        self._release_lock()
        self._sysroot_object.set_properties(
            ActiveTransaction=("", "", ""), ActiveTransactionPath=""
        )

    def _on_deployments_change(
        self, _monitor: object, _file: object, _other: object, event: object
    ) -> None:
        quiet = self._transaction is None and not self._reload_source
        if event == Gio.FileMonitorEvent.ATTRIBUTE_CHANGED and quiet:
            self._publish_properties()

    def _publish_properties(self) -> None:
        sysroot = self._sysroot
        booted = sysroot.find_booted()
        everything = sysroot.list_deployments()
        values = {
            deployment.id: build_deployment_values(deployment, sysroot) for deployment in everything
        }
        rollback = _find_rollback(tuple(values), booted.id if booted else "")
        self._sysroot_object.set_properties(
            Booted=build_object_path(booted.osname) if booted else "/",
            Deployments=list(values.values()),
        )
        self._os_object.set_properties(
            Name=STATEROOT,
            BootedDeployment=values.get(booted.id, {}) if booted else {},
            DefaultDeployment=values[everything[0].id] if everything else {},
            RollbackDeployment=values.get(rollback, {}),
            CachedUpdate={},
            HasCachedUpdateRpmDiff=False,
        )

    def _schedule_reboot(self) -> None:
        self._is_rebooting = True
        GLib.idle_add(self._request_reboot)

    def _request_reboot(self) -> bool:
        try:
            self._call_logind("Reboot", GLib.Variant("(b)", (False,)))
        except GLib.Error as error:
            log.warning("failed to initiate the reboot: %s", error.message)
            self._is_rebooting = False
        return False

    def _list_blockers(self) -> list[tuple[str, str]]:
        try:
            (inhibitors,) = self._call_logind("ListInhibitors", None)
        except GLib.Error as error:
            raise OperationError(f"Checking systemd inhibitor locks: {error.message}") from error
        return [
            (who, why)
            for what, who, why, mode, _uid, _pid in inhibitors
            if "shutdown" in what and mode == "block"
        ]

    def _call_logind(self, method: str, arguments: Any) -> tuple[Any, ...]:
        return call_method(self._connection, (*_LOGIN1, method), arguments)


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM, until the idle timeout, or until the bus is gone."""
    parser = argparse.ArgumentParser(prog="rpm-ostreed", description="an emulated rpm-ostreed")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--settings", type=Path)
    parser.add_argument("--pid-file", type=Path)
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="rpm-ostreed: %(message)s", stream=sys.stderr)
    loop = GLib.MainLoop()
    for number in (signal.SIGTERM, signal.SIGINT):
        GLib.unix_signal_add(GLib.PRIORITY_HIGH, number, loop.quit)
    if chosen.pid_file is not None:
        # Written before the name is owned, so that callers of the daemon find the file.
        chosen.pid_file.write_text(f"{os.getpid()}\n", encoding="ascii")
    connection = open_connection(os.environ["DBUS_SYSTEM_BUS_ADDRESS"])
    connection.connect("closed", lambda *_: loop.quit())
    sysroot = Sysroot(chosen.root)
    fetch = partial(
        pull_deployment,
        root=chosen.root,
        sysroot=sysroot,
        catalogue=chosen.images,
        settings=lambda: settings.load_settings(chosen.settings),
    )
    daemon = EmulatedRpmOstree(connection, chosen.root, sysroot, fetch, chosen.settings)
    Gio.bus_own_name_on_connection(
        connection, NAME, Gio.BusNameOwnerFlags.NONE, None, lambda *_: loop.quit()
    )
    idle_exit_s = daemon.read_settings().idle_exit_s
    if idle_exit_s:
        IdleExit(daemon.is_idle, idle_exit_s, loop.quit).start()
    loop.run()
    return 0


class IdleExit:
    """Ends the daemon after ``limit_s`` without a client and a transaction."""

    def __init__(self, idle: Callable[[], bool], limit_s: float, leave: Callable[[], None]) -> None:
        self._idle = idle
        self._limit_us = limit_s * 1e6
        self._leave = leave
        self._since = GLib.get_monotonic_time()

    def start(self) -> None:
        GLib.timeout_add(100, self._check_idle)

    def _check_idle(self) -> bool:
        now = GLib.get_monotonic_time()
        if not self._idle():
            self._since = now
        elif now - self._since >= self._limit_us:
            self._leave()
        return True


def _find_rollback(ids: tuple[str, ...], booted: str) -> str:
    after = ids.index(booted) + 1 if booted in ids else len(ids)
    return ids[after] if after < len(ids) else ""


def _escape_character(character: str) -> str:
    if character.isascii() and (character.isalnum() or character == "_"):
        return character
    return "_" if character in "-/" else f"_{ord(character):02X}"


if __name__ == "__main__":
    sys.exit(main())
