"""Nothing is assigned from caches that may be outdated, and the pool says why."""

import pytest

from tests.controllers.rollout.world import World, build_reconciler
from treenail.controllers.rollout.decide import STALE_RETRY_S
from treenail.errors import UnreachableError

REASON = "the watch of nodes is disconnected: connection refused"


def test_stale_watch_stops_assignments_and_is_named_in_the_condition() -> None:
    found = World()
    for number in range(3):
        found.add_node(f"n{number}", "old")
    found.set_pool("worker", "new")
    found.deliver()
    controlled = build_reconciler(found)
    found.stale_reason = REASON
    assert controlled.sync_pool("worker") == STALE_RETRY_S
    assert not [name for plural, name, _ in found.writes if plural == "nodes"]
    updating = found.conditions()["Updating"]
    assert updating["reason"] == "Waiting"
    assert f"waiting: {REASON}" in updating["message"]

    found.stale_reason = ""
    found.deliver()
    controlled.sync_pool("worker")
    assert [name for plural, name, _ in found.writes if plural == "nodes"] == ["n0"]


def test_stale_watch_repeats_no_unanswered_write() -> None:
    found = World()
    found.add_node("n0", "old")
    found.set_pool("worker", "new")
    found.deliver()
    controlled = build_reconciler(found)
    found.next_fault, found.fault_on = "unreachable", "nodes"
    with pytest.raises(UnreachableError):
        controlled.sync_pool("worker")
    found.stale_reason = REASON
    controlled.sync_pool("worker")
    assert not [name for plural, name, _ in found.writes if plural == "nodes"]
    found.stale_reason = ""
    controlled.sync_pool("worker")
    assert [name for plural, name, _ in found.writes if plural == "nodes"] == ["n0"]
