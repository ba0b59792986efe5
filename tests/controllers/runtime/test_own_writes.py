"""Own writes count until the watch, or a later list, shows another state."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from tests.fakes.clock import FakeClock
from treenail.api.object_meta import ObjectMeta
from treenail.controllers.runtime.own_writes import MAX_AGE_S, OwnDeletions, OwnWrites


@dataclass(frozen=True)
class Thing:
    metadata: ObjectMeta


@dataclass
class View:
    """The objects that a watch shows; a test sets the time of its list."""

    shown: dict[str, Thing] = field(default_factory=dict)
    listed_at: float | None = 0.0
    lists_requested: int = 0

    def get_all(self) -> Mapping[str, Thing]:
        return dict(self.shown)

    def request_list(self) -> None:
        self.lists_requested += 1


def thing(version: str, uid: str = "u1") -> Thing:
    return Thing(ObjectMeta(name="a", uid=uid, resource_version=version))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def writes(clock: FakeClock) -> OwnWrites[Thing]:
    return OwnWrites(clock)


def test_created_and_changed_object_stays_while_the_watch_shows_neither(
    writes: OwnWrites[Thing],
) -> None:
    writes.record_write(None, thing("1"))
    writes.record_write(thing("1"), thing("2"))
    assert writes.overlay(View()) == {"a": thing("2")}


def test_changed_object_that_the_watch_no_longer_shows_was_deleted(
    writes: OwnWrites[Thing],
) -> None:
    writes.record_write(thing("1"), thing("2"))
    assert writes.overlay(View()) == {}


@pytest.mark.parametrize("lagging", [thing("1"), thing("2")])
def test_change_stays_while_the_watch_shows_what_it_replaced(
    writes: OwnWrites[Thing], lagging: Thing
) -> None:
    writes.record_write(thing("1"), thing("2"))
    writes.record_write(thing("2"), thing("3"))
    assert writes.overlay(View({"a": lagging})) == {"a": thing("3")}


def test_later_state_in_the_watch_replaces_the_write(writes: OwnWrites[Thing]) -> None:
    writes.record_write(thing("1"), thing("2"))
    assert writes.overlay(View({"a": thing("7")})) == {"a": thing("7")}
    assert writes.overlay(View({"a": thing("1")})) == {"a": thing("1")}


def test_write_that_a_watch_does_not_show_requests_a_list_and_stays_until_then(
    writes: OwnWrites[Thing], clock: FakeClock
) -> None:
    view = View({"a": thing("1")}, listed_at=clock.monotonic() - 1.0)
    writes.record_write(thing("1"), thing("2"))
    clock.move(MAX_AGE_S + 1.0)
    assert writes.overlay(view) == {"a": thing("2")}
    assert view.lists_requested == 1

    view.listed_at = clock.monotonic()
    assert writes.overlay(view) == {"a": thing("1")}
    assert view.lists_requested == 1


def test_deleted_object_is_hidden_but_not_the_next_one_of_its_name(
    writes: OwnWrites[Thing],
) -> None:
    writes.record_deletion("a", "u1")
    assert writes.overlay(View({"a": thing("5")})) == {}
    assert writes.overlay(View({"a": thing("6", uid="u2")})) == {"a": thing("6", uid="u2")}


def test_deletion_of_an_object_that_the_watch_does_not_show_yet_is_kept(
    writes: OwnWrites[Thing], clock: FakeClock
) -> None:
    writes.record_deletion("a", "u1")
    assert writes.overlay(View()) == {}
    assert writes.overlay(View({"a": thing("5")})) == {}
    clock.move(MAX_AGE_S + 1.0)
    assert writes.overlay(View(listed_at=-100.0)) == {}
    assert writes.overlay(View({"a": thing("5")})) == {"a": thing("5")}


def test_object_that_another_client_replaced_is_shown_at_once(writes: OwnWrites[Thing]) -> None:
    replacement = View({"a": thing("9", uid="u2")})
    writes.record_write(thing("1"), thing("2"))
    assert writes.overlay(replacement) == {"a": thing("9", uid="u2")}
    writes.record_write(None, thing("11", uid="u3"))
    assert writes.overlay(replacement) == {"a": thing("11", uid="u3")}


def test_write_that_changed_nothing_is_seen_at_once(
    writes: OwnWrites[Thing], clock: FakeClock
) -> None:
    view = View({"a": thing("1")}, listed_at=clock.monotonic() - 1.0)
    writes.record_write(thing("1"), thing("1"))
    writes.overlay(view)
    clock.move(MAX_AGE_S + 1.0)
    writes.overlay(view)
    assert view.lists_requested == 0


def test_forgotten_writes_hide_nothing(writes: OwnWrites[Thing]) -> None:
    writes.record_write(None, thing("1"))
    writes.forget_writes()
    assert writes.overlay(View()) == {}


def test_deletion_is_forgotten_once_the_watch_or_a_later_list_decides(clock: FakeClock) -> None:
    deletions = OwnDeletions(clock)
    view = View(listed_at=clock.monotonic() - 1.0)
    deletions.record_deletion("u1")
    deletions.record_deletion("u2")
    assert deletions.find_hidden(view, {"u1", "u2"}) == {"u1", "u2"}
    # The watch may show neither the creation nor the deletion of u2 yet.
    assert deletions.find_hidden(view, {"u1"}) == {"u1", "u2"}
    clock.move(MAX_AGE_S + 1.0)
    assert deletions.find_hidden(view, {"u1"}) == {"u1"}
    assert view.lists_requested == 1
    # A restored etcd has the object again.
    view.listed_at = clock.monotonic()
    assert deletions.find_hidden(view, {"u1"}) == frozenset()
