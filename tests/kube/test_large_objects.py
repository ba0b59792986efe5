"""Lists and watches of objects that are too many or too large: pages shrink, memory is bounded."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kube.nodes import Nodes
from tests.kube.server import Json, serving
from tests.kube.test_transport import kubeconfig
from tests.waiting import wait_until
from treenail import memory
from treenail.clocks import SystemClock
from treenail.errors import GoneError, TooLargeError
from treenail.kube.api_client import Client, ResponseStream
from treenail.kube.informer import Informer
from treenail.kube.request import ApiRequest, ApiResponse, check_length
from treenail.kube.resources import NODES, PODDISRUPTIONBUDGETS
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.kube.watch import WatchScope
from treenail.retry import Backoff

PAGE, OBJECT = 5_000, 40_000


class Shelf:
    """A list of budgets of these sizes, in pages; it limits responses as both transports do."""

    def __init__(self, *sizes: int, is_named: bool = True) -> None:
        self.sizes = sizes
        self.limits: list[str] = []
        self.largest = 0
        self.expires = False
        self._metadata_bytes = 0 if is_named else 2 * OBJECT

    def send(self, request: ApiRequest) -> ApiResponse:
        if "PartialObjectMetadataList" not in request.accept:
            self.limits.append(request.params.get("limit", "all"))
        start = int(request.params.get("continue", "0"))
        if start and self.expires:
            status = {"kind": "Status", "code": 410, "reason": "Expired"}
            return ApiResponse(410, json.dumps(status).encode())
        end = start + int(request.params.get("limit", len(self.sizes)))
        metadata: Json = {"resourceVersion": "7"}
        if end < len(self.sizes):
            metadata["continue"] = str(end)
        items = [
            self._build_item(number, request) for number in range(start, min(end, len(self.sizes)))
        ]
        body = json.dumps({"metadata": metadata, "items": items}).encode()
        check_length(len(body), request.max_bytes, "GET")
        self.largest = max(self.largest, len(body))
        return ApiResponse(200, body)

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> ResponseStream:
        raise NotImplementedError("this transport has no streams")

    def close(self) -> None:
        """Do nothing."""

    def _build_item(self, number: int, request: ApiRequest) -> Json:
        fill = "x" * self._metadata_bytes
        item: Json = {"metadata": {"name": f"b{number}", "namespace": "app", "fill": fill}}
        return item if "Partial" in request.accept else {**item, "spec": "x" * self.sizes[number]}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([100] * 10, ["8", "8"]),
        ([1500] * 10, ["8", "4", "2", "2", "2", "2", "2"]),
        ([3500] * 3, ["8", "4", "2", "1", "1", "1"]),
        # One object may have more bytes than a page.
        ([100, 15_000, 100], ["8", "4", "2", "1", "2", "1", "1"]),
        # Small objects again: the pages grow up to the first limit.
        ([3500, 3500, *[100] * 20], ["8", "4", "2", "1", "1", "1", "2", "4", "8", "8"]),
    ],
    ids=["small", "half", "single", "larger than a page", "growing"],
)
def test_page_that_is_too_large_is_requested_with_fewer_objects(
    sizes: list[int], expected: list[str]
) -> None:
    shelf = Shelf(*sizes)
    listed = Client(shelf, page_size=8, page_bytes=PAGE).list(PODDISRUPTIONBUDGETS)
    assert len(listed.items) == len(sizes)
    assert shelf.limits == expected
    assert shelf.largest <= max(PAGE, *sizes) + 200


@pytest.mark.parametrize(
    ("shelf", "text", "remedy"),
    [
        (
            Shelf(100, 60_000, 100),
            r"list poddisruptionbudgets: one object has more than 40000 bytes",
            "delete it: kubectl delete poddisruptionbudgets b1 -n app",
        ),
        (Shelf(60_000, is_named=False), "the response is longer than 40000 bytes", ""),
    ],
    ids=["named", "metadata too large"],
)
def test_object_that_is_too_large_alone_is_named(shelf: Shelf, text: str, remedy: str) -> None:
    with pytest.raises(TooLargeError, match=text) as caught:
        Client(shelf, page_size=8, page_bytes=PAGE).list(PODDISRUPTIONBUDGETS)
    assert caught.value.remedy == remedy


def test_parsed_list_starts_again_when_its_token_expired() -> None:
    shelf = Shelf(*[100] * 5)
    shelf.expires = True
    client = Client(shelf, page_size=2)
    assert len(client.list_parsed(PODDISRUPTIONBUDGETS, lambda page: page.items)) == 5
    assert shelf.limits == ["2", "2", "all"]
    with pytest.raises(GoneError):
        list(client.list_pages(PODDISRUPTIONBUDGETS))


class NoPause(Backoff):
    """Counts the pauses, which are short."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses = 0

    def next_pause_s(self) -> float:
        self.pauses += 1
        return 0.01


