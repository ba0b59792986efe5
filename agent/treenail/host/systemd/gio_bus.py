"""D-Bus with Gio: the system bus and peers on private sockets; the only user of gi and pydbus.

pydbus calls the methods on the bus. It always sends Hello and reads properties without a time
limit, so Gio talks to peers and reads properties.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import NamedTuple, cast

from gi.repository import Gio, GLib
from pydbus.bus import Bus

from treenail import errors, sanitize

_Option = bool | int | str | Sequence[str]
_Signal = tuple[str, tuple[object, ...]]
"""Name and arguments."""

_CONNECT_S = 25.0
# A longer text of a service would push the remedy out of the reason on the Node.
_TEXT_LIMIT = 500
_TICK_S = 1.0
_CLOSE_S = 5.0
_PROPERTIES = "org.freedesktop.DBus.Properties"
_BUSY = {
    # G_IO_ERROR_BUSY, for which GDBus has no registered error name.
    "org.gtk.GDBus.UnmappedGError.Quark._g_2dio_2derror_2dquark.Code26",
    "org.projectatomic.rpmostreed.Error.UpdateInProgress",
}
_REMEDIES = {
    "org.freedesktop.DBus.Error.AccessDenied": "run treenail as root",
    "org.freedesktop.DBus.Error.ServiceUnknown": "install and enable the service that owns {name}",
    "org.freedesktop.DBus.Error.NameHasNoOwner": "start the service that owns {name}",
    "org.freedesktop.DBus.Error.Spawn.ChildExited": "find out why the service that owns {name} "
    "fails to start: journalctl -b -p err",
    "org.freedesktop.DBus.Error.TimedOut": "find out why the service that owns {name} does not "
    "start in time: systemctl list-jobs",
}
_OTHER_REMEDY = "find its unit with: busctl status {name}; then see: journalctl -u UNIT"
_TYPE_REMEDY = "update treenail and the service that owns {name}: their interfaces differ"


class _Target(NamedTuple):
    """An interface of an object of a service."""

    service: str
    path: str
    interface: str


def make_argument(kind: str, value: object) -> object:
    """Make the argument of a call from its plain form, see `treenail.host.systemd.system_bus`."""
    if kind == "options":
        return _make_variants(cast("Mapping[str, _Option]", value))
    if kind == "unit":
        command, values = cast("tuple[Sequence[str], Mapping[str, _Option]]", value)
        # systemd replaces $NAME and ${NAME} in arguments, and $$ by $: systemd.service(5).
        words = [word.replace("$", "$$") for word in command]
        # The program, its arguments from argv[0] on, and whether a failure is ignored
        # (org.freedesktop.systemd1(5)).
        start = GLib.Variant("a(sasb)", [(command[0], words, False)])
        return [("ExecStart", start), *_make_variants(values).items()]
    return value


class GioBus:
    """Calls on the system bus and to peers; implements `system_bus.BusService`.

    It connects at the first call, and again after the bus closed the connection. For one thread.
    """

    def __init__(self, address: str = "") -> None:
        """``address`` is a D-Bus address; by default that of the system bus of this host."""
        self._address = address
        self._connection: _BusConnection | None = None
        self._proxies: dict[tuple[str, str], Mapping[str, object]] = {}
        self._numbers = count(1)
        self._sources: dict[int, _GioSignals] = {}

    def call_method(
        self,
        address: tuple[str, str, str],
        member: str,
        arguments: Sequence[tuple[str, object]],
        timeout_s: float,
    ) -> object:
        target = _Target(*address)
        with _translate_errors(f"call {target.service} {member}", target.service, timeout_s):
            try:
                method = getattr(self._get_proxy(target, timeout_s)[target.interface], member)
            except (KeyError, AttributeError) as error:
                raise errors.BusError(
                    f"cannot call {target.service} {member}: {target.path} has no such method of "
                    f"{target.interface}",
                    name="org.freedesktop.DBus.Error.UnknownMethod",
                    remedy=f"update the service that owns {target.service}",
                ) from error
            values = [make_argument(*argument) for argument in arguments]
            try:
                # Without the argument pydbus waits without a limit.
                reply: object = method(*values, timeout=timeout_s)
            except (TypeError, ValueError, OverflowError) as error:
                # pydbus compares the arguments with the introspection data of the service.
                raise errors.BusError(
                    f"cannot call {target.service} {member}: it takes other arguments: "
                    f"{sanitize.sanitize_text(str(error))}",
                    remedy=_TYPE_REMEDY.format(name=target.service),
                ) from error
            return reply

    def read_properties(self, address: tuple[str, str, str], timeout_s: float) -> dict[str, object]:
        target = _Target(*address)
        with _translate_errors(
            f"read the properties of {target.interface}", target.service, timeout_s
        ):
            return _get_all_properties(self._connect().gio, target, timeout_s)

    def subscribe(self, address: tuple[str, str, str]) -> int:
        return self._add_source(_GioSignals(self._connect(), _Target(*address)))

    def open_peer(self, address: str, interface: str, timeout_s: float) -> int:
        with _translate_errors(f"connect to {interface}", _find_owner(interface), timeout_s):
            connection = _BusConnection(address, Gio.DBusConnectionFlags.NONE, timeout_s)
        # It subscribes first, so that no signal of a later call is lost.
        return self._add_source(_GioPeer(connection, _Target("", "/", interface)))

    def call_peer(self, peer: int, member: str, timeout_s: float) -> object:
        source = self._sources[peer]
        interface = source.target.interface
        with _translate_errors(f"call {interface} {member}", _find_owner(interface), timeout_s):
            gio = source.connection.gio
            reply = _call_sync(gio, source.target, member, None, timeout_s).unpack()
            return reply[0] if reply else None

    def read_peer(self, peer: int, timeout_s: float) -> dict[str, object]:
        source = self._sources[peer]
        interface = source.target.interface
        operation = f"read the properties of {interface}"
        with _translate_errors(operation, _find_owner(interface), timeout_s):
            return _get_all_properties(source.connection.gio, source.target, timeout_s)

    def wait_for_signals(self, source: int) -> tuple[list[_Signal | None], bool]:
        return self._sources[source].wait()

    def close_source(self, source: int) -> None:
        self._sources.pop(source).close()

    def close_connection(self) -> None:
        connection, self._connection = self._connection, None
        self._proxies.clear()
        if connection is not None:
            connection.close_connection()

    def _add_source(self, source: "_GioSignals") -> int:
        number = next(self._numbers)
        self._sources[number] = source
        return number

    def _get_proxy(self, target: _Target, timeout_s: float) -> Mapping[str, object]:
        connection = self._connect()
        key = (target.service, target.path)
        if key not in self._proxies:
            # pydbus introspects the object here; its methods are those that the service reports.
            self._proxies[key] = Bus(connection.gio).get(*key, timeout=timeout_s)
        return self._proxies[key]

    def _connect(self) -> "_BusConnection":
        if self._connection is None or self._connection.gio.is_closed():
            self.close_connection()
            with _translate_errors("connect to the system bus", "", _CONNECT_S):
                # Not Gio.bus_get_sync(): that would return the same connection after the bus has
                # closed it.
                address = self._address or Gio.dbus_address_get_for_bus_sync(Gio.BusType.SYSTEM)
                # Only with this flag GDBus sends Hello, which a peer would reject.
                flags = Gio.DBusConnectionFlags.MESSAGE_BUS_CONNECTION
                self._connection = _BusConnection(address, flags, _CONNECT_S)
        return self._connection


class _GioSignals:
    """Signals of one interface, in order, for the thread that waits for them."""

    def __init__(self, connection: "_BusConnection", target: _Target) -> None:
        self.connection = connection
        self.target = target
        self._context = connection.context
        self._arrived: list[_Signal | None] = []
        # GDBus delivers signals in the context that is the default of this thread when it
        # subscribes.
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

    def wait(self) -> tuple[list[_Signal | None], bool]:
        """Wait for signals, for a second at most; return them, and whether the bus has closed."""
        while True:
            # Check before dispatching: signals that arrived before the end are queued by then.
            is_closed: bool = self.connection.gio.is_closed()
            self._run_pending()
            if self._arrived or is_closed:
                arrived, self._arrived = self._arrived, []
                return arrived, is_closed
            self._context.iteration(may_block=True)

    def close(self) -> None:
        """Unsubscribe and dispatch the rest, so that the context holds no callback."""
        self.connection.gio.signal_unsubscribe(self._subscription)
        self._timer.destroy()
        self._run_pending()

    def _run_pending(self) -> None:
        while self._context.pending():
            self._context.iteration(may_block=False)

    def _receive_signal(self, *signal: object) -> None:
        *_, member, values = signal
        self._arrived.append((str(member), tuple(GLib.Variant.unpack(values))))

    def _append_tick(self) -> bool:
        self._arrived.append(None)
        return True


class _GioPeer(_GioSignals):
    """One interface of the object ``/`` on a private socket: no bus, so no Hello and no names."""

    def close(self) -> None:
        """Close the connection: rpm-ostreed takes no other transaction before all peers closed."""
        super().close()
        self.connection.close_connection()


class _BusConnection:
    """A connection and its own main context, which gets all callbacks."""

    def __init__(self, address: str, flags: Gio.DBusConnectionFlags, timeout_s: float) -> None:
        """Connect, with a time limit for the handshake; raise GLib.Error."""
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
        # By default GLib sends this process SIGTERM when the bus closes.
        self.gio.set_exit_on_close(False)
        self.gio.connect("closed", lambda *_: over.append(True))

    def close_connection(self) -> None:
        with suppress(GLib.Error):  # already closed
            self.gio.close_sync(None)
        # The context keeps the connection, and so itself, alive until "closed" is dispatched.
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
    """Call ``action`` after so many seconds, and again as long as it returns True."""
    timer = GLib.Timeout(_to_milliseconds(seconds))
    timer.set_callback(lambda *_: action())
    timer.attach(context)
    return timer


def _call_sync(
    connection: Gio.DBusConnection,
    target: _Target,
    member: str,
    parameters: GLib.Variant | None,
    timeout_s: float,
    reply_type: str | None = None,
) -> GLib.Variant:
    return connection.call_sync(
        target.service or None,
        target.path,
        target.interface,
        member,
        parameters,
        GLib.VariantType(reply_type) if reply_type else None,
        Gio.DBusCallFlags.NONE,
        _to_milliseconds(timeout_s),
        None,
    )


def _get_all_properties(
    connection: Gio.DBusConnection, target: _Target, timeout_s: float
) -> dict[str, object]:
    parameters = GLib.Variant("(s)", (target.interface,))
    interface = _Target(target.service, target.path, _PROPERTIES)
    properties: dict[str, object]
    (properties,) = _call_sync(
        connection, interface, "GetAll", parameters, timeout_s, "(a{sv})"
    ).unpack()
    return properties


@contextmanager
def _use_context(context: GLib.MainContext) -> Iterator[None]:
    """Direct the callbacks of subscriptions made inside to ``context``."""
    context.push_thread_default()
    try:
        yield
    finally:
        context.pop_thread_default()


@contextmanager
def _translate_errors(operation: str, service: str, timeout_s: float) -> Iterator[None]:
    """Raise GLib.Error as `BusError`; ``service`` is a bus name for the remedy."""
    try:
        yield
    except GLib.Error as error:
        raise _make_bus_error(error, operation, service, timeout_s) from error


def _make_bus_error(
    error: GLib.Error, operation: str, service: str, timeout_s: float
) -> errors.BusError:
    remote: str = Gio.DBusError.get_remote_error(error) or ""
    text = sanitize.sanitize_text(
        error.message.removeprefix(f"GDBus.Error:{remote}: "), limit=_TEXT_LIMIT
    )
    if remote in _BUSY:
        return errors.BusyError(f"cannot {operation}: {text}", name=remote)
    kind = errors.BusError
    if error.matches(Gio.io_error_quark(), Gio.IOErrorEnum.TIMED_OUT) and not remote:
        kind, text = errors.BusTimeoutError, f"no answer within {timeout_s:g} s"
    if error.matches(Gio.io_error_quark(), Gio.IOErrorEnum.CANCELLED) and not remote:
        # The timer of `_BusConnection` has cancelled the handshake.
        kind, text = errors.BusTimeoutError, f"no connection within {timeout_s:g} s"
    remedy = _REMEDIES.get(remote, _OTHER_REMEDY)
    if error.matches(Gio.io_error_quark(), Gio.IOErrorEnum.INVALID_ARGUMENT) and not remote:
        remedy = _TYPE_REMEDY
    remedy = remedy.format(name=service) if service else ""
    return kind(f"cannot {operation}: {text}", name=remote, remedy=remedy)


def _find_owner(interface: str) -> str:
    """Return the bus name of the service that has this interface on a private socket."""
    return interface.rpartition(".")[0]


def _make_variants(values: Mapping[str, _Option]) -> dict[str, GLib.Variant]:
    return {
        # Files that may be missing (org.freedesktop.systemd1(5)).
        key: GLib.Variant("a(sb)", [(path, True) for path in cast("Sequence[str]", value)])
        if key == "EnvironmentFiles"
        else _make_variant(value)
        for key, value in values.items()
    }


def _make_variant(value: _Option) -> GLib.Variant:
    if isinstance(value, bool):
        return GLib.Variant("b", value)
    if isinstance(value, int):
        return GLib.Variant("t", value)
    if isinstance(value, str):
        return GLib.Variant("s", value)
    return GLib.Variant("as", list(value))


def _to_milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))
