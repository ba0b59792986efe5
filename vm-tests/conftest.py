"""One image for all scenarios, one machine for each; what a failed one leaves is kept."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vmlab.drivers import Driver, driver
from vmlab.image.build import Builder, Built
from vmlab.registry import Registry
from vmlab.site import Site
from vmlab.tools import REPOSITORY, cache, missing, say

RESULTS = REPOSITORY / "build/vm"
FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> object:
    """Remember that a test failed, for the fixture that keeps what it left."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(scope="session")
def builder() -> Iterator[Builder]:
    """Makes images, and the registry that has them."""
    if packages := missing():
        pytest.fail(f"install first: apt-get install {' '.join(packages)}", pytrace=False)
    with Registry(cache() / "registry") as store:
        yield Builder(store)


@pytest.fixture(scope="session")
def built(builder: Builder) -> Built:
    """The disk that machines start from: ours, or the one that TREENAIL_VM_IMAGE names."""
    image = os.environ.get("TREENAIL_VM_IMAGE")
    if image is None:
        return builder.disk()
    ignition = os.environ.get("TREENAIL_VM_IGNITION")
    return builder.given(Path(image), Path(ignition) if ignition else None)


@pytest.fixture
def chosen() -> Iterator[Driver]:
    """virt-install, or QEMU alone."""
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="tnvm", dir="/tmp") as directory:
        yield driver(Path(directory))


@pytest.fixture
def site(
    request: pytest.FixtureRequest, built: Built, builder: Builder, chosen: Driver
) -> Iterator[Site]:
    """A node at rest; whatever happens to it, its story breaks no rule."""
    directory = RESULTS / str(request.node.name)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    say(f"{request.node.name}: starting")
    found = Site(directory, built, builder, chosen)
    try:
        found.start()
        say(f"{request.node.name}: the node is at rest")
        yield found
        if request.node.stash.get(FAILED, False):
            print(found.report())
        assert found.story.violations == []
        say(f"{request.node.name}: over")
    except BaseException:
        print(found.report())
        raise
    finally:
        found.stop()
    if not request.node.stash.get(FAILED, False):
        shutil.rmtree(directory, ignore_errors=True)
