"""A watch says when its objects may be outdated, and lists again on request.

The watch runs on the test's thread, against a scripted server and a clock that stands still.
"""

import json
from collections.abc import Callable, Iterator

import pytest

from tests.fakes.clock import FakeClock
from tests.kube.cluster import Json, refusal, reply
from treenail.errors import GoneError, UnreachableError
from treenail.kube.api_client import Client
from treenail.kube.request import ApiRequest, ApiResponse
from treenail.kube.resources import NODES
from treenail.kube.watch import (
    CHECK_AFTER_S,
    SETTLE_S,
    STALE_AFTER_S,
    ResourceWatch,
    WatchScope,
)
from treenail.retry import Backoff

Step = Callable[[], Json | None]
"""Runs while the watch waits for an event; returns the next event, or None."""


def node(name: str, version: int) -> Json:
    return {"metadata": {"name": name, "uid": name, "resourceVersion": str(version)}}


def page(version: int, *items: Json, more: str = "") -> ApiResponse:
    metadata = {"resourceVersion": str(version), "continue": more}
    return reply({"metadata": metadata, "items": list(items)})


def event(kind: str, name: str, version: int) -> Json:
    return {"type": kind, "object": node(name, version)}


class Script:
    """Answers lists and watches in turn, and stops the watch at the end."""

    def __init__(self) -> None:
        self.lists: list[ApiResponse | Exception] = []
        self.streams: list[list[Step] | Exception] = []
        self.requests: list[str] = []
        self.reported: list[tuple[str, bool]] = []
        self.lost: list[str] = []
        self.clock = FakeClock()
        self.closed = False
        self.watch = ResourceWatch(
            Client(self, page_size=2),
            WatchScope(NODES),
            self.clock,
            on_change=lambda key, found: self.reported.append((key, found is not None)),
            on_lost=lambda _error: self.lost.append(self.watch.stale_reason),
            backoff=Backoff(first_s=0.0, max_s=0.0),
        )

    def run(self) -> None:
        self.watch.run()

    def send(self, request: ApiRequest) -> ApiResponse:
        self.requests.append("page" if "continue" in request.params else "list")
        answer = self.lists.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> "Script":
        self.requests.append(f"watch {request.params['resourceVersion']}")
        self.closed = False
        return self

    def read_response(self) -> ApiResponse:
        if not self.streams:
            self.watch.stop()
            raise UnreachableError("the script is over")
        if isinstance(error := self.streams[0], Exception):
            del self.streams[0]
            raise error
        return ApiResponse(200)

    def iter_lines(self) -> Iterator[bytes]:
        steps = self.streams.pop(0)
        assert not isinstance(steps, Exception)
        for step in steps:
            if self.closed:
                return
            if (found := step()) is not None:
                yield json.dumps(found).encode()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def script() -> Script:
    found = Script()
    found.lists = [page(5, node("a", 1))]
    return found


def expect(script: Script, reason: str, *, after_s: float = 0.0) -> Step:
    """Check the stale reason while the watch is open."""

    def step() -> None:
        script.clock.move(after_s)
        assert script.watch.stale_reason == reason

    return step


def test_connected_watch_is_current_until_it_is_silent(script: Script) -> None:
    assert script.watch.stale_reason == "nodes are not listed yet"
    silent = "the watch of nodes received no event for more than 90 s"
    script.streams = [
        [
            expect(script, "", after_s=STALE_AFTER_S),
            expect(script, silent, after_s=0.1),
            lambda: event("BOOKMARK", "", 9),
            expect(script, ""),
            expect(script, silent, after_s=STALE_AFTER_S + 1),
            lambda: event("MODIFIED", "a", 10),
            expect(script, ""),
        ]
    ]
    script.run()


def test_reconnected_watch_is_stale_until_the_missed_events_arrived(script: Script) -> None:
    script.lists.append(page(6))
    script.streams = [
        [lambda: event("MODIFIED", "a", 6)],
        UnreachableError("connection refused"),
        [expect(script, "the watch of nodes has just reconnected")],
        [expect(script, "", after_s=SETTLE_S)],
    ]
    script.run()
    assert script.requests == [
        "list", "watch 5", "watch 6", "list", "watch 6", "watch 6", "watch 6"
    ]  # fmt: skip
    assert script.lost == ["the watch of nodes is disconnected: connection refused"]


