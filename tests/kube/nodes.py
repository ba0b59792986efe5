"""A server with Nodes that lists and watches like the API server."""

import threading
from collections.abc import Callable

from tests.kube.server import Exchange, Json, Seen


class Nodes:
    """Nodes that a test changes while clients watch; every change is a new version."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.version = 100
        self.objects: dict[str, Json] = {}
        self.watching = 0
        self.refuse_lists: Callable[[Exchange], None] | None = None
        self.refuse_watches: Callable[[Exchange], None] | None = None
        self._oldest = 0
        self._events: list[tuple[int, Json]] = []
        self._end: tuple[int, Callable[[Exchange], None]] = (0, Exchange.end_stream)

    def put(self, name: str, **labels: str) -> None:
        with self.changed:
            kind = "MODIFIED" if name in self.objects else "ADDED"
            self.version += 1
            self.objects[name] = {
                "kind": "Node",
                "metadata": {
                    "name": name,
                    "uid": f"uid-{name}",
                    "resourceVersion": str(self.version),
                    "labels": labels,
                },
            }
            self._tell(kind, self.objects[name])

    def remove(self, name: str) -> None:
        with self.changed:
            self.version += 1
            found = self.objects.pop(name)
            metadata = found["metadata"] | {"resourceVersion": str(self.version)}  # type: ignore[operator]  # a dict
            self._tell("DELETED", {**found, "metadata": metadata})

    def bookmark(self) -> None:
        """Send a bookmark, as after many changes of other objects."""
        with self.changed:
            self.version += 1000
            metadata = {"resourceVersion": str(self.version)}
            self._tell("BOOKMARK", {"kind": "Node", "metadata": metadata})

    def repeat(self, name: str) -> None:
        """Send an unchanged object again."""
        with self.changed:
            self._tell("MODIFIED", self.objects[name])

    def expire(self) -> None:
        """Expire all versions before this one: watches from them get 410."""
        with self.changed:
            self._oldest = self.version

    def end_watches(self, how: Callable[[Exchange], None] = Exchange.end_stream) -> None:
        with self.changed:
            self._end = (self._end[0] + 1, how)
            self.changed.notify_all()

    def answer(self, exchange: Exchange) -> None:
        if exchange.seen.params.get("watch") == "true":
            (self.refuse_watches or self._watch)(exchange)
        else:
            (self.refuse_lists or self._list)(exchange)

    def _tell(self, kind: str, found: Json) -> None:
        self._events.append((self.version, {"type": kind, "object": found}))
        self.changed.notify_all()

    def _list(self, exchange: Exchange) -> None:
        with self.changed:
            exchange.reply(
                {
                    "kind": "NodeList",
                    "metadata": {"resourceVersion": str(self.version)},
                    "items": list(self.objects.values()),
                }
            )

    def _watch(self, exchange: Exchange) -> None:
        version = int(exchange.seen.params["resourceVersion"])
        with self.changed:
            if version < self._oldest:
                exchange.refuse(410, "Expired", "too old resource version")
                return
            exchange.begin_stream()
            sent = len(self._events) - sum(at > version for at, _ in self._events)
            ends = self._end[0]
            self.watching += 1
            self.changed.notify_all()
            try:
                while True:
                    for _, event in self._events[sent:]:
                        exchange.send_line(event)
                    sent = len(self._events)
                    if self._end[0] != ends:
                        break
                    self.changed.wait(10)
                self._end[1](exchange)
            finally:
                self.watching -= 1


def lists(seen: list[Seen]) -> list[Seen]:
    return [one for one in seen if "watch" not in one.params]


def watches(seen: list[Seen]) -> list[Seen]:
    return [one for one in seen if "watch" in one.params]
