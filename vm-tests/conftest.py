"""One image for all scenarios, one machine for each; what a failed one leaves is kept."""

import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from vmlab.drivers import Driver, driver
from vmlab.image.build import Builder, Built
from vmlab.image.programs import VARIABLES
from vmlab.registry import Registry
from vmlab.site import Site
from vmlab.tools import PANIC_EXIT, REPOSITORY, GuestPanicError, cache, missing, say

RESULTS = REPOSITORY / "build/vm"
FAILED = pytest.StashKey[bool]()
PANICKED = pytest.StashKey[bool]()
SECONDS: dict[str, float] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    """Remember that a test failed, for the fixture that keeps what it left."""
    report: pytest.TestReport = yield
    if call.excinfo is not None and call.excinfo.errisinstance(GuestPanicError):
        item.session.stash[PANICKED] = True
    SECONDS[item.nodeid] = SECONDS.get(item.nodeid, 0.0) + report.duration
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Exit with a code of its own if the emulated machine failed, not the software in it."""
    if session.exitstatus == pytest.ExitCode.TESTS_FAILED and session.stash.get(PANICKED, False):
        session.exitstatus = PANIC_EXIT


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A table: scenario, seconds, result, and the power cuts by the phases they hit."""
    reports: dict[str, list[pytest.TestReport]] = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.getreports(outcome):
            if isinstance(report, pytest.TestReport):
                reports.setdefault(report.nodeid, []).append(report)
    for test, parts in reports.items():
        # What has passed is listed once, by its call.
        result = "passed" if all(part.passed for part in parts) else "FAILED"
        properties = [each for part in parts for each in part.user_properties]
        cuts = Counter(str(phase) for name, phase in properties if name == "cut")
        hit = ", ".join(f"{count} {phase}" for phase, count in cuts.most_common())
        cuts_note = f"; power cuts survived: {cuts.total()} ({hit})" if cuts else ""
        scenario = test.partition("::")[2].removeprefix("test_").replace("_", " ")
        terminalreporter.write_line(
            f"{SECONDS.get(test, 0.0):8.0f} s  {result}  {scenario}{cuts_note}"
        )


@pytest.fixture(scope="session")
def builder() -> Iterator[Builder]:
    """Makes images, and the registry that has them."""
    if packages := missing(virt_install=False):
        pytest.fail(f"install first: apt-get install {' '.join(packages)}", pytrace=False)
    with Registry(cache() / "registry") as store:
        yield Builder(store)


@pytest.fixture(scope="session")
def built(builder: Builder) -> Built:
    """The disk that machines start from."""
    return builder.chosen()


@pytest.fixture
def with_rpm_ostree() -> None:
    """Skip a test where the guest has bootc only: then the agent changes nothing but the image."""
    if os.environ.get(VARIABLES["bootc"]) and not os.environ.get(VARIABLES["rpm-ostree"]):
        pytest.skip(f"{VARIABLES['rpm-ostree']} names no rpm-ostree for a guest with bootc")


@pytest.fixture
def chosen() -> Iterator[Driver]:
    """virt-install, or QEMU alone."""
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="tnvm", dir="/tmp") as directory:
        yield driver(Path(directory))


@pytest.fixture
def kind() -> type[Site]:
    """The class of sites; a module overrides it for nodes of another kind."""
    return Site


@pytest.fixture
def new_site(
    request: pytest.FixtureRequest, built: Built, builder: Builder, chosen: Driver, kind: type[Site]
) -> Iterator[Site]:
    """Yield a running machine that becomes a node, and check its story against all rules."""
    name = re.sub(r"[^\w]+", "-", str(request.node.name)).strip("-")
    directory = RESULTS / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    say(f"{name}: starting")
    found = kind(directory, built, builder, chosen)
    try:
        found.power_on()
        yield found
        if request.node.stash.get(FAILED, False):
            print(found.report())
        assert found.story.violations == []
        say(f"{name}: over")
    except BaseException:
        print(found.report())
        raise
    finally:
        found.stop()
    if not request.node.stash.get(FAILED, False):
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def site(new_site: Site) -> Site:
    """A node at rest."""
    new_site.join()
    say("the node is at rest")
    return new_site
