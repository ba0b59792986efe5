"""Who registered with rpm-ostreed, and how it calls them."""

from typing import Any

from gi.repository import Gio

from treenail_lab.machine.bus.objects import MethodCall, query_credential, read_option


class RegisteredClients:
    """The registered clients; one that leaves the bus is forgotten."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._names: dict[str, str] = {}
        self._watches: dict[str, int] = {}

    @property
    def client_count(self) -> int:
        return len(self._names)

    def register_client(self, call: MethodCall) -> None:
        """Remember the caller under the ``id`` it gives."""
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
        """Forget the caller; nothing happens if it is not known."""
        self._names.pop(sender, None)
        watch = self._watches.pop(sender, 0)
        if watch:
            Gio.bus_unwatch_name(watch)

    def describe_client(self, sender: str) -> str:
        """The caller in one phrase, as the journal and the status show it."""
        name = self._names.get(sender)
        identity = f"id:{name} " if name else ""
        user = query_credential(self._connection, "GetConnectionUnixUser", sender)
        return f"client({identity}dbus:{sender.removeprefix(':')} uid:{user})"
