"""Who goes first."""

from treenail.controllers.drain.order import Line, Slots
from treenail.kube.eviction import Blocker, Budget, Reason

WEB = Budget("web", 0)


def refused(*budgets: Budget, pod: str = "shop/p", reason: Reason = Reason.BUDGET) -> Blocker:
    return Blocker(pod, reason, "no", budgets, 0.0)


def test_slots_are_given_in_the_order_of_asking() -> None:
    slots = Slots(1)
    assert slots.take("a")
    assert slots.take("a")
    assert not slots.take("b")
    assert not slots.take("c")
    assert slots.leave("a") == "b"
    assert not slots.take("c")
    assert slots.take("b")
    assert (slots.taken, slots.waiting) == (1, 1)


def test_who_gives_up_waiting_is_passed_over() -> None:
    slots = Slots(1)
    for name in "abc":
        slots.take(name)
    assert slots.leave("b") is None
    assert slots.leave("a") == "c"


def test_two_slots_that_become_free_go_to_two() -> None:
    slots = Slots(2)
    for name in "abcd":
        slots.take(name)
    slots.leave("a")
    slots.leave("b")
    assert slots.take("d")
    assert slots.take("c")


def test_one_that_gives_way_waits_behind_the_others() -> None:
    slots = Slots(1)
    slots.take("a")
    assert slots.give_way("a") is None, "nobody waits"
    slots.take("b")
    slots.take("c")
    assert slots.give_way("a") == "b"
    assert not slots.take("a")
    assert slots.take("b")
    slots.leave("b")
    assert slots.leave("b") == "c"


def test_drain_that_began_first_asks_more_often() -> None:
    line = Line()
    line.wait("old", 1.0, [refused(WEB)])
    line.wait("new", 2.0, [refused(WEB)])

    assert line.patience_s("old", 1.0, refused(WEB)) == 5
    assert line.patience_s("new", 2.0, refused(WEB)) == 30
    line.leave("old")
    assert line.patience_s("new", 2.0, refused(WEB)) == 5


def test_drains_that_began_together_are_in_some_order() -> None:
    line = Line()
    line.wait("a", 1.0, [refused(WEB)])
    line.wait("b", 1.0, [refused(WEB)])

    assert [line.patience_s(name, 1.0, refused(WEB)) for name in "ab"] == [5, 30]


def test_only_the_same_budget_makes_wait() -> None:
    line = Line()
    line.wait("old", 1.0, [refused(WEB), refused(reason=Reason.FINALIZER)])

    assert line.patience_s("new", 2.0, refused(Budget("db", 0))) == 5
    assert line.patience_s("new", 2.0, refused(WEB, pod="other/p")) == 5
    assert line.patience_s("new", 2.0, refused(WEB, reason=Reason.WEBHOOK)) == 5


def test_pod_of_two_budgets_makes_nobody_wait() -> None:
    line = Line()
    line.wait("old", 1.0, [refused(WEB, Budget("db", 1))])

    assert line.patience_s("new", 2.0, refused(WEB)) == 5


def test_one_that_waits_no_more_is_passed_over() -> None:
    line = Line()
    line.wait("old", 1.0, [refused(WEB)])
    line.wait("old", 1.0, [])

    assert line.patience_s("new", 2.0, refused(WEB)) == 5


def test_what_a_budget_allows_goes_to_the_first_and_what_is_left_to_the_next() -> None:
    line = Line()
    line.wait("second", 2.0, [refused(WEB), refused(WEB)])
    line.wait("first", 1.0, [refused(WEB), refused(WEB)])
    line.wait("third", 3.0, [refused(WEB)])
    line.wait("other", 0.0, [refused(Budget("db", 0))])

    found = [line.next("shop/web", allowed) for allowed in (0, 1, 2, 3, 99)]
    assert found == [
        [],
        ["first"],
        ["first"],
        ["first", "second"],
        ["first", "second", "third"],
    ]
