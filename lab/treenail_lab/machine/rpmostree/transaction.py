"""An rpm-ostree transaction: its private socket, its peers and its lifetime.

It exists from the method call that makes it until its work is done and every peer has closed. The
caller may leave the bus once the transaction is started, but not before.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

from gi.repository import Gio, GLib

from treenail_lab.machine.bus.objects import ExportedObject, MethodCall, ReplyValues
from treenail_lab.machine.ostree.steps import EmitSignal, OperationError, PauseWork, TransactionWork

log = logging.getLogger(__name__)

CANCELLED = "Operation was cancelled"


@dataclass(frozen=True, slots=True)
class TransactionRequest:
    """The call that requested a transaction, and its work."""

    call: MethodCall
    title: str
    client: str
    work: TransactionWork


class EmulatedTransaction:
    """Work that begins when a peer calls Start on the private socket.

    ``on_end(success)`` is called before Finished is emitted, ``on_close()`` after the last peer.
    """

    def __init__(
        self,
        request: TransactionRequest,
        *,
        interface: Any,
        socket: Path,
        force_close_s: float,
        on_end: Callable[[bool], None],
        on_close: Callable[[], None],
    ) -> None:
        call = request.call
        self.title = request.title
        self.address = f"unix:path={socket}"
        self.is_started = False
        self._call = call
        self._client = request.client
        self._work = request.work
        self._interface = interface
        self._force_close_s = force_close_s
        self._on_end = on_end
        self._on_close = on_close
        self._is_cancelled = False
        self._result: tuple[bool, str] | None = None
        self._peers: dict[Any, ExportedObject] = {}
        self._next_step = 0
        self._force_close_source = 0
        self._initiator_watch: int = Gio.bus_watch_name_on_connection(
            call.connection, call.sender, Gio.BusNameWatcherFlags.NONE, None, self._abandon
        )
        socket.parent.mkdir(parents=True, exist_ok=True)
        socket.unlink(missing_ok=True)
        self._server = Gio.DBusServer.new_sync(
            self.address, Gio.DBusServerFlags.NONE, Gio.dbus_generate_guid(), None, None
        )
        self._server.connect("new-connection", self._add_peer)
        self._server.start()
        socket.chmod(0o666)

    @property
    def identity(self) -> tuple[str, str, str]:
        """Return method, caller and object path, the value of ActiveTransaction."""
        return (self._call.method, self._call.sender, self._call.path)

    def is_same_as(self, call: MethodCall) -> bool:
        """Return whether ``call`` is the same call, whose caller may join."""
        own = self._call
        return bool(
            (own.path, own.interface, own.method) == (call.path, call.interface, call.method)
            and own.parameters.equal(call.parameters)
        )

    def _add_peer(self, _server: object, connection: Any) -> bool:
        methods = {"Start": self._handle_start, "Cancel": self._handle_cancel}
        peer = ExportedObject(connection, "/", self._interface, methods)
        peer.set_properties(Title=self.title, InitiatingClientDescription=self._client)
        # The dictionary also holds the reference that keeps the connection open.
        self._peers[connection] = peer
        connection.connect("closed", self._remove_peer)
        return True

    def _remove_peer(self, connection: Any, *_: object) -> None:
        self._peers.pop(connection, None)
        self._close_if_idle()

    def _abandon(self, *_: object) -> None:
        if not self.is_started:
            log.info("client disconnected before calling Start")
            self._close()

    def _handle_start(self, call: MethodCall) -> ReplyValues | None:
        first = not self.is_started
        if first:
            self.is_started = True
            Gio.bus_unwatch_name(self._initiator_watch)
            self._next_step = GLib.idle_add(
                self._cancel_work if self._is_cancelled else self._run_step
            )
        if self._result is None:
            return (first,)
        call.send_reply(first)
        # This peer missed the signal Finished: emit it again, for this peer only.
        self._peers[call.connection].emit_signal("Finished", "(bs)", *self._result)
        return None

    def _handle_cancel(self, _call: MethodCall) -> ReplyValues:
        self._is_cancelled = True
        if self._next_step:
            GLib.source_remove(self._next_step)
            self._next_step = GLib.idle_add(self._cancel_work)
        return ()

    def _cancel_work(self) -> bool:
        self._work.close()
        self._finish_work(success=False, text=CANCELLED)
        return False

    def _run_step(self) -> bool:
        self._next_step = 0
        try:
            step = next(self._work)
        except StopIteration:
            self._finish_work(success=True, text="")
            return False
        except OperationError as failure:
            self._finish_work(success=False, text=str(failure))
            return False
        match step:
            case EmitSignal():
                self._emit_to_peers(step)
                self._next_step = GLib.idle_add(self._run_step)
            case PauseWork():
                self._next_step = GLib.timeout_add(round(step.seconds * 1000), self._run_step)
            case _:
                assert_never(step)
        return False

    def _finish_work(self, *, success: bool, text: str) -> None:
        log.info("txn %s %s%s", self.title, "successful" if success else "failed: ", text)
        self._next_step = 0
        self._on_end(success)
        self._emit_to_peers(EmitSignal("Finished", "(bs)", (success, text)))
        self._result = (success, text)
        self._force_close_source = GLib.timeout_add(
            round(self._force_close_s * 1000), self._force_close
        )
        self._close_if_idle()

    def _emit_to_peers(self, emit: EmitSignal) -> None:
        for peer in self._peers.values():
            with suppress(GLib.Error):  # it has hung up, and `_remove_peer` is still to come
                peer.emit_signal(emit.name, emit.signature, *emit.values)

    def _close_if_idle(self) -> None:
        if self._result is not None and not self._peers:
            self._close()

    def _force_close(self) -> bool:
        log.warning("forcibly closing transaction due to timeout")
        self._force_close_source = 0
        self._close()
        return False

    def _close(self) -> None:
        if self._force_close_source:
            GLib.source_remove(self._force_close_source)
            self._force_close_source = 0
        self._server.stop()
        peers, self._peers = self._peers, {}
        for connection in peers:
            connection.close(None, None)
        self._on_close()
