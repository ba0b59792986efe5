"""The agent is killed, by SIGKILL, at every record of an update."""

import sys
from pathlib import Path

import pytest

from tests.fakes.dying_ledger import ORDER
from tests.integration.site import NODE, Options, Site
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

RECORDS = 15
"""Writes to the ledger at most in one update that follows another; see the first test.

One is left out when the first check after the boot already reaches the API server: its result is
then in the write that begins the boot trial.
"""


@pytest.fixture(scope="module")
def options() -> Options:
    return Options(agent=(sys.executable, "-m", "tests.fakes.dying_ledger"))


def order(site: Site) -> Path:
    return site.directory / NODE / ORDER


def test_update_writes_expected_number_of_records(site: Site) -> None:
    site.reach(site.goal())
    order(site).write_text("before 1000")
    site.reach(site.goal())
    left = int(order(site).read_text().split()[1])
    order(site).unlink()
    assert 1000 - left in (RECORDS - 1, RECORDS)


# The daemon's walks end the agent at every effect, with fakes; here are real processes.
CASES = [(when, record) for record in range(1, RECORDS + 1) for when in ("before", "after")]
DEATHS = [
    pytest.param(*each, marks=() if number % 9 == 0 else pytest.mark.long)
    for number, each in enumerate(CASES)
]


@pytest.mark.parametrize(("when", "record"), DEATHS)
def test_agent_killed_at_a_record_reaches_target(site: Site, when: str, record: int) -> None:
    goal = site.goal()
    starts = site.machine.agent.start_count
    order(site).write_text(f"{when} {record}")
    site.reach(goal)
    if record == RECORDS and order(site).exists():
        order(site).unlink()
        pytest.skip(f"this update needed {RECORDS - 1} writes")
    assert not order(site).exists()
    # Once more for the boot and once for the death, which may follow the last write.
    wait_until(lambda: site.machine.agent.start_count >= starts + 2)
    site.settle()
    assert site.machine.agent.start_count == starts + 2
    assert site.machine.boot_count == site.boots + 1
    assert len(site.transactions("stage")) == 1
    assert not site.was("Degraded")


@pytest.mark.parametrize("record", [1, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_agent_killed_while_cancelling_leaves_nothing(site: Site, when: str, record: int) -> None:
    before = site.current
    with site.drains_held():
        site.ask(site.goal())
        site.wait_phase("draining")
        order(site).write_text(f"{when} {record}")
        site.ask(before)
        wait_until(lambda: site.phase() == "cancelling" or not order(site).exists())
    wait_until(lambda: not order(site).exists())
    site.settle(before)
    assert site.machine.boot_count == site.boots
