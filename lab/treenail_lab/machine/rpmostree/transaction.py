"""One rpm-ostree transaction: its private socket, its peers, and its life.

It lives from the method call that makes it until its work is done and every peer has closed. Who
called it may leave the bus once the transaction is started, but not before.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

from gi.repository import Gio, GLib

from treenail_lab.machine.bus.objects import Call, ExportedObject, Values
from treenail_lab.machine.ostree.steps import Emit, OperationFailed, Pause, Work

log = logging.getLogger(__name__)

CANCELLED = "Operation was cancelled"


@dataclass(frozen=True, slots=True)
class Order:
    """What a transaction is made of: the call that asked for it, and the work to do."""

    call: Call
    title: str
    client: str
    work: Work


class Transaction:
    """Work that runs once somebody calls Start on the private socket.

    ``ended(success)`` is called before Finished goes out, ``closed()`` when it is all over.
    """

    def __init__(
        self,
        order: Order,
        *,
        interface: Any,
        socket: Path,
        force_close_s: float,
        ended: Callable[[bool], None],
        closed: Callable[[], None],
    ) -> None:
        call = order.call
        self.title = order.title
        self.address = f"unix:path={socket}"
        self.started = False
        self._call = call
        self._client = order.client
        self._work = order.work
        self._interface = interface
        self._force_close_s = force_close_s
        self._ended = ended
        self._closed = closed
        self._cancelled = False
        self._result: tuple[bool, str] | None = None
        self._peers: dict[Any, ExportedObject] = {}
        self._next_step = 0
        self._cut_off = 0
        self._initiator: int = Gio.bus_watch_name_on_connection(
            call.connection, call.sender, Gio.BusNameWatcherFlags.NONE, None, self._abandoned
        )
        socket.parent.mkdir(parents=True, exist_ok=True)
        socket.unlink(missing_ok=True)
        self._server = Gio.DBusServer.new_sync(
            self.address, Gio.DBusServerFlags.NONE, Gio.dbus_generate_guid(), None, None
        )
        self._server.connect("new-connection", self._joined)
        self._server.start()
        socket.chmod(0o666)

    @property
    def identity(self) -> tuple[str, str, str]:
        """Method, caller and object path, as the ActiveTransaction property shows them."""
        return (self._call.method, self._call.sender, self._call.path)

    def same_as(self, call: Call) -> bool:
        """Whether ``call`` asks for the very same, so that its caller may join."""
        own = self._call
        return bool(
            (own.path, own.interface, own.method) == (call.path, call.interface, call.method)
            and own.parameters.equal(call.parameters)
        )

    def _joined(self, _server: object, connection: Any) -> bool:
        methods = {"Start": self._start, "Cancel": self._cancel}
        peer = ExportedObject(connection, "/", self._interface, methods)
        peer.set_properties(Title=self.title, InitiatingClientDescription=self._client)
        # The dictionary is also what keeps the connection alive.
        self._peers[connection] = peer
        connection.connect("closed", self._left)
        return True

    def _left(self, connection: Any, *_: object) -> None:
        self._peers.pop(connection, None)
        self._close_if_idle()

    def _abandoned(self, *_: object) -> None:
        if not self.started:
            log.info("client disconnected before calling Start")
            self._shut()

    def _start(self, call: Call) -> Values | None:
        first = not self.started
        if first:
            self.started = True
            Gio.bus_unwatch_name(self._initiator)
            self._next_step = GLib.idle_add(self._stop_work if self._cancelled else self._step)
        if self._result is None:
            return (first,)
        call.answer(first)
        # Too late for the signal that everybody got: once more, for this peer alone.
        self._peers[call.connection].signal("Finished", "(bs)", *self._result)
        return None

    def _cancel(self, _call: Call) -> Values:
        self._cancelled = True
        if self._next_step:
            GLib.source_remove(self._next_step)
            self._next_step = GLib.idle_add(self._stop_work)
        return ()

    def _stop_work(self) -> bool:
        self._work.close()
        self._finish(success=False, text=CANCELLED)
        return False

    def _step(self) -> bool:
        self._next_step = 0
        try:
            step = next(self._work)
        except StopIteration:
            self._finish(success=True, text="")
            return False
        except OperationFailed as failure:
            self._finish(success=False, text=str(failure))
            return False
        match step:
            case Emit():
                self._tell(step)
                self._next_step = GLib.idle_add(self._step)
            case Pause():
                self._next_step = GLib.timeout_add(round(step.seconds * 1000), self._step)
            case _:
                assert_never(step)
        return False

    def _finish(self, *, success: bool, text: str) -> None:
        log.info("txn %s %s%s", self.title, "successful" if success else "failed: ", text)
        self._next_step = 0
        self._ended(success)
        self._tell(Emit("Finished", "(bs)", (success, text)))
        self._result = (success, text)
        self._cut_off = GLib.timeout_add(round(self._force_close_s * 1000), self._force_close)
        self._close_if_idle()

    def _tell(self, emit: Emit) -> None:
        for peer in self._peers.values():
            with suppress(GLib.Error):  # it has hung up, and `_left` is still to come
                peer.signal(emit.name, emit.signature, *emit.values)

    def _close_if_idle(self) -> None:
        if self._result is not None and not self._peers:
            self._shut()

    def _force_close(self) -> bool:
        log.warning("forcibly closing transaction due to timeout")
        self._cut_off = 0
        self._shut()
        return False

    def _shut(self) -> None:
        if self._cut_off:
            GLib.source_remove(self._cut_off)
            self._cut_off = 0
        self._server.stop()
        peers, self._peers = self._peers, {}
        for connection in peers:
            connection.close(None, None)
        self._closed()
