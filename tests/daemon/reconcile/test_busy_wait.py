"""Another program locks the sysroot, and nothing reports when it unlocks it."""

import pytest

from tests.daemon.nodes import Node, assert_at_rest
from tests.daemon.reconcile.test_prestage import request_prestage
from tests.daemon.reconcile.test_walks import world_at
from tests.fakes.world import World
from tests.update.build import A, B, C
from treenail.api import annotations as key
from treenail.errors import BusyError

LEAST_S = 4.0
HELD = "another program, such as bootc or ostree, holds the sysroot"


class Holding:
    """A fault_point in which the step is refused until it was tried a few times."""

    def __init__(self, world: World, step: str) -> None:
        self.step, self.tries = step, 0
        world.is_sysroot_locked, world.fault_point = True, self

    def __call__(self, step: str) -> None:
        if step == self.step:
            self.tries += 1
            if self.tries <= 4:
                raise BusyError(HELD)


@pytest.mark.parametrize("step", ["stage begins", "pin", "unpin"])
def test_rejected_login_update_retries_with_backoff_without_degraded(step: str) -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.request_target(B)
    node.settle()
    holding = Holding(world, step)
    world.request_target(C)
    pauses = paused(world, node, holding)
    assert_growing(pauses)
    node.settle()
    assert holding.tries == 5
    assert_at_rest(world, C)


def test_failed_prestage_is_retried_with_backoff() -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    holding = Holding(world, "stage begins")
    request_prestage(world, B)
    pauses = paused(world, node, holding)
    assert_growing(pauses)
    node.settle()
    assert (holding.tries, world.staged) == (5, B.digest)


def paused(world: World, node: Node, holding: Holding) -> list[float]:
    """How long, in seconds, the agent pauses after each try that is refused."""
    pauses: list[float] = []
    for _ in range(200):
        before = holding.tries
        world.drain_controller()
        delay_s = node.turn()
        assert world.annotations[key.STATE] in {"Done", "Working"}
        if holding.tries > before:
            pauses.append(delay_s)
        if holding.tries > 4:
            return pauses[:4]
    raise AssertionError(f"{holding.step} was tried {holding.tries} times only")


def assert_growing(pauses: list[float]) -> None:
    assert pauses[0] >= LEAST_S
    assert pauses[3] > pauses[0]
