"""A plain Gio client for the tests: calls with a limit, signals, and the loop that brings them."""

import time
from collections.abc import Callable
from typing import Any, Self

import pytest
from gi.repository import Gio, GLib

from treenail_lab.machine.bus.objects import open_connection

RPM_OSTREE = "org.projectatomic.rpmostree1"
SYSROOT = "/org/projectatomic/rpmostree1/Sysroot"
OS = "/org/projectatomic/rpmostree1/fedora_coreos"
TRANSACTION = f"{RPM_OSTREE}.Transaction"
LIMIT_S = 20.0

Heard = list[tuple[str, tuple[Any, ...]]]


def wait_until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Run the loop until the condition holds."""
    context = GLib.MainContext.get_thread_default() or GLib.MainContext.default()
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        if not context.iteration(False):
            time.sleep(0.005)


def variants(**values: tuple[str, object]) -> dict[str, Any]:
    """Options as an ``a{sv}``: each value with its signature, dashes for underscores."""
    return {key.replace("_", "-"): GLib.Variant(*value) for key, value in values.items()}


def error_name(error: GLib.Error) -> str:
    """The D-Bus name of an error as it came over the wire."""
    return str(Gio.DBusError.get_remote_error(error))


class Client:
    """One connection, to a bus or to a transaction's socket."""

    def __init__(self, address: str, *, bus: bool = True) -> None:
        self.connection = open_connection(address, bus=bus)
        self.connection.set_exit_on_close(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if not self.connection.is_closed():
            self.connection.close_sync(None)

    def call(
        self, whom: tuple[str | None, str, str, str], signature: str = "()", *values: object
    ) -> tuple[Any, ...]:
        reply = self.connection.call_sync(
            *whom,
            GLib.Variant(signature, values),
            None,
            Gio.DBusCallFlags.NONE,
            round(LIMIT_S * 1000),
            None,
        )
        return tuple(reply.unpack())

    def properties(self, name: str, path: str, interface: str) -> dict[str, Any]:
        whom = (name, path, "org.freedesktop.DBus.Properties", "GetAll")
        (values,) = self.call(whom, "(s)", interface)
        return dict(values)

    def listen(self, path: str | None = None, interface: str | None = None) -> Heard:
        """Every signal from there, as it comes."""
        heard: Heard = []

        def note(*event: Any) -> None:
            _, _, _, _, member, values = event
            heard.append((member, tuple(values.unpack())))

        self.connection.signal_subscribe(
            None, interface, None, path, None, Gio.DBusSignalFlags.NONE, note
        )
        return heard


def refused(client: Any, *call: object) -> str:
    """The name of the error of a call by ``client.do``."""
    with pytest.raises(GLib.Error) as refusal:
        client.do(*call)
    return error_name(refusal.value)


class RpmOstreeClient(Client):
    """A client of rpm-ostree."""

    def os(self, method: str, signature: str, *values: object) -> tuple[Any, ...]:
        return self.call((RPM_OSTREE, OS, f"{RPM_OSTREE}.OS", method), signature, *values)

    def sysroot(self, method: str, signature: str = "()", *values: object) -> tuple[Any, ...]:
        whom = (RPM_OSTREE, SYSROOT, f"{RPM_OSTREE}.Sysroot", method)
        return self.call(whom, signature, *values)

    def shown(self) -> dict[str, Any]:
        """The Sysroot's properties as they are shown, without Reload."""
        return self.properties(RPM_OSTREE, SYSROOT, f"{RPM_OSTREE}.Sysroot")

    def deployments(self) -> list[dict[str, Any]]:
        self.sysroot("Reload")
        return list(self.shown()["Deployments"])

    def rebase(self, pull_spec: str, *, locked: bool = True) -> str:
        """The address of the transaction."""
        options = variants(lock_finalization=("b", locked))
        refspec = f"ostree-unverified-registry:{pull_spec}"
        (address,) = self.os("Rebase", "(a{sv}sas)", options, refspec, [])
        return str(address)


class Peer(Client):
    """A connection to a transaction's private socket, listening before anything else."""

    def __init__(self, address: str) -> None:
        super().__init__(address, bus=False)
        self.heard = self.listen()

    def start(self) -> bool:
        (started,) = self.call((None, "/", TRANSACTION, "Start"))
        return bool(started)

    def cancel(self) -> None:
        self.call((None, "/", TRANSACTION, "Cancel"))

    @property
    def finished(self) -> tuple[Any, ...] | None:
        return next((values for name, values in self.heard if name == "Finished"), None)

    def result(self) -> tuple[bool, str]:
        """Wait for the signal Finished; return its values."""
        wait_until(lambda: self.finished is not None)
        assert self.finished is not None
        success, text = self.finished
        return success, text


def run(address: str) -> tuple[bool, str]:
    """Start a transaction, follow it to its end, and let go of it."""
    with Peer(address) as peer:
        peer.start()
        return peer.result()
