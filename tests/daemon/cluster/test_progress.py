"""Reports of the progress of an OS transaction: few, and none delays it."""

from tests.controllers.rollout.world import World
from treenail.daemon.reconcile.os_transaction import ProgressReporter
from treenail.errors import UnreachableError
from treenail.host.ostree.deployments import TransactionProgress


class Node:
    """Records what is written; can be unreachable."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.is_reachable = True

    def write(self, percent: int) -> None:
        if not self.is_reachable:
            raise UnreachableError("no answer")
        self.written.append(percent)


def report(clock: World, reporter: ProgressReporter, *percents: int | None, step_s: float) -> None:
    for percent in percents:
        reporter.handle_progress("one", TransactionProgress("pulling", percent))
        clock.seconds += step_s


def test_short_transaction_costs_no_write() -> None:
    node, clock = Node(), World()
    report(clock, ProgressReporter(node.write, clock), 0, 50, 100, step_s=0.5)
    assert node.written == []


def test_long_transaction_costs_ten_writes_at_most() -> None:
    node, clock = Node(), World()
    report(clock, ProgressReporter(node.write, clock), None, *range(101), step_s=30.0)
    assert node.written == list(range(10, 101, 10))


def test_failed_write_ends_the_reports_of_the_update() -> None:
    node, clock = Node(), World()
    node.is_reachable = False
    reporter = ProgressReporter(node.write, clock)
    report(clock, reporter, 0, 20, step_s=5.0)
    node.is_reachable = True
    report(clock, reporter, 40, 60, step_s=5.0)
    assert node.written == []
    for percent in (0, 50):
        reporter.handle_progress("two", TransactionProgress("pulling", percent))
        clock.seconds += 5.0
    assert node.written == [50]
