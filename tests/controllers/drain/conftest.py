"""Fixtures: an API server with all kinds, a site on it, and controllers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.controllers.drain.site import Acting, Site
from treenail.manifests import installation
from treenail_lab.apiserver.serving.server import LabServer


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with LabServer(tmp_path) as server:
        found = Site(server, kinds=tuple(installation.load_crds()))
        yield found
        found.close()


@pytest.fixture
def act(site: Site) -> Iterator[Callable[..., Acting]]:
    """Factory of controllers, which end with the test."""
    made: list[Acting] = []

    def make(**options: object) -> Acting:
        made.append(Acting(site, **options))  # type: ignore[arg-type]  # what a test wants
        return made[-1]

    yield make
    for each in made:
        each.kill()
