"""Rules for every test: a time limit, isolation from the host, and what each lane leaves out."""

import faulthandler
import os
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from types import FrameType

import hypothesis
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

pytest.register_assert_rewrite("tests.daemon.nodes")

LIMIT_S = 600.0
"""Ends a test that hangs. A busy machine takes ten times as long as an idle one."""

WITHOUT_PROCESSES = "--without-processes"
PROCESS_MARKERS = {"integration", "system", "cluster", "process"}
# Fixtures that start a D-Bus daemon or a registry.
PROCESS_FIXTURES = {"any_registry", "lab_registry", "private_bus", "real_registry"}
PROCESS_EVENTS = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec"}

# Tests set these variables themselves: they must not reach the service manager, bus, cluster or
# journal of the machine that they run on.
for name in (
    "DBUS_SESSION_BUS_ADDRESS",
    "DBUS_SYSTEM_BUS_ADDRESS",
    "JOURNAL_STREAM",
    "KUBECONFIG",
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
):
    os.environ.pop(name, None)

# The duration of an example depends on the machine more than on the code, hence no deadline.
# CI repeats the same examples; every other run tries new ones.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the fast lane."""
    parser.addoption(
        WITHOUT_PROCESSES, action="store_true", help="leave out tests that start processes"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Fail every test of the fast lane that starts a process, so that the lane stays fast."""
    if not config.getoption(WITHOUT_PROCESSES):
        return
    # xdist's workers are started before the first test.
    state = config.stash.setdefault(RUNNING, [])

    def refuse_process(event: str, _arguments: Sequence[object]) -> None:
        if event in PROCESS_EVENTS and state:
            pytest.fail(f"{state[-1]} starts a process: mark it `process`")

    sys.addaudithook(refuse_process)


RUNNING = pytest.StashKey[list[str]]()
COLLECTED_TESTS = pytest.StashKey[dict[str, set[str]]]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a test with a longer limit run longer than ``faulthandler_timeout``, too."""
    marker = item.get_closest_marker("limit")
    if marker is not None and marker.args[0] > LIMIT_S:
        file = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(1.5 * marker.args[0], exit=True, file=file)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests, and in the fast lane tests that start processes."""
    for item in items:
        item.own_markers[:] = [each for each in item.own_markers if _is_for_case(each, item)]
    config.stash[COLLECTED_TESTS] = {
        item.nodeid: {marker.name for marker in item.iter_markers()} for item in items
    }
    has_long = "long" in config.getoption("markexpr")
    is_fast = config.getoption(WITHOUT_PROCESSES)
    left_out = [
        item
        for item in items
        if (not has_long and item.get_closest_marker("long")) or (is_fast and _starts_process(item))
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(scope="session")
def collected_tests(pytestconfig: pytest.Config) -> dict[str, set[str]]:
    """Return all tests of this run with their markers, also those that its lane leaves out."""
    is_changed_only = pytestconfig.getoption("testmon", default=False)
    if is_changed_only or pytestconfig.args != pytestconfig.getini("testpaths"):
        pytest.skip("this run does not collect all tests")
    return pytestconfig.stash[COLLECTED_TESTS]


def _is_for_case(mark: pytest.Mark, item: pytest.Item) -> bool:
    """Return False for a mark ``long`` with a parameter that this case does not have."""
    case = getattr(item, "callspec", None)
    values = set(case.id.split("-")) if case else set()
    return mark.name != "long" or not mark.args or bool(values & set(mark.args))


def _starts_process(item: pytest.Item) -> bool:
    fixtures = set(getattr(item, "fixturenames", ()))
    markers = {marker.name for marker in item.iter_markers()}
    return bool(markers & PROCESS_MARKERS or fixtures & PROCESS_FIXTURES)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what is no UTF-8 in captured output: xdist cannot send it (execnet's serializer)."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Fail a test that hangs, and go on; pytest's faulthandler ends what a signal cannot."""
    marker = item.get_closest_marker("limit")
    limit_s = marker.args[0] if marker else LIMIT_S

    def fail_test(_signal: int, _frame: FrameType | None) -> None:
        pytest.fail(f"still running after {limit_s:g} s")

    previous = signal.signal(signal.SIGALRM, fail_test)
    # Again every ten seconds, because the clean-up after a test that hung may hang too.
    signal.setitimer(signal.ITIMER_REAL, limit_s, 10.0)
    running = item.config.stash.get(RUNNING, [])
    running.append(item.nodeid)
    try:
        return (yield)
    finally:
        running.pop()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
