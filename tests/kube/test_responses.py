"""Which of a response and a watched object is newer, also after an etcd restore."""

from dataclasses import dataclass

import pytest

from treenail.kube.resource_version import RecentResponses


@dataclass(frozen=True)
class Seen:
    resource_version: str
    uid: str = "u1"


def cache_with(response: Seen) -> RecentResponses[Seen]:
    cache = RecentResponses[Seen]()
    cache.store_response("n", response, cache.begin_request(None))
    return cache


def test_response_hides_late_watch_events_until_newer_one() -> None:
    cache = cache_with(Seen("7"))
    assert cache.select_latest("n", Seen("6")) == Seen("7")
    assert cache.select_latest("n", Seen("8")) == Seen("8")
    assert cache.find("n") is None


@pytest.mark.parametrize("version", ["\u00b2", "9" * 5000, "", "x"])
def test_version_without_a_number_replaces_response(version: str) -> None:
    cache = cache_with(Seen("7"))
    assert cache.select_latest("n", Seen(version)) == Seen(version)


def test_deleted_object_forgets_response() -> None:
    cache = cache_with(Seen("7"))
    assert cache.select_latest("n", None) is None
    assert cache.find("n") is None


def test_list_replaces_response_with_higher_version() -> None:
    cache = cache_with(Seen("900"))
    assert cache.handle_list() == ("n",)
    assert cache.select_latest("n", Seen("500")) == Seen("500")


def test_response_to_request_before_list_is_not_stored() -> None:
    cache = RecentResponses[Seen]()
    token = cache.begin_request(None)
    cache.handle_list()
    cache.store_response("n", Seen("900"), token)
    assert cache.select_latest("n", Seen("500")) == Seen("500")


def test_object_with_other_uid_replaces_response_of_predecessor() -> None:
    cache = cache_with(Seen("900", uid="u1"))
    assert cache.select_latest("n", Seen("500", uid="u2")) == Seen("500", uid="u2")


def test_response_replaces_what_was_watched_when_its_request_began() -> None:
    cache = RecentResponses[Seen]()
    cache.store_response("n", Seen("500"), cache.begin_request(Seen("900")))
    assert cache.select_latest("n", Seen("900")) == Seen("500")
    assert cache.select_latest("n", Seen("901")) == Seen("901")
