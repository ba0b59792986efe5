"""D-Bus: calls on the system bus, signals, and peers on private sockets.

`treenail.host.systemd.gio_bus` talks to D-Bus, in this process or, for the agent, in a process that
lives while the agent works (`treenail.host.systemd.bus_process`). This module imports neither gi
nor pydbus: together they take 11 MiB.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, Self

BusOption = bool | str | Sequence[str]


@dataclass(frozen=True, slots=True)
class BusInterface:
    """An interface of an object of a service."""

    service: str
    path: str
    interface: str


@dataclass(frozen=True, slots=True)
class BusSignal:
    """A received signal: its name and its arguments."""

    member: str
    values: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class BusOptions:
    """An ``a{sv}`` argument; each value becomes a variant of type ``b``, ``s`` or ``as``."""

    values: Mapping[str, BusOption]


@dataclass(frozen=True, slots=True)
class UnitProperties:
    """The ``a(sv)`` of a transient service that runs the command; numbers are ``t``."""

    command: Sequence[str]
    values: Mapping[str, BusOption | int]


PlainInterface = tuple[str, str, str]
"""Service, path and interface."""
PlainArgument = tuple[str, object]
"""The kind of the argument (``options``, ``unit`` or ``plain``), and its value."""
PlainSignal = tuple[str, tuple[object, ...]]
"""Name and arguments."""


class BusService(Protocol):
    """Connections to the system bus and to peers. Every method raises only `BusError`.

    Its values are plain, so that they can go to another process. A source is a subscription or a
    peer; its number is valid until `close_source`.
    """

    def call_method(
        self,
        address: PlainInterface,
        member: str,
        arguments: Sequence[PlainArgument],
        timeout_s: float,
    ) -> object: ...
    def read_properties(self, address: PlainInterface, timeout_s: float) -> dict[str, object]: ...
    def subscribe(self, address: PlainInterface) -> int: ...
    def open_peer(self, address: str, interface: str, timeout_s: float) -> int: ...
    def call_peer(self, peer: int, member: str, timeout_s: float) -> object: ...
    def read_peer(self, peer: int, timeout_s: float) -> dict[str, object]: ...
    def wait_for_signals(self, source: int) -> tuple[Sequence[PlainSignal | None], bool]:
        """Wait for signals of the source; return them and whether its connection has closed.

        None among the signals is a tick. There is one each second.
        """
        ...

    def close_source(self, source: int) -> None: ...
    def close_connection(self) -> None: ...


class SystemBus:
    """Calls on the system bus. Each has a time limit and raises only `BusError`. For one thread.

    It connects at the first call, and again after the bus closed the connection.
    """

    def __init__(self, address: str = "", *, service: BusService | None = None) -> None:
        """``address`` is a D-Bus address; by default that of the system bus of this host.

        ``service`` connects instead of this process.
        """
        self._address = address
        self._service = service

    def call_method(
        self, target: BusInterface, member: str, *arguments: object, timeout_s: float
    ) -> object:
        """Return the result: None, the value, or a tuple of several values."""
        plain = [_make_plain(argument) for argument in arguments]
        return self._get_service().call_method(_locate(target), member, plain, timeout_s)

    def read_properties(self, target: BusInterface, *, timeout_s: float) -> dict[str, object]:
        """Return all properties of the interface; those of pydbus have no time limit."""
        return self._get_service().read_properties(_locate(target), timeout_s)

    @contextmanager
    def receive_signals(self, target: BusInterface) -> Iterator["BusSignals"]:
        """Receive every signal of the interface inside the context."""
        service = self._get_service()
        source = service.subscribe(_locate(target))
        try:
            yield BusSignals(service, source)
        finally:
            service.close_source(source)

    def open_peer(self, address: str, interface: str, *, timeout_s: float) -> "BusPeer":
        """Connect to a peer; the caller must close it."""
        return BusPeer(address, interface, timeout_s=timeout_s, service=self._get_service())

    def close_connection(self) -> None:
        """Disconnect from the bus; the next call connects again."""
        if self._service is not None:
            self._service.close_connection()

    def _get_service(self) -> BusService:
        if self._service is None:
            self._service = _load_gio_bus(self._address)
        return self._service


class BusSignals:
    """Signals of one source, in order, for the thread that calls `run_until`."""

    def __init__(self, service: BusService, source: int) -> None:
        self._service = service
        self._source = source
        self._arrived: deque[BusSignal | None] = deque()

    def run_until(self, handle: Callable[[BusSignal | None], bool]) -> bool:
        """Call ``handle`` with each signal until it returns True; False when the bus closed first.

        ``handle`` also gets None once a second, so that it can check a time limit.
        """
        while True:
            while self._arrived:
                if handle(self._arrived.popleft()):
                    return True
            arrived, is_closed = self._service.wait_for_signals(self._source)
            self._arrived.extend(signal and BusSignal(*signal) for signal in arrived)
            if is_closed:
                return any(handle(self._arrived.popleft()) for _ in range(len(self._arrived)))


class BusPeer:
    """One interface of the object ``/`` on a private socket: no bus, so no Hello and no names.

    It subscribes first, so that no signal of a later call is lost. The caller must close it.
    """

    def __init__(
        self, address: str, interface: str, *, timeout_s: float, service: BusService | None = None
    ) -> None:
        self._service = service or _load_gio_bus("")
        self._peer = self._service.open_peer(address, interface, timeout_s)
        self._signals = BusSignals(self._service, self._peer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_connection()

    def call_method(self, member: str, *, timeout_s: float) -> object:
        """Return the first result of a method without arguments; None without a result."""
        return self._service.call_peer(self._peer, member, timeout_s)

    def read_properties(self, *, timeout_s: float) -> dict[str, object]:
        """Return all properties of the interface."""
        return self._service.read_peer(self._peer, timeout_s)

    def run_until(self, handle: Callable[[BusSignal | None], bool]) -> bool:
        """Dispatch signals as `BusSignals.run_until` does."""
        return self._signals.run_until(handle)

    def close_connection(self) -> None:
        """Close the connection: rpm-ostreed takes no other transaction before all peers closed."""
        self._service.close_source(self._peer)


def make_options(values: Mapping[str, BusOption]) -> BusOptions:
    """Make an ``a{sv}`` argument; each value becomes a variant of type ``b``, ``s`` or ``as``."""
    return BusOptions(values)


def make_unit_properties(
    command: Sequence[str], values: Mapping[str, BusOption | int]
) -> UnitProperties:
    """Make the ``a(sv)`` of a transient service that runs the command; numbers are ``t``."""
    return UnitProperties(command, values)


def _locate(target: BusInterface) -> PlainInterface:
    return target.service, target.path, target.interface


def _make_plain(argument: object) -> PlainArgument:
    if isinstance(argument, BusOptions):
        return "options", dict(argument.values)
    if isinstance(argument, UnitProperties):
        return "unit", (list(argument.command), dict(argument.values))
    return "plain", argument


def _load_gio_bus(address: str) -> BusService:
    # Imported late: gi and pydbus take 11 MiB, and the agent at rest does without them.
    from treenail.host.systemd.gio_bus import GioBus

    return GioBus(address)
