"""The cache of served documents."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from treenail.errors import ConfigError, HostError
from treenail.provisioning.server.service import CacheKey, DocumentCache

LIMIT_S = 30.0


def test_document_requested_by_many_threads_is_built_once() -> None:
    cache: DocumentCache[object] = DocumentCache(4)
    may_finish = threading.Event()
    builds = []

    def build() -> object:
        builds.append(threading.get_ident())
        assert may_finish.wait(LIMIT_S)
        return object()

    key = CacheKey("worker", ("1",))
    with ThreadPoolExecutor(20) as pool:
        found = [pool.submit(cache.get, key, build) for _ in range(20)]
        may_finish.set()
        results = [each.result(LIMIT_S) for each in found]
    assert len(builds) == 1
    assert len({id(each.document) for each in results}) == 1
    assert sum(not each.is_cached for each in results) == 1


def test_other_versions_replace_the_document() -> None:
    cache: DocumentCache[str] = DocumentCache(4)
    assert cache.get(CacheKey("worker", ("1",)), lambda: "old").document == "old"
    assert cache.get(CacheKey("worker", ("2",)), lambda: "new").document == "new"
    assert cache.get(CacheKey("worker", ("2",)), lambda: "other").document == "new"
    assert len(cache) == 1


def test_full_cache_drops_the_document_that_was_requested_first() -> None:
    cache: DocumentCache[str] = DocumentCache(2)
    for name in ("a", "b", "a", "c"):
        cache.get(CacheKey(name, ()), lambda name=name: name)  # type: ignore[misc]
    assert cache.get(CacheKey("a", ()), lambda: "again").document == "a"
    assert cache.get(CacheKey("b", ()), lambda: "again").document == "again"


def test_config_error_is_cached_and_other_errors_are_not() -> None:
    cache: DocumentCache[str] = DocumentCache(4)

    def fail_config() -> str:
        raise ConfigError("too old")

    def fail_host() -> str:
        raise HostError("no disk")

    with pytest.raises(ConfigError):
        cache.get(CacheKey("a", ()), fail_config)
    with pytest.raises(ConfigError) as found:
        cache.get(CacheKey("a", ()), lambda: "never built")
    frames = len(list(_walk(found.tb)))
    with pytest.raises(ConfigError) as again:
        cache.get(CacheKey("a", ()), lambda: "never built")
    assert len(list(_walk(again.tb))) == frames
    with pytest.raises(HostError):
        cache.get(CacheKey("b", ()), fail_host)
    assert cache.get(CacheKey("b", ()), lambda: "built").document == "built"


def _walk(traceback: object) -> Iterator[object]:
    while traceback is not None:
        yield traceback
        traceback = getattr(traceback, "tb_next", None)