def test_version_that_went_back_after_outage_is_listed_again(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    script.lists += [page(4), page(4, node("a", 6), node("b", 3))]
    script.streams = [
        [lambda: event("MODIFIED", "a", 6), lambda: event("ADDED", "c", 7)],
        UnreachableError("connection refused"),
        [lambda: event("MODIFIED", "b", 7)],
    ]
    script.run()
    assert script.requests[:6] == ["list", "watch 5", "watch 7", "list", "list", "watch 4"]
    # Another state may have the version that "a" had before.
    assert script.reported[3:] == [("a", True), ("b", True), ("c", False), ("b", True)]
    assert "the version of nodes went back from 7 to 4; listing" in caplog.text
    assert script.watch.restored_s == 0.0


@pytest.mark.parametrize(("uid", "is_restored"), [("a", True), ("another", False)])
def test_list_with_older_version_of_an_object_shows_a_restore(
    script: Script, uid: str, *, is_restored: bool
) -> None:
    older = node("a", 3)
    older["metadata"]["uid"] = uid
    script.lists.append(page(1_000_000, older))
    script.streams = [[lambda: event("MODIFIED", "a", 6)], GoneError("compacted"), []]
    script.run()
    assert script.requests[:4] == ["list", "watch 5", "watch 6", "list"]
    assert script.watch.restored_s == (0.0 if is_restored else float("inf"))


def test_requested_list_interrupts_an_intact_watch(script: Script) -> None:
    began = script.clock.monotonic()

    def request() -> None:
        assert script.watch.listed_at == began
        script.clock.move(3.0)
        script.watch.request_list()

    script.lists.append(page(8, node("b", 7)))
    script.streams = [[request, lambda: event("MODIFIED", "a", 6)], []]
    script.run()
    assert script.requests[:3] == ["list", "watch 5", "list"]
    assert script.watch.listed_at == began + 3.0
    assert script.reported == [("a", True), ("b", True), ("a", False)]


def look(script: Script, after_s: float) -> Step:
    """Check the watch while it is open."""

    def step() -> None:
        script.clock.move(after_s)
        script.watch.check_if_silent()

    return step


def test_silent_watch_without_a_missed_change_is_resumed_quietly(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    script.lists.append(page(8, node("a", 1)))
    script.streams = [
        [look(script, CHECK_AFTER_S), look(script, 0.1), look(script, 0.0)],
        [look(script, CHECK_AFTER_S), expect(script, "")],
    ]
    script.run()
    assert script.requests[:4] == ["list", "watch 5", "list", "watch 8"]
    assert script.requests.count("list") == 2
    assert script.reported == [("a", True)]
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_silent_watch_that_missed_changes_is_listed_again(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    now = page(8, node("a", 7), node("b", 8))
    script.lists += [now, now]
    script.streams = [[look(script, CHECK_AFTER_S), look(script, 0.1)]]
    script.run()
    assert script.requests[:5] == ["list", "watch 5", "list", "list", "watch 8"]
    assert script.reported == [("a", True), ("a", True), ("b", True)]
    assert "the watch of nodes missed changes of 2 objects; listing" in caplog.text


def test_failed_check_of_a_silent_watch_is_repeated(script: Script) -> None:
    script.lists += [UnreachableError("connection refused"), page(8, node("a", 1))]
    script.streams = [[look(script, CHECK_AFTER_S), look(script, 0.1)]]
    script.run()
    assert script.requests[:5] == ["list", "watch 5", "list", "list", "watch 8"]
    assert script.lost == ["the watch of nodes is disconnected: connection refused"]


def test_each_page_is_reported_before_the_next_is_requested(script: Script) -> None:
    seen: list[int] = []
    script.lists = [page(5, node("a", 1), node("b", 2), more="x"), page(5, node("c", 3))]
    send = script.send

    def spy(request: ApiRequest) -> ApiResponse:
        seen.append(len(script.reported))
        return send(request)

    script.send = spy  # type: ignore[method-assign]  # the client calls it by name
    script.run()
    assert seen[:2] == [0, 2]
    assert [key for key, _ in script.reported] == ["a", "b", "c"]


def test_expired_page_restarts_the_list_and_keeps_deletions(script: Script) -> None:
    script.lists = [
        page(5, node("a", 1), more="x"),
        refusal(410, "Expired"),
        page(7, node("b", 6)),
    ]
    script.run()
    assert script.requests == ["list", "page", "list", "watch 7"]
    assert script.reported == [("a", True), ("b", True), ("a", False)]
