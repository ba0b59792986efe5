"""A stand-in for rpm-ostreed: ``org.projectatomic.rpmostree1`` over a directory.

    python -m treenail_lab.machine.rpmostree.daemon --root ROOT --images CATALOGUE [--settings FILE]

It serves the bus of ``DBUS_SYSTEM_BUS_ADDRESS``. ROOT is a machine's root directory with a booted
deployment; CATALOGUE is a file of `treenail_lab.images`, FILE one of
`treenail_lab.machine.settings`. For a test that needs no more than this service::

    with tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as directory:
        with OstreeHost(Path(directory), booted=image_a, images=(image_a, image_b)) as host:
            ...  # DBUS_SYSTEM_BUS_ADDRESS=host.address; paths below host.root

with `OstreeHost` from `treenail_lab.machine.node.rpmostree_only`. The daemon is started by the bus
on the first call, as the real one is. The directory's name must be short: the transaction's socket
is below ROOT, and a socket's path has at most 107 characters.
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
from treenail_lab.machine.bus.connections import call, connect
from treenail_lab.machine.bus.objects import (
    BUSY,
    FAILED,
    NOT_FOUND,
    Call,
    ExportedObject,
    Refusal,
    Values,
    interfaces,
)
from treenail_lab.machine.container.pull import pulled
from treenail_lab.machine.ostree.steps import OperationFailed, Work
from treenail_lab.machine.ostree.sysroot import STATEROOT, Sysroot
from treenail_lab.machine.rpmostree import package_repositories
from treenail_lab.machine.rpmostree.clients import Clients
from treenail_lab.machine.rpmostree.deployment_properties import deployment_values
from treenail_lab.machine.rpmostree.operations import Deployments, Host, Pull
from treenail_lab.machine.rpmostree.os_methods import OsMethods
from treenail_lab.machine.rpmostree.transaction import Order, Transaction

log = logging.getLogger(__name__)

NAME = "org.projectatomic.rpmostree1"
BASE_PATH = "/org/projectatomic/rpmostree1"
SYSROOT_PATH = f"{BASE_PATH}/Sysroot"
TRANSACTION_SOCKET = "run/rpm-ostree-transaction.sock"
_LOGIN1 = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")


def object_path(osname: str) -> str:
    """The OS object's path; what can't stand in a path is written as rpm-ostree writes it."""
    return f"{BASE_PATH}/" + "".join(map(_escaped, osname))


class WatchedDeployments(Deployments, Protocol):
    """A sysroot that can be locked, and watched for what others do to it."""

    @property
    def watched(self) -> Path: ...
    def lock(self) -> int | None: ...


class Rpmostreed:
    """The daemon: the Sysroot and OS objects, and at most one transaction."""

    def __init__(
        self,
        connection: Any,
        root: Path,
        sysroot: WatchedDeployments,
        fetch: Pull,
        settings_file: Path | None = None,
    ) -> None:
        self._connection = connection
        self._root = root
        self._sysroot = sysroot
        self._settings_file = settings_file
        self._transaction: Transaction | None = None
        self._lock: int | None = None
        self._rebooting = False
        self._reload = 0
        self._interfaces = interfaces("rpmostree1.xml")
        self._clients = Clients(connection)
        host = Host(
            sysroot=sysroot,
            fetch=fetch,
            settings=self.settings,
            packages=lambda: package_repositories.packages(self._root),
            blockers=self._blockers,
            reboot=self._reboot_soon,
        )
        self._face = ExportedObject(
            connection,
            SYSROOT_PATH,
            self._interfaces[f"{NAME}.Sysroot"],
            {
                "RegisterClient": self._register,
                "UnregisterClient": self._unregister,
                "Reload": self._reload_asked,
                "ReloadConfig": self._reload_asked,
                "GetOS": self._os_path,
            },
        )
        self._os = ExportedObject(
            connection,
            object_path(STATEROOT),
            self._interfaces[f"{NAME}.OS"],
            OsMethods(host, self._begin).table(),
        )
        self._objects = ExportedObject(
            connection,
            BASE_PATH,
            self._interfaces["org.freedesktop.DBus.ObjectManager"],
            {"GetManagedObjects": self._managed_objects},
        )
        self._face.set_properties(
            Path="/",
            AutomaticUpdatePolicy="none",
            ActiveTransaction=("", "", ""),
            ActiveTransactionPath="",
        )
        self._populate()
        watched = Gio.File.new_for_path(str(self._sysroot.watched))
        self._monitor = watched.monitor_directory(Gio.FileMonitorFlags.NONE, None)
        self._monitor.connect("changed", self._deployments_changed)

    def settings(self) -> settings.Settings:
        """The settings as they are now."""
        return settings.load(self._settings_file)

    def idle(self) -> bool:
        """Whether nobody needs the daemon: no client, no transaction."""
        return not self._clients.registered and self._transaction is None

    def _register(self, call: Call) -> Values:
        self._clients.register(call)
        return ()

    def _unregister(self, call: Call) -> Values:
        self._clients.unregister(call.sender)
        return ()

    def _reload_asked(self, call: Call) -> None:
        def answer() -> bool:
            self._populate()
            call.answer()
            return False

        # Low priority, so that whatever is pending comes first.
        GLib.idle_add(answer, priority=GLib.PRIORITY_LOW)

    def _os_path(self, call: Call) -> Values:
        (name,) = call.values
        if name not in ("", STATEROOT):
            raise Refusal(NOT_FOUND, f'OS name "{name}" not found')
        return (object_path(STATEROOT),)

    def _managed_objects(self, _call: Call) -> Values:
        objects = (self._face, self._os)
        return ({each.path: {each.interface: each.properties()} for each in objects},)

    def _begin(self, call: Call, title: str, work: Callable[[], Work]) -> Values:
        if self._rebooting:
            raise Refusal(FAILED, "Reboot initiated, cannot start new transaction")
        current = self._transaction
        if current is not None:
            if current.same_as(call):
                return (current.address,)
            raise Refusal(
                BUSY,
                f"Transaction in progress: {current.title}\n You can cancel the current "
                "transaction with `rpm-ostree cancel`",
            )
        self._lock = self._sysroot.lock()
        if self._lock is None:
            raise Refusal(BUSY, "System transaction in progress")
        transaction = Transaction(
            Order(call, title, self._clients.description(call.sender), work()),
            interface=self._interfaces[f"{NAME}.Transaction"],
            socket=self._root / TRANSACTION_SOCKET,
            force_close_s=self.settings().force_close_s,
            ended=self._transaction_ended,
            closed=self._transaction_closed,
        )
        self._transaction = transaction
        self._face.set_properties(
            ActiveTransaction=transaction.identity, ActiveTransactionPath=transaction.address
        )
        return (transaction.address,)

    def _transaction_ended(self, success: bool) -> None:  # noqa: FBT001  the callback's one value
        self._unlock()
        if success and not self._reload:
            # The real daemon's properties follow its transaction from idles: late, and later
            # than Finished. Here they are late for certain, so that who forgets Reload notices.
            lag_ms = round(self.settings().properties_lag_s * 1000)
            self._reload = GLib.timeout_add(lag_ms, self._reload_late)

    def _reload_late(self) -> bool:
        self._reload = 0
        self._populate()
        return False

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _transaction_closed(self) -> None:
        self._transaction = None
        self._unlock()
        self._face.set_properties(ActiveTransaction=("", "", ""), ActiveTransactionPath="")

    def _deployments_changed(
        self, _monitor: object, _file: object, _other: object, event: object
    ) -> None:
        quiet = self._transaction is None and not self._reload
        if event == Gio.FileMonitorEvent.ATTRIBUTE_CHANGED and quiet:
            self._populate()

    def _populate(self) -> None:
        sysroot = self._sysroot
        booted = sysroot.booted()
        everything = sysroot.everything()
        values = {
            deployment.id: deployment_values(deployment, sysroot) for deployment in everything
        }
        rollback = _rollback(tuple(values), booted.id if booted else "")
        self._face.set_properties(
            Booted=object_path(booted.osname) if booted else "/",
            Deployments=list(values.values()),
        )
        self._os.set_properties(
            Name=STATEROOT,
            BootedDeployment=values.get(booted.id, {}) if booted else {},
            DefaultDeployment=values[everything[0].id] if everything else {},
            RollbackDeployment=values.get(rollback, {}),
            CachedUpdate={},
            HasCachedUpdateRpmDiff=False,
        )

    def _reboot_soon(self) -> None:
        self._rebooting = True
        GLib.idle_add(self._reboot)

    def _reboot(self) -> bool:
        try:
            self._login1("Reboot", GLib.Variant("(b)", (False,)))
        except GLib.Error as error:
            log.warning("failed to initiate the reboot: %s", error.message)
            self._rebooting = False
        return False

    def _blockers(self) -> list[tuple[str, str]]:
        try:
            (inhibitors,) = self._login1("ListInhibitors", None)
        except GLib.Error as error:
            raise OperationFailed(f"Checking systemd inhibitor locks: {error.message}") from error
        return [
            (who, why)
            for what, who, why, mode, _uid, _pid in inhibitors
            if "shutdown" in what and mode == "block"
        ]

    def _login1(self, method: str, arguments: Any) -> tuple[Any, ...]:
        return call(self._connection, (*_LOGIN1, method), arguments)


def main(arguments: list[str] | None = None) -> int:
    """Serve until told to stop, idle for too long, or the bus is gone."""
    parser = argparse.ArgumentParser(prog="rpm-ostreed", description="a stand-in for rpm-ostreed")
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
        # Before the name is owned: who started us then finds us.
        chosen.pid_file.write_text(f"{os.getpid()}\n", encoding="ascii")
    connection = connect(os.environ["DBUS_SYSTEM_BUS_ADDRESS"])
    connection.connect("closed", lambda *_: loop.quit())
    sysroot = Sysroot(chosen.root)
    fetch = partial(
        pulled,
        root=chosen.root,
        sysroot=sysroot,
        catalogue=chosen.images,
        settings=lambda: settings.load(chosen.settings),
    )
    daemon = Rpmostreed(connection, chosen.root, sysroot, fetch, chosen.settings)
    Gio.bus_own_name_on_connection(
        connection, NAME, Gio.BusNameOwnerFlags.NONE, None, lambda *_: loop.quit()
    )
    idle_exit_s = daemon.settings().idle_exit_s
    if idle_exit_s:
        IdleExit(daemon.idle, idle_exit_s, loop.quit).watch()
    loop.run()
    return 0


class IdleExit:
    """Ends the daemon once it was idle for so long."""

    def __init__(self, idle: Callable[[], bool], limit_s: float, leave: Callable[[], None]) -> None:
        self._idle = idle
        self._limit_us = limit_s * 1e6
        self._leave = leave
        self._since = GLib.get_monotonic_time()

    def watch(self) -> None:
        GLib.timeout_add(100, self._look)

    def _look(self) -> bool:
        now = GLib.get_monotonic_time()
        if not self._idle():
            self._since = now
        elif now - self._since >= self._limit_us:
            self._leave()
        return True


def _rollback(ids: tuple[str, ...], booted: str) -> str:
    after = ids.index(booted) + 1 if booted in ids else len(ids)
    return ids[after] if after < len(ids) else ""


def _escaped(character: str) -> str:
    if character.isascii() and (character.isalnum() or character == "_"):
        return character
    return "_" if character in "-/" else f"_{ord(character):02X}"


if __name__ == "__main__":
    sys.exit(main())
