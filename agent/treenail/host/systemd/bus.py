"""The system bus and peers on private sockets: connections, time limits, errors.

The only module that knows gi and pydbus. pydbus makes the calls of the bus; Gio does what pydbus
can't: peers that expect no Hello, file descriptors, properties with a time limit.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from gi.repository import Gio, GLib
from pydbus.bus import Bus

from treenail.errors import BusError, BusyError
from treenail.host.system.sanitize import sanitize_text

NO_REPLY = "org.freedesktop.DBus.Error.NoReply"

_CONNECT_S = 25.0
_TICK_S = 1.0
_CLOSE_S = 5.0
_PROPERTIES = "org.freedesktop.DBus.Properties"
_BUSY = {
    # A GLib service that answers G_IO_ERROR_BUSY, and it has no better name for it.
    "org.gtk.GDBus.UnmappedGError.Quark._g_2dio_2derror_2dquark.Code26",
    "org.projectatomic.rpmostreed.Error.UpdateInProgress",
}
_REMEDIES = {
    "org.freedesktop.DBus.Error.AccessDenied": "run treenail as root",
    "org.freedesktop.DBus.Error.ServiceUnknown": "install and enable the service that owns {name}",
    "org.freedesktop.DBus.Error.NameHasNoOwner": "start the service that owns {name}",
    "org.freedesktop.DBus.Error.Spawn.ChildExited": "see why the service of {name} fails to start",
    "org.freedesktop.DBus.Error.TimedOut": "see why the service of {name} does not start in time",
}


@dataclass(frozen=True, slots=True)
class BusInterface:
    """An interface of an object of a service."""

    service: str
    path: str
    interface: str


@dataclass(frozen=True, slots=True)
class BusSignal:
    """A signal as it arrived: its member name and its arguments."""

    member: str
    values: tuple[object, ...]


BusOption = bool | str | Sequence[str]


def make_options(values: Mapping[str, BusOption]) -> dict[str, object]:
    """An ``a{sv}`` argument: each value in a variant of its own type (``b``, ``s`` or ``as``)."""
    return {key: _make_variant(value) for key, value in values.items()}


def make_unit_properties(
    command: Sequence[str], values: Mapping[str, BusOption | int]
) -> list[tuple[str, object]]:
    """The ``a(sv)`` of a transient service that runs the command; numbers are ``t``."""
    start = GLib.Variant("a(sasb)", [(command[0], list(command), False)])
    return [("ExecStart", start), *((key, _make_variant(value)) for key, value in values.items())]


class SystemBus:
    """Calls on the system bus; each has a time limit and raises only `BusError`.

    Connects when first used, and again when used after the bus went away. To be used by one thread.
    """

    def __init__(self, address: str = "") -> None:
        """``address`` is a D-Bus address; when empty, the one every program of this host uses."""
        self._address = address
        self._connection: _BusConnection | None = None
        self._proxies: dict[tuple[str, str], Mapping[str, object]] = {}

    def call_method(
        self, target: BusInterface, member: str, *arguments: object, timeout_s: float
    ) -> object:
        """The method's result: None, the value, or a tuple when there are several."""
        with _translate_errors(f"{target.service} {member}", target.service, timeout_s):
            try:
                method = getattr(self._get_proxy(target, timeout_s)[target.interface], member)
            except (KeyError, AttributeError) as error:
                raise BusError(
                    f"{target.service} {member} failed: {target.path} has no such method of "
                    f"{target.interface}",
                    name="org.freedesktop.DBus.Error.UnknownMethod",
                    remedy=f"update the service that owns {target.service}",
                ) from error
            reply: object = method(*arguments, timeout=timeout_s)
            return reply

    def call_for_fd(
        self, target: BusInterface, member: str, *arguments: str, timeout_s: float
    ) -> int:
        """The file descriptor that a method of string arguments answers; the caller closes it."""
        with _translate_errors(f"{target.service} {member}", target.service, timeout_s):
            reply, descriptors = self._connect().gio.call_with_unix_fd_list_sync(
                target.service,
                target.path,
                target.interface,
                member,
                GLib.Variant("(" + "s" * len(arguments) + ")", arguments),
                GLib.VariantType("(h)"),
                Gio.DBusCallFlags.NONE,
                _to_milliseconds(timeout_s),
                None,
                None,
            )
            return int(descriptors.get(reply.unpack()[0]))

    def read_properties(self, target: BusInterface, *, timeout_s: float) -> dict[str, object]:
        """All properties of the interface, now; pydbus' own have no time limit."""
        with _translate_errors(f"properties of {target.interface}", target.service, timeout_s):
            return _get_all_properties(self._connect().gio, target, timeout_s)

    @contextmanager
    def receive_signals(self, target: BusInterface) -> Iterator["BusSignals"]:
        """Every signal of the interface that is emitted from now on, while within."""
        signals = BusSignals(self._connect(), target)
        try:
            yield signals
        finally:
            signals.unsubscribe()

    def close_connection(self) -> None:
        """Leave the bus; the next use connects again."""
        connection, self._connection = self._connection, None
        self._proxies.clear()
        if connection is not None:
            connection.close_connection()

    def _get_proxy(self, target: BusInterface, timeout_s: float) -> Mapping[str, object]:
        connection = self._connect()
        key = (target.service, target.path)
        if key not in self._proxies:
            self._proxies[key] = Bus(connection.gio).get(*key, timeout=timeout_s)
        return self._proxies[key]

    def _connect(self) -> "_BusConnection":
        if self._connection is None or self._connection.gio.is_closed():
            self.close_connection()
            with _translate_errors("connecting to the system bus", "", _CONNECT_S):
                address = self._address or Gio.dbus_address_get_for_bus_sync(Gio.BusType.SYSTEM)
                flags = Gio.DBusConnectionFlags.MESSAGE_BUS_CONNECTION
                self._connection = _BusConnection(address, flags, _CONNECT_S)
        return self._connection


