"""The table of phase transitions, compared with what the daemon's loop really does.

Every fake ledger reports a transition that is not in the table as a violation, so all tests of the
daemon check that the table is complete. Here each entry of the table is shown to happen: the agent
is killed at the begin or at the end of a phase, an event follows, and the agent starts again.
All combinations of phase, event, update and moment are tried by `make test-long`.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.daemon.configuration import test_config_walks as configs
from tests.daemon.nodes import Node
from tests.daemon.reconcile import test_walks as walks
from tests.daemon.reconcile.test_bad_boots import reboot_while_cancelling
from tests.daemon.walk_budget import exhaustive, sample
from tests.fakes.world import Killed, World, read_phase
from tests.update.build import DIGEST_C, A, B, C
from treenail.update.state.ledger_record import TRANSITIONS, Phase, Target

Transition = tuple[Phase | None, Phase | None]

# Another image and other files; files that need a reboot; files that disrupt nothing.
OS_AND_FILES = configs.NEXT
FILES_REBOOT = Target("other")
FILES_ONLY = configs.FREELY
OTHER_CONFIG = configs.config(
    FILES_REBOOT.config, {configs.APP: "other"}, image=C.image, arguments=("n=1", "n=2")
)
SAME_CONFIG = Target(B.config, f"registry.example.com/os/node@{DIGEST_C}")


def end_process(node: Node) -> None:
    node.process = None


def cut_power(node: Node) -> None:
    end_process(node)
    node.world.power_cut()


def reboot(node: Node) -> None:
    end_process(node)
    node.world.reboot()


def request_another_target(node: Node) -> None:
    end_process(node)
    node.world.request_target(A)


def uncordon(node: Node) -> None:
    end_process(node)
    node.world.unschedulable = False


def make_unhealthy(node: Node) -> None:
    node.world.is_unhealthy = lambda world: world.booted in {B.digest, SAME_CONFIG.digest}


def crash_at_each_start(node: Node) -> None:
    end_process(node)
    node.world.crashes = lambda world: world.booted in {B.digest, SAME_CONFIG.digest}


def crash_after_power_cut(node: Node) -> None:
    cut_power(node)
    node.world.crashes = lambda world: world.file(configs.APP) == b"other"


def boot_previous_deployment(node: Node) -> None:
    end_process(node)
    node.world.rolled_back = True
    node.world.power_cut()


EVENTS: tuple[Callable[[Node], None], ...] = (
    end_process,
    cut_power,
    reboot,
    request_another_target,
    uncordon,
    make_unhealthy,
    crash_at_each_start,
    crash_after_power_cut,
    boot_previous_deployment,
)


@dataclass(frozen=True, slots=True)
class Update:
    start: Target
    target: Target
    drains: bool = True
    """Whether the settings require a drain."""


IMAGE = Update(A, B)
IMAGE_WITHOUT_DRAIN = Update(A, B, drains=False)
IMAGE_ALONE = Update(B, SAME_CONFIG)
IMAGE_ALONE_WITHOUT_DRAIN = Update(B, SAME_CONFIG, drains=False)
IMAGE_AND_FILES = Update(configs.STOCK, OS_AND_FILES)
FILES_WITH_REBOOT = Update(OS_AND_FILES, FILES_REBOOT)
FILES_WITHOUT_REBOOT = Update(OS_AND_FILES, FILES_ONLY)
UPDATES = (
    IMAGE,
    IMAGE_WITHOUT_DRAIN,
    IMAGE_ALONE,
    IMAGE_ALONE_WITHOUT_DRAIN,
    IMAGE_AND_FILES,
    FILES_WITH_REBOOT,
    FILES_WITHOUT_REBOOT,
)

# The phases that an update passes without an event.
PHASES = (Phase.STAGING, Phase.DRAINING, Phase.APPLYING, Phase.REBOOTING, Phase.VERIFYING)

# The steps of the fake ledger after which a phase began, and before the next one begins.
BEGIN, END = "ledger written", "ledger write"


def run_until(node: Node, phase: Phase, moment: str) -> bool:
    """Run the agent until the moment of the phase, and kill it there."""
    world = node.world

    def kill_in_phase(step: str) -> None:
        if step == moment and read_phase(world.ledger) is phase:
            raise Killed

    world.fault_point = kill_in_phase
    for _ in range(40):
        node.turn()
        if node.process is None and read_phase(world.ledger) in {phase, None}:
            break
        world.drain_controller()
    world.fault_point = lambda _: None
    return read_phase(world.ledger) is phase


Interruption = tuple[Phase, Callable[[Node], None], Update, str]
"""The event happens after the agent was killed at a moment of the phase of the update."""

# Together they pass every transition; found by trying all combinations.
INTERRUPTIONS: tuple[Interruption, ...] = (
    (Phase.STAGING, end_process, FILES_WITHOUT_REBOOT, BEGIN),
    (Phase.STAGING, request_another_target, IMAGE, BEGIN),
    (Phase.STAGING, make_unhealthy, IMAGE, BEGIN),
    (Phase.STAGING, crash_at_each_start, IMAGE, BEGIN),
    (Phase.DRAINING, request_another_target, IMAGE, BEGIN),
    (Phase.DRAINING, boot_previous_deployment, IMAGE_AND_FILES, BEGIN),
    (Phase.APPLYING, cut_power, IMAGE, BEGIN),
    (Phase.APPLYING, cut_power, FILES_WITH_REBOOT, END),
    (Phase.APPLYING, crash_after_power_cut, FILES_WITH_REBOOT, END),
    (Phase.APPLYING, request_another_target, IMAGE, BEGIN),
    (Phase.APPLYING, uncordon, IMAGE, BEGIN),
    (Phase.REBOOTING, cut_power, IMAGE_ALONE, BEGIN),
    (Phase.REBOOTING, uncordon, IMAGE_ALONE, BEGIN),
    (Phase.VERIFYING, boot_previous_deployment, IMAGE, BEGIN),
)
ALL_INTERRUPTIONS = tuple(itertools.product(PHASES, EVENTS, UPDATES, (BEGIN, END)))


def interrupt_update(interruption: Interruption) -> World | None:
    """Return the world after the update; None if the update never was in that phase."""
    phase, event, update, moment = interruption
    world = configs.world_at(update.start)
    world.configs[OTHER_CONFIG.name] = OTHER_CONFIG
    node = Node(world, drains=update.drains)
    node.settle()
    world.transitions.clear()
    world.request_target(update.target)
    if not run_until(node, phase, moment):
        return None
    event(node)
    node.settle()
    return world


def find_unlisted_transitions(world: World) -> list[str]:
    return [each for each in world.violations if "was followed by" in each]


@pytest.mark.parametrize("phase", Phase)
def test_each_phase_has_a_way_in_and_a_way_to_the_end(phase: Phase) -> None:
    reached: set[Phase | None] = {None}
    ends: set[Phase | None] = {None}
    for _ in TRANSITIONS:
        reached |= set(itertools.chain.from_iterable(TRANSITIONS[each] for each in reached))
        ends |= {each for each, following in TRANSITIONS.items() if ends & following.keys()}
    assert phase in reached & ends


def test_transitions_lead_to_another_phase_for_a_reason() -> None:
    assert set(TRANSITIONS) == {None, *Phase}
    for phase, following in TRANSITIONS.items():
        assert phase not in following
        assert all(following.values())


def test_every_transition_of_the_table_happens() -> None:
    node = Node(walks.world_at(A))
    reboot_while_cancelling(node, C, B)
    node.settle()
    happened: set[Transition] = set(node.world.transitions)
    for interruption in INTERRUPTIONS:
        world = interrupt_update(interruption)
        assert world is not None, interruption
        assert find_unlisted_transitions(world) == [], interruption
        happened |= world.transitions
    expected = {(phase, each) for phase, following in TRANSITIONS.items() for each in following}
    assert happened == expected


@exhaustive
def test_no_other_transition_happens() -> None:
    for interruption in sample(ALL_INTERRUPTIONS):
        world = interrupt_update(interruption)
        assert world is None or find_unlisted_transitions(world) == [], interruption
