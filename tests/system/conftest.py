"""The container in which the tests of this directory run a real systemd."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.system.nspawn import Container
from tests.system.sandboxed_node import FILE, SandboxedNode


@contextmanager
def booted_container() -> Iterator[Container]:
    """A booted container, which is stopped and removed at the end."""
    # The container has its own /run, into which this directory is bound.
    shared = Path(tempfile.mkdtemp(prefix="tn", dir="/run"))
    try:
        with Container(shared) as container:
            yield container
    finally:
        shutil.rmtree(shared, ignore_errors=True)


@pytest.fixture(scope="module")
def container() -> Iterator[Container]:
    """One container for all tests of a module."""
    with booted_container() as container:
        yield container


@pytest.fixture(scope="module")
def node(container: Container) -> Iterator[SandboxedNode]:
    """A node whose agent has applied its first config."""
    with SandboxedNode(container) as found:
        found.add_config("first", {FILE: "first"})
        found.request("first")
        found.start_agent()
        found.wait_done("first")
        yield found


@pytest.fixture
def own_container() -> Iterator[Container]:
    """A container for one test, which may reboot it."""
    with booted_container() as container:
        yield container
