"""Agents and controllers for a day, with an update every five minutes: nothing grows.

The day is in virtual time, and all processes of the simulation are threads of this one. So the
figures of memory, descriptors and threads are those of three agents and two processes of the
controllers together, without their connections.
"""

import logging
from dataclasses import asdict

import pytest

from tests.records import write_record
from tests.simulation.faults import FaultAt
from tests.simulation.rollout import Rollout, SimulatedCluster
from tests.simulation.usage import Usage, UsageMeter, count_log

log_figures = logging.getLogger(__name__)

UPDATE_EVERY_S = 300.0
EVENT_TTL_S = 3600.0
COMMAND = "make test-long ARGS=tests/simulation/test_long_run.py"
LIMITS = {
    # The allocator keeps a little more each time that its arenas are fragmented in another way.
    "rss_kib": 1.10,
    "objects": 1.02,
    # Updates that are in progress when the figures are taken.
    "ledger_bytes": 1.05,
    "events": 1.2,
    "writes": 1.2,
    "log_bytes": 1.2,
}


def run_updates(shared: SimulatedCluster, *, periods: int, updates: int) -> list[Usage]:
    """Return the figures after each period of so many updates."""
    # The changes that the lab keeps for watches would be most of the memory.
    shared.cluster.api.store._history = 50
    run = Rollout(shared)
    figures = []
    with count_log() as log, run:
        run.simulation.run_for(20.0)
        recorded = FaultAt(run, keeps_states=False)
        meter = UsageMeter(run, log)
        for _ in range(periods):
            for _ in range(updates):
                ends_at = run.simulation.time + UPDATE_EVERY_S
                run.change_config()
                assert run.settle(), run.describe()
                run.simulation.run_for(ends_at - run.simulation.time)
                run.cluster.expire_events(EVENT_TTL_S)
            figures.append(meter.measure(recorded.counts))
        assert run.broken == []
        assert run.simulation.deaths == []
    return figures


def test_figures_of_a_few_updates_do_not_grow(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    shared = SimulatedCluster(tmp_path_factory.mktemp("cluster"))
    _, before, after = run_updates(shared, periods=3, updates=1)

    # A ledger has the last updates, and the cluster the last rendered configs.
    grown = before.list_growth(after, {**LIMITS, "rss_kib": 1.2, "objects": 1.1,
                                       "ledger_bytes": 1.5, "stored": 1.1})  # fmt: skip
    assert grown == []


@pytest.mark.long
@pytest.mark.limit(86_400)
def test_figures_of_a_day_do_not_grow(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    shared = SimulatedCluster(tmp_path_factory.mktemp("cluster"))
    updates = int(3600 / UPDATE_EVERY_S)
    figures = run_updates(shared, periods=24, updates=updates)
    for hour, usage in enumerate(figures, 1):
        log_figures.info("hour %d: %s", hour, asdict(usage))
    warm, last = figures[3], figures[-1]

    assert warm.list_growth(last, LIMITS) == []
    write_record(
        "long-run",
        what="three agents and two processes of the controllers for 24 simulated hours",
        count=24 * updates,
        result=f"hour 4: {warm.rss_kib} KiB RSS, {warm.objects} objects, {warm.ledger_bytes} bytes "
        f"of ledger, {warm.events} Events and {warm.log_bytes} bytes of log an hour; hour 24: "
        f"{last.rss_kib}, {last.objects}, {last.ledger_bytes}, {last.events}, {last.log_bytes}",
        command=COMMAND,
    )
