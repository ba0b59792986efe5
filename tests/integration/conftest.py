"""A site for each test, shared within a module until a test fails on it."""

import sys
from collections.abc import Iterator

import pytest

from tests.integration.site import Options, Site
from tests.waiting import wait_until

REST_LIMIT_S = 30.0


class Sites:
    """Lends one site to the tests of a module, and a new one after a failed test."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._site: Site | None = None

    def take(self) -> Site:
        site, self._site = self._site, None
        if site is None:
            return Site(self._options)
        site.begin()
        return site

    def give_back(self, site: Site) -> None:
        """Check that the node is at rest, and that its OS never changed in service."""
        try:
            site.recover()
            wait_until(site.calm, limit_s=REST_LIMIT_S)
            assert site.witness.violations() == []
        except BaseException:
            sys.stdout.write(site.story())
            site.stop()
            raise
        self._site = site

    def close(self) -> None:
        if self._site is not None:
            self._site.stop()


@pytest.fixture(scope="module")
def options() -> Options:
    """Return the options of the sites of a module; modules may override it."""
    return Options()


@pytest.fixture(scope="module")
def sites(options: Options) -> Iterator[Sites]:
    pool = Sites(options)
    yield pool
    pool.close()


@pytest.fixture
def site(sites: Sites) -> Iterator[Site]:
    taken = sites.take()
    yield taken
    sites.give_back(taken)
