"""What holds for every test: a limit on its time, and nothing heard from the machine it runs on."""

import os
import signal
from collections.abc import Iterator
from types import FrameType

import hypothesis
import pytest

pytest.register_assert_rewrite("tests.daemon.nodes")

LIMIT_S = 60.0

# A test that should have one of these sets it: the service manager, bus, cluster and journal of the
# machine under the tests are none of theirs.
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

# How long an example takes says more about the machine than about the code. The same examples
# every time in CI, new ones on every other run.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Fail the test that hangs, and go on; pytest's faulthandler ends what a signal can't."""
    marker = item.get_closest_marker("limit")
    limit_s = marker.args[0] if marker else LIMIT_S

    def ring(_signal: int, _frame: FrameType | None) -> None:
        pytest.fail(f"still running after {limit_s:g} s")

    previous = signal.signal(signal.SIGALRM, ring)
    # Once more every ten seconds, because cleaning up after a test that hung may hang too.
    signal.setitimer(signal.ITIMER_REAL, limit_s, 10.0)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
