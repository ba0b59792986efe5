"""Order of slots and of drains that wait for the same budget."""

from treenail.controllers.drain.queues import BudgetQueue, DrainSlots
from treenail.kube.eviction import Blocker, BlockerReason, DisruptionBudget

WEB = DisruptionBudget("web", 0)


def refused(
    *budgets: DisruptionBudget, pod: str = "shop/p", reason: BlockerReason = BlockerReason.BUDGET
) -> Blocker:
    return Blocker(pod, reason, "no", budgets, 0.0)


def test_slots_are_granted_in_order_of_arrival() -> None:
    slots = DrainSlots(1)
    assert slots.try_acquire("a")
    assert slots.try_acquire("a")
    assert not slots.try_acquire("b")
    assert not slots.try_acquire("c")
    assert slots.release_slot("a") == "b"
    assert not slots.try_acquire("c")
    assert slots.try_acquire("b")
    assert (slots.taken_count, slots.waiting_count) == (1, 1)


def test_node_that_stops_waiting_is_skipped() -> None:
    slots = DrainSlots(1)
    for name in "abc":
        slots.try_acquire(name)
    assert slots.release_slot("b") is None
    assert slots.release_slot("a") == "c"


def test_two_released_slots_go_to_two_nodes() -> None:
    slots = DrainSlots(2)
    for name in "abcd":
        slots.try_acquire(name)
    slots.release_slot("a")
    slots.release_slot("b")
    assert slots.try_acquire("d")
    assert slots.try_acquire("c")


def test_node_that_yields_waits_behind_others() -> None:
    slots = DrainSlots(1)
    slots.try_acquire("a")
    assert slots.yield_slot("a") is None, "no node waits"
    slots.try_acquire("b")
    slots.try_acquire("c")
    assert slots.yield_slot("a") == "b"
    assert not slots.try_acquire("a")
    assert slots.try_acquire("b")
    slots.release_slot("b")
    assert slots.release_slot("b") == "c"


def test_oldest_drain_retries_more_often() -> None:
    line = BudgetQueue()
    line.set_waiting("old", 1.0, [refused(WEB)])
    line.set_waiting("new", 2.0, [refused(WEB)])

    assert line.compute_retry_s("old", 1.0, refused(WEB)) == 5
    assert line.compute_retry_s("new", 2.0, refused(WEB)) == 30
    line.remove_node("old")
    assert line.compute_retry_s("new", 2.0, refused(WEB)) == 5


def test_drains_of_equal_age_are_ordered_by_name() -> None:
    line = BudgetQueue()
    line.set_waiting("a", 1.0, [refused(WEB)])
    line.set_waiting("b", 1.0, [refused(WEB)])

    assert [line.compute_retry_s(name, 1.0, refused(WEB)) for name in "ab"] == [5, 30]


def test_only_the_same_budget_delays_retries() -> None:
    line = BudgetQueue()
    line.set_waiting("old", 1.0, [refused(WEB), refused(reason=BlockerReason.FINALIZER)])

    assert line.compute_retry_s("new", 2.0, refused(DisruptionBudget("db", 0))) == 5
    assert line.compute_retry_s("new", 2.0, refused(WEB, pod="other/p")) == 5
    assert line.compute_retry_s("new", 2.0, refused(WEB, reason=BlockerReason.WEBHOOK)) == 5


def test_pod_with_two_budgets_delays_no_other_drain() -> None:
    line = BudgetQueue()
    line.set_waiting("old", 1.0, [refused(WEB, DisruptionBudget("db", 1))])

    assert line.compute_retry_s("new", 2.0, refused(WEB)) == 5


def test_node_without_blockers_delays_no_other_drain() -> None:
    line = BudgetQueue()
    line.set_waiting("old", 1.0, [refused(WEB)])
    line.set_waiting("old", 1.0, [])

    assert line.compute_retry_s("new", 2.0, refused(WEB)) == 5


def test_allowed_disruptions_go_to_oldest_drains_first() -> None:
    line = BudgetQueue()
    line.set_waiting("second", 2.0, [refused(WEB), refused(WEB)])
    line.set_waiting("first", 1.0, [refused(WEB), refused(WEB)])
    line.set_waiting("third", 3.0, [refused(WEB)])
    line.set_waiting("other", 0.0, [refused(DisruptionBudget("db", 0))])

    found = [line.find_next_nodes("shop/web", allowed) for allowed in (0, 1, 2, 3, 99)]
    assert found == [
        [],
        ["first"],
        ["first"],
        ["first", "second"],
        ["first", "second", "third"],
    ]
