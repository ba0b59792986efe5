"""A cluster of the lab with a registry, for the tests of the build controller."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controllers.image_build.site import BuildSite, open_site
from tests.registry.real_registry import RegistryService, lab_registry

__all__ = ["lab_registry"]


@pytest.fixture
def site(tmp_path: Path, lab_registry: RegistryService) -> Iterator[BuildSite]:
    with open_site(tmp_path, lab_registry) as found:
        yield found
