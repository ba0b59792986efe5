"""The agent in the sandbox of the shipped unit gets a signal at each record of an update."""

import itertools
from collections.abc import Iterator

import pytest

from tests.records import write_record
from tests.system.nspawn import Container, missing
from tests.system.sandboxed_node import LIMIT_S, SandboxedNode
from tests.system.test_agent_faults import FREE
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.system,
    # Without the sandbox tests/integration/test_killed.py has a sample in the short lane.
    pytest.mark.long,
    pytest.mark.skipif(bool(missing()), reason=f"no container: {missing()}"),
]
ORDER = "/run/treenail-order"
NUMBERS = itertools.count(1)
SIGNALS = ("SIGTERM", "SIGKILL", "SIGABRT")
"""What systemd sends: at a stop, after a time limit, and for a missed watchdog."""


@pytest.fixture(scope="module")
def node(container: Container) -> Iterator[SandboxedNode]:
    with SandboxedNode(container) as found:
        found.install_dying_agent(ORDER)
        reach(found, add_update(found))
        yield found


def add_update(node: SandboxedNode) -> str:
    name = f"signal-{next(NUMBERS)}"
    return node.add_config(name, dict.fromkeys((f"{FREE}/a.yml", f"{FREE}/b.yml"), name))


def reach(node: SandboxedNode, name: str) -> None:
    node.request(name)
    node.wait_done(name)


def count_records(node: SandboxedNode) -> int:
    """Return how many records an update writes to the ledger."""
    node.write(ORDER, "before 1000")
    reach(node, add_update(node))
    left = int(node.read(ORDER).split()[1])
    node.shell(f"rm {ORDER}")
    return 1000 - left


@pytest.mark.parametrize("signal", SIGNALS)
def test_agent_with_signal_at_each_record_completes_update(
    node: SandboxedNode, signal: str
) -> None:
    cases = list(itertools.product(("before", "after"), range(1, count_records(node) + 1)))
    for when, record in cases:
        before = node.read(f"{FREE}/a.yml")
        name = add_update(node)
        node.write(ORDER, f"{when} {record} {signal}")
        node.request(name)
        wait_until(lambda: not node.read(ORDER), limit_s=LIMIT_S)
        if signal == "SIGTERM":
            # systemd restarts the unit after each signal but this one.
            wait_until(lambda: node.show("ActiveState") == "inactive", limit_s=LIMIT_S)
            found = {node.read(f"{FREE}/{each}.yml") for each in "ab"}
            assert found in ({before}, {name}), (when, record)
            node.start_agent()
        node.wait_done(name)
        assert {node.read(f"{FREE}/{each}.yml") for each in "ab"} == {name}, (when, record)
        wait_until(lambda: node.show("ActiveState") == "active", limit_s=LIMIT_S)
    write_record(
        "host",
        what=f"{signal} before and after each ledger record of an update (live), under the shipped "
        "unit's sandbox",
        count=len(cases),
        result="the next start completes the update; after SIGTERM the files are old or new",
        command="make test-long ARGS=tests/system/test_agent_signals.py",
    )


def test_agent_that_hangs_in_update_is_ended_by_watchdog_and_completes(
    node: SandboxedNode,
) -> None:
    drop_in = "/etc/systemd/system/treenail.service.d/watchdog.conf"
    node.write(drop_in, "[Service]\nWatchdogSec=3s\n")
    node.shell("systemctl daemon-reload; systemctl restart treenail")
    restarts = node.restart_count()
    # A stopped process looks like one that hangs.
    node.write(ORDER, "after 2 SIGSTOP")
    name = add_update(node)
    node.request(name)
    wait_until(lambda: node.restart_count() > restarts, limit_s=LIMIT_S)
    node.wait_done(name)
    assert {node.read(f"{FREE}/{each}.yml") for each in "ab"} == {name}
    node.shell(f"rm {drop_in}; systemctl daemon-reload; systemctl restart treenail")
    write_record(
        "host",
        what="an agent that hangs in an update, with WatchdogSec=3s, under the shipped unit's "
        "sandbox",
        count=1,
        result="systemd ends it with SIGABRT, and the next start completes the update",
        command="make test-long ARGS=tests/system/test_agent_signals.py",
    )