class BusSignals:
    """Signals of one interface, handed to whoever is in `run_until`, in that thread and in order."""

    def __init__(self, connection: "_BusConnection", target: BusInterface) -> None:
        self._connection = connection
        self._context = connection.context
        self._arrived: deque[BusSignal | None] = deque()
        with _use_context(self._context):
            self._subscription = connection.gio.signal_subscribe(
                target.service or None,
                target.interface,
                None,
                target.path,
                None,
                Gio.DBusSignalFlags.NONE,
                self._receive_signal,
            )
        self._timer = _start_timer(self._context, _TICK_S, self._append_tick)

    def run_until(self, handle: Callable[[BusSignal | None], bool]) -> bool:
        """Hand over signals until ``handle`` answers True; False when the connection closed first.

        ``handle`` also gets None, once a second, so that it can look at a clock.
        """
        while True:
            # Asked first: all that arrived before the end is in the context by then.
            closed = self._connection.gio.is_closed()
            self._run_pending()
            while self._arrived:
                if handle(self._arrived.popleft()):
                    return True
            if closed:
                return False
            self._context.iteration(may_block=True)

    def unsubscribe(self) -> None:
        """Unsubscribe, and leave nothing behind in the context."""
        self._connection.gio.signal_unsubscribe(self._subscription)
        self._timer.destroy()
        self._run_pending()

    def _run_pending(self) -> None:
        while self._context.pending():
            self._context.iteration(may_block=False)

    def _receive_signal(self, *signal: object) -> None:
        *_, member, values = signal
        self._arrived.append(BusSignal(str(member), tuple(GLib.Variant.unpack(values))))

    def _append_tick(self) -> bool:
        self._arrived.append(None)
        return True


class BusPeer:
    """One interface of ``/`` on a private socket: no bus, so no Hello and no names.

    Subscribed from the start, so that no signal of what is called then is lost. Must be closed.
    """

    def __init__(self, address: str, interface: str, *, timeout_s: float) -> None:
        self._target = BusInterface("", "/", interface)
        with _translate_errors(f"connecting to {interface}", "", timeout_s):
            self._connection = _BusConnection(address, Gio.DBusConnectionFlags.NONE, timeout_s)
        self._signals = BusSignals(self._connection, self._target)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close_connection()

    def call_method(self, member: str, *, timeout_s: float) -> object:
        """The first result of a method without arguments; None when it has no result."""
        with _translate_errors(f"{self._target.interface} {member}", "", timeout_s):
            reply = _call_sync(self._connection.gio, self._target, member, None, timeout_s).unpack()
            return reply[0] if reply else None

    def read_properties(self, *, timeout_s: float) -> dict[str, object]:
        """All properties of the interface, now."""
        with _translate_errors(f"properties of {self._target.interface}", "", timeout_s):
            return _get_all_properties(self._connection.gio, self._target, timeout_s)

    def run_until(self, handle: Callable[[BusSignal | None], bool]) -> bool:
        """As `BusSignals.run_until`."""
        return self._signals.run_until(handle)

    def close_connection(self) -> None:
        """Hang up; the other side may wait for that."""
        self._signals.unsubscribe()
        self._connection.close_connection()