class Place:
    """An informer with a small limit, of Nodes whose label ``fill`` it stores."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.nodes = Nodes()
        self.lost: list[str] = []
        self.changes: list[str] = []
        self._serving = serving(directory, self.nodes.answer)
        server = self._serving.__enter__()
        self._transport = HttpTransport(read_kubeconfig(kubeconfig(server)), SystemClock())
        self.informer = Informer(
            Client(self._transport, page_bytes=PAGE),
            WatchScope(NODES),
            SystemClock(),
            self._transform,
            on_lost=lambda error: self.lost.append(f"{error}; {error.remedy}"),
            max_bytes=max_bytes,
        )
        self.informer.add_handler(lambda key, *_: self.changes.append(key))
        self.usual, self.rare = NoPause(), NoPause()
        self.informer._watch._backoff = self.usual
        self.informer._watch._rare_backoff = self.rare

    def _transform(self, document: Json) -> str | None:
        return document["metadata"]["labels"].get("fill")  # type: ignore[index,call-overload]  # a dict

    def close(self) -> None:
        self.informer.stop()
        self._transport.close()
        self.nodes.end_watches()
        self._serving.__exit__(None, None, None)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path, 10_000)
    yield found
    found.close()


def wait_for_error(place: Place) -> None:
    wait_until(lambda: "list nodes: " in place.informer.error)


def add_nodes_first(place: Place) -> None:
    for name in ("a", "b", "c"):
        place.nodes.put(name, fill="x" * 4000)
    place.informer.start()


def add_nodes_during_watch(place: Place) -> None:
    place.nodes.put("a", fill="x" * 4000)
    place.informer.start()
    assert place.informer.wait_until_synced(10)
    wait_until(lambda: place.nodes.watching)
    for name in ("b", "c"):
        place.nodes.put(name, fill="x" * 4000)


@pytest.mark.parametrize("add", [add_nodes_first, add_nodes_during_watch])
def test_informer_above_its_limit_is_not_synced_until_there_is_room(
    place: Place, add: Callable[[Place], None]
) -> None:
    add(place)
    wait_for_error(place)
    assert place.lost[0] == (
        "list nodes: 2 objects take 10000 bytes of memory, and c does not fit; delete nodes"
    )
    assert place.informer.get_all().keys() == {"a", "b"}
    assert "does not fit" in place.informer.stale_reason
    assert place.informer.has_synced == (add is add_nodes_during_watch)
    assert place.rare.pauses > place.usual.pauses == 0

    # A list that is too large deletes what it lacks: the next one has room.
    place.nodes.remove("a")
    wait_until(lambda: not place.informer.error)
    assert place.informer.get_all().keys() == {"b", "c"}
    assert place.informer.has_synced


def test_object_that_shrinks_is_stored_above_the_limit(place: Place) -> None:
    add_nodes_first(place)
    wait_for_error(place)
    place.nodes.put("b", fill="x" * 100)
    wait_until(lambda: not place.informer.error)
    assert place.informer.get_all().keys() == {"a", "b", "c"}


def test_objects_without_a_value_count_too(place: Place) -> None:
    for number in range(30):
        place.nodes.put(f"node-{number}")
    place.informer.start()
    wait_for_error(place)
    assert "objects take 10000 bytes" in place.lost[0]


def test_namespace_with_most_bytes_is_named(place: Place) -> None:
    place.informer._sizes = {"app/a": 100, "spam/a": 70, "spam/b": 70}
    found = place.informer._find_largest_namespace()
    assert found == " of namespace spam, which has the most bytes"


def test_event_that_is_too_large_ends_the_watch_and_lists(place: Place) -> None:
    place.nodes.put("a", fill="x")
    place.informer.start()
    wait_until(lambda: place.nodes.watching)
    place.nodes.put("b", fill="x" * 2 * OBJECT)
    wait_until(lambda: "longer than 40000 bytes" in place.informer.error)
    assert "longer than" in place.lost[0]
    assert place.informer.find("b") is None


def test_measured_bytes_include_what_a_value_refers_to() -> None:
    shared = "x" * 1000
    assert memory.measure_bytes([shared, shared]) < memory.measure_bytes([shared, "y" * 1000])
    assert memory.measure_bytes({"a": ["x" * 5000]}) > 5000
    assert memory.measure_bytes(Backoff) == memory.measure_bytes(json) == 0
