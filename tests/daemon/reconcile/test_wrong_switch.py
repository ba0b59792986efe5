"""bootc stages another image than the requested one, and the agent is killed meanwhile."""

import pytest

from tests.daemon import nodes, walk_budget
from tests.daemon.nodes import Node, assert_at_rest
from tests.daemon.reconcile import test_walks as walks
from tests.fakes.world import Killed, PowerCut, World
from tests.update.build import A, B, C
from treenail.api.machineconfig import MachineConfig
from treenail.api.object_meta import ObjectMeta

CONFIGS = tuple(MachineConfig(ObjectMeta(name=each.config)) for each in (A, B))


def make_node(directory: str) -> Node:
    """A node at A, whose next switch stages the image of C."""
    node = Node(nodes.world_at(A, *CONFIGS), bootc=directory)
    node.settle()
    node.world.staged_instead = C.digest
    return node


def move(node: Node) -> list[str]:
    """Move to B, and return every image that was booted."""
    world, booted = node.world, [A.digest]
    world.request_target(B)
    for _ in range(nodes.TURNS_TO_REST):
        world.drain_controller()
        node.turn()
        if world.booted != booted[-1]:
            booted.append(world.booted)
    return booted


def count_effects() -> int:
    with nodes.directories() as directory_of:
        node = make_node(directory_of("bootc"))
        steps: list[str] = []
        node.world.fault_point = steps.append
        assert move(node) == [A.digest, B.digest]
        return len(steps)


@pytest.mark.parametrize("fault", [Killed, PowerCut])
@walk_budget.exhaustive
def test_wrong_image_is_never_booted_wherever_the_agent_ends(fault: type[BaseException]) -> None:
    effects = count_effects()
    assert effects > 20
    for index in walk_budget.sample(range(effects)):
        with nodes.directories() as directory_of:
            node = make_node(directory_of("bootc"))
            world: World = node.world
            left = walks.strike(world, fault, after=index)
            assert move(node) == [A.digest, B.digest], index
            assert next(left, None) is None, f"effect {index} did not happen"
            assert_at_rest(world, B)