class _BusConnection:
    """A connection and the context, its own, that gets all that is called back."""

    def __init__(self, address: str, flags: Gio.DBusConnectionFlags, timeout_s: float) -> None:
        """Raises GLib's error; a handshake that hangs is given up."""
        self.context = GLib.MainContext()
        self._closed: list[bool] = []
        over, results = self._closed, list[Gio.AsyncResult]()
        cancellable = Gio.Cancellable()
        limit = _start_timer(self.context, timeout_s, lambda: cancellable.cancel() is True)
        with _use_context(self.context):
            Gio.DBusConnection.new_for_address(
                address,
                flags | Gio.DBusConnectionFlags.AUTHENTICATION_CLIENT,
                None,
                cancellable,
                lambda _source, result: results.append(result),
            )
            while not results:
                self.context.iteration(may_block=True)
        limit.destroy()
        self.gio = Gio.DBusConnection.new_for_address_finish(results[0])
        # Else GLib ends this process when the bus goes away.
        self.gio.set_exit_on_close(False)
        self.gio.connect("closed", lambda *_: over.append(True))

    def close_connection(self) -> None:
        with suppress(GLib.Error):  # it is closed already
            self.gio.close_sync(None)
        # The context holds on to the connection, and so to itself, until the end is called back.
        limit = _start_timer(self.context, _CLOSE_S, self._stop_waiting)
        while not self._closed:
            self.context.iteration(may_block=True)
        limit.destroy()

    def _stop_waiting(self) -> bool:
        self._closed.append(True)
        return False


def _start_timer(
    context: GLib.MainContext, seconds: float, action: Callable[[], bool]
) -> GLib.Source:
    """Calls ``action`` after so many seconds, and again while it answers True."""
    timer = GLib.Timeout(_to_milliseconds(seconds))
    timer.set_callback(lambda *_: action())
    timer.attach(context)
    return timer


def _call_sync(
    connection: Gio.DBusConnection,
    target: BusInterface,
    member: str,
    parameters: GLib.Variant | None,
    timeout_s: float,
) -> GLib.Variant:
    return connection.call_sync(
        target.service or None,
        target.path,
        target.interface,
        member,
        parameters,
        None,
        Gio.DBusCallFlags.NONE,
        _to_milliseconds(timeout_s),
        None,
    )


def _get_all_properties(
    connection: Gio.DBusConnection, target: BusInterface, timeout_s: float
) -> dict[str, object]:
    wanted = GLib.Variant("(s)", (target.interface,))
    holder = BusInterface(target.service, target.path, _PROPERTIES)
    found: dict[str, object]
    (found,) = _call_sync(connection, holder, "GetAll", wanted, timeout_s).unpack()
    return found


@contextmanager
def _use_context(context: GLib.MainContext) -> Iterator[None]:
    """Within, ``context`` gets the callbacks of what this thread subscribes to."""
    context.push_thread_default()
    try:
        yield
    finally:
        context.pop_thread_default()


@contextmanager
def _translate_errors(operation: str, service: str, timeout_s: float) -> Iterator[None]:
    """Within, GLib's errors become ours; ``service`` is the service's, for the remedy."""
    try:
        yield
    except GLib.Error as error:
        raise _make_bus_error(error, operation, service, timeout_s) from error


def _make_bus_error(error: GLib.Error, operation: str, service: str, timeout_s: float) -> BusError:
    remote: str = Gio.DBusError.get_remote_error(error) or ""
    text = sanitize_text(error.message.removeprefix(f"GDBus.Error:{remote}: "))
    if remote in _BUSY:
        return BusyError(f"{operation} is refused: {text}", name=remote)
    if error.matches(Gio.io_error_quark(), Gio.IOErrorEnum.TIMED_OUT) and not remote:
        text = f"no answer within {timeout_s:g} s"
    if error.matches(Gio.io_error_quark(), Gio.IOErrorEnum.CANCELLED) and not remote:
        text = f"no connection within {timeout_s:g} s"
    remedy = _REMEDIES.get(remote, "").format(name=service)
    return BusError(f"{operation} failed: {text}", name=remote, remedy=remedy)


def _make_variant(value: BusOption | int) -> GLib.Variant:
    if isinstance(value, bool):
        return GLib.Variant("b", value)
    if isinstance(value, int):
        return GLib.Variant("t", value)
    if isinstance(value, str):
        return GLib.Variant("s", value)
    return GLib.Variant("as", list(value))


def _to_milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))
