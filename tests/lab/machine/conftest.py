"""A directory with a short name, because sockets go into it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as name:
        yield Path(name)
