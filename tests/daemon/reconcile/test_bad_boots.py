"""Bad boots: the node rolls back to its previous deployment and config together.

The real reconcile loop runs on a model of a machine. An image, a config, the API server, the disk
or the agent is bad.
"""

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.daemon import walk_budget
from tests.daemon.configuration import test_config_walks as configs
from tests.daemon.configuration.test_config_walks import APP, NEXT, STOCK, Chaos, config
from tests.daemon.machines import planned
from tests.daemon.nodes import Node, NodeOf, Process, assert_at_rest, assert_has_arguments
from tests.daemon.reconcile import test_walks as walks
from tests.fakes.world import FakeHealth, Killed, PowerCut, World, read_phase
from tests.update.build import A, B, C
from treenail.api import annotations as key
from treenail.config.wanted_state import read_wanted_state
from treenail.errors import BusyError
from treenail.update.decision.user_requests import RequestKind, UserRequest
from treenail.update.state.ledger_record import Phase, Target
from treenail.update.steps.step_types import RecordOwnership

Bad = Callable[[World], bool]


def booted_b(world: World) -> bool:
    return world.booted == B.digest


def has_next(world: World) -> bool:
    return world.file(APP) == b"next"


def started(target: Target = A) -> Node:
    node = Node(configs.world_at(target))
    node.settle()
    node.world.returns = 0
    return node


def move(node: Node, target: Target) -> None:
    """Request the target, and run until the node is idle."""
    node.world.request_target(target)
    for _ in range(3):
        node.settle()


def assert_has(world: World, target: Target) -> None:
    """The machine is all of the target and nothing of another, and in service."""
    assert world.violations == []
    wish = read_wanted_state(world.configs[target.config])
    image = target.image or wish.os.image
    assert world.booted == image.partition("@")[2]
    assert_has_arguments(world, wish)
    steps = planned(world.disk, wish, target.config).steps
    assert [str(step) for step in steps if not isinstance(step, RecordOwnership)] == []
    assert not world.unschedulable
    assert not world.staged


def assert_came_back(world: World, target: Target, refused: Target, check: str) -> None:
    """The node is at its previous target, names the failed check, and quarantines the other."""
    assert_has(world, target)
    ledger = json.loads(world.ledger or "")
    assert ledger["current"] == {"config": target.config, "image": target.image}
    assert ledger["update"] is None
    assert ledger["quarantined"]["target"] == {"config": refused.config, "image": refused.image}
    assert ledger["quarantined"]["check"] == check
    notes = world.annotations
    assert (notes[key.STATE], notes[key.CURRENT_CONFIG]) == ("Degraded", target.config)
    assert refused.config in notes[key.REASON]
    assert "treenail retry" in notes[key.REASON]


def test_rolled_back_node_is_degraded_without_a_moment_of_work() -> None:
    """A rollout controller that reads the Node in between would report that it has recovered."""
    node = started()
    world, seen = node.world, list[str]()
    world.is_unhealthy = booted_b
    world.fault_point = lambda step: (
        seen.append(world.annotations[key.STATE]) if step == "patched" else None
    )
    move(node, B)
    assert "Degraded" in seen
    assert set(seen[seen.index("Degraded") :]) == {"Degraded"}


def test_bad_image_rolls_back_once_and_is_quarantined() -> None:
    node = started()
    node.world.is_unhealthy = booted_b
    move(node, B)
    assert_came_back(node.world, A, B, "Kubelet")
    assert "kubelet.service is failed" in node.world.annotations[key.REASON]
    boots = node.world.boots
    node.settle()
    assert (node.world.boots, node.world.returns) == (boots, 1)


def test_quarantined_target_is_logged_as_refused_and_not_as_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = started()
    node.world.is_unhealthy = booted_b
    move(node, B)
    caplog.set_level(logging.INFO)
    node.settle()
    assert any("still refused for the same reason" in each for each in caplog.messages)
    assert not any("retrying" in each for each in caplog.messages)


def test_bad_config_rolls_back_with_its_image() -> None:
    node = started(B)
    before = node.world.file(APP)
    node.world.is_unhealthy = has_next
    move(node, NEXT)
    assert_came_back(node.world, B, NEXT, "Kubelet")
    assert node.world.file(APP) == before


def test_bad_config_without_image_restores_its_files() -> None:
    other = config("other", {"/etc/other.conf": "x", APP: "stock"}, image=C.image)
    node = started(STOCK)
    node.world.configs["other"] = other
    node.world.is_unhealthy = lambda world: world.file("/etc/other.conf") == b"x"
    boots = node.world.boots
    move(node, Target("other"))
    assert_came_back(node.world, STOCK, Target("other"), "Kubelet")
    assert (node.world.boots - boots, node.world.returns) == (2, 0)


def test_power_cut_while_files_are_restored_ends_with_old_files_before_the_kubelet() -> None:
    node = started(STOCK)
    world = node.world
    world.configs["other"] = config("other", {"/etc/other.conf": "x"}, image=C.image)
    world.is_unhealthy = lambda world: world.file("/etc/other.conf") == b"x"
    world.request_target(Target("other"))
    boots = world.boots
    while read_phase(world.ledger) is not Phase.ROLLING_BACK:
        world.drain_controller()
        node.turn()
    world.disk.calls_left = 4
    while node.process is not None:
        node.turn()
    assert world.boots == boots + 2, "the first reboot began the boot trial"
    node.process = Process(world, node.clock)
    node.process.loop.finish_boot()
    assert world.file("/etc/other.conf") is None
    for _ in range(3):
        node.settle()
    assert_came_back(world, STOCK, Target("other"), "Kubelet")


@pytest.mark.parametrize("never_boots", [False, True])
def test_rollback_is_ready_only_with_restored_files(*, never_boots: bool) -> None:
    node = started(STOCK)
    world = node.world
    world.configs["bad"] = config("bad", {APP: "next"}, image=B.image)
    if never_boots:
        world.unbootable = frozenset({B.digest})
    world.is_unhealthy = has_next
    former = world.booted
    in_boot = world.boots
    world.request_target(Target("bad"))
    while world.boots == in_boot or world.booted != former:
        world.drain_controller()
        node.turn()
    assert world.file(APP) == b"next", "the shutdown left it in the former /etc"
    node.process = Process(world, node.clock)
    node.process.loop.finish_boot()
    assert world.file(APP) == b"stock"
    for _ in range(3):
        node.settle()
    check = "Boot" if never_boots else "Kubelet"
    assert_came_back(world, STOCK, Target("bad"), check)


def test_kernel_that_never_boots_is_quarantined_without_reboot() -> None:
    node = started()
    node.world.unbootable = frozenset({B.digest})
    boots = node.world.boots
    move(node, B)
    assert_came_back(node.world, A, B, "Boot")
    assert node.world.boots == boots + 1
    assert node.world.previous is None, "the bad deployment would be booted next"


@pytest.mark.parametrize("steps", range(12))
def test_kernel_that_never_boots_is_quarantined_whenever_agent_is_killed(steps: int) -> None:
    node = started()
    world = node.world
    world.unbootable = frozenset({B.digest})
    world.request_target(B)
    while world.previous is None or world.previous.digest != B.digest:
        world.drain_controller()
        node.turn()
    left = iter(range(steps))

    def fault_point(_step: str) -> None:
        if next(left, None) is None:
            world.fault_point = lambda _: None
            raise Killed

    world.fault_point = fault_point
    node.settle()
    assert_came_back(world, A, B, "Boot")
    assert world.previous is None, "the bad deployment would be booted next"


def test_rollback_by_user_is_not_reverted() -> None:
    node = started()
    world = node.world
    world.is_unhealthy = booted_b
    world.request_target(B)
    while not booted_b(world):
        world.drain_controller()
        node.turn()
    node.turn()
    node.process = None
    world.rolled_back = True
    world.reboot()
    for _ in range(2):
        node.settle()
    assert_came_back(world, A, B, "Boot")


def test_slow_node_within_deadline_is_not_rolled_back() -> None:
    node = started()
    world, clock = node.world, node.clock
    began: list[float] = []

    def slow(of: World) -> bool:
        if booted_b(of) and not began:
            began.append(clock.monotonic())
        return bool(began) and clock.monotonic() - began[0] < 0.8 * FakeHealth.DEADLINE_S

    world.is_unhealthy = slow
    move(node, B)
    assert_at_rest(world, B)
    assert world.returns == 0


def test_quarantined_target_is_retried_after_another_target() -> None:
    node = started()
    node.world.is_unhealthy = booted_b
    move(node, B)
    node.world.is_unhealthy = lambda _: False
    move(node, A)
    assert_at_rest(node.world, A)
    move(node, B)
    assert_at_rest(node.world, B)


def test_quarantined_target_is_retried_on_request() -> None:
    node = started()
    node.world.is_unhealthy = booted_b
    move(node, B)
    node.world.is_unhealthy = lambda _: False
    node.world.request = UserRequest(RequestKind.RETRY)
    node.settle()
    assert_at_rest(node.world, B)


def in_trial_of(node: Node, target: Target) -> None:
    node.world.request_target(target)
    while node.world.booted != target.digest:
        node.world.drain_controller()
        node.turn()


def test_api_server_lost_with_boot_rolls_back_only_once() -> None:
    node = started()
    world = node.world
    for booted in (A, B):
        in_trial_of(node, B)
        assert node.settle_in_outage() == (booted.digest, 1)
        world.request = UserRequest(RequestKind.RETRY)
    assert_at_rest(world, B)


def test_api_blamed_target_is_saved_with_the_rollback() -> None:
    node = started()
    world = node.world

    def fault_point(step: str) -> None:
        ledger = json.loads(world.ledger or "")
        if step == "ledger written" and ledger["update"]["phase"] == "rolling-back":
            world.fault_point = lambda _: None
            raise Killed

    in_trial_of(node, B)
    world.api_up, world.fault_point = False, fault_point
    node.settle()
    ledger = json.loads(world.ledger or "")
    assert (world.booted, ledger["apiBlamed"]) == (A.digest, {"config": B.config, "image": B.image})


def test_api_server_unreachable_before_reboot_causes_no_rollback() -> None:
    node = started()
    world = node.world
    world.request_target(B)
    while world.in_service:
        node.turn()
        world.drain_controller()
    node.turn()
    assert node.settle_in_outage() == (B.digest, 0)
    assert_at_rest(world, B)


def test_api_server_reached_after_boot_causes_no_rollback() -> None:
    node = started()
    world = node.world
    slow = iter([True] * 3)
    world.is_unhealthy = lambda of: booted_b(of) and next(slow, False)
    in_trial_of(node, B)
    node.turn()
    node.turn()
    assert node.settle_in_outage() == (B.digest, 0)
    assert_at_rest(world, B)


def test_rollback_needs_no_api_server() -> None:
    node = started()
    world = node.world
    world.is_unhealthy = booted_b
    in_trial_of(node, B)
    assert node.settle_in_outage() == (A.digest, 1)
    assert_came_back(world, A, B, "Kubelet")


def test_full_disk_rolls_back_without_ledger() -> None:
    node = started()
    node.world.is_ledger_full = booted_b
    move(node, B)
    assert_came_back(node.world, A, B, "Boot")
    assert node.world.returns == 1


def test_agent_crashing_at_each_start_is_rolled_back() -> None:
    node = started()
    node.world.crashes = booted_b
    move(node, B)
    assert_came_back(node.world, A, B, "Agent")
    assert "crashed 5 times" in node.world.annotations[key.REASON]


FILES_ALONE = config("files", {"/etc/other.conf": "x", APP: "stock"}, image=C.image)
AGENT_WAYS = [(A, B), (STOCK, Target("files"))]


def crashing(origin: Target, target: Target) -> Node:
    """A node in its first boot into the target, where the agent crashes at each start."""
    node = started(origin)
    world, boots = node.world, node.world.boots
    world.configs[FILES_ALONE.name] = FILES_ALONE
    world.request_target(target)
    while world.boots == boots:
        world.drain_controller()
        node.turn()
    world.crashes = has_other_files
    return node


def doomed(origin: Target) -> Node:
    """A node whose agent crashes at each start with the files of a target."""
    node = started(origin)
    node.world.configs[FILES_ALONE.name] = FILES_ALONE
    node.world.crashes = has_other_files
    return node


def has_other_files(world: World) -> bool:
    return booted_b(world) or world.file("/etc/other.conf") is not None


def count_effects(node: Node, target: Target) -> int:
    """Move to the target, and return the number of effects of that."""
    steps: list[str] = []
    node.world.fault_point = steps.append
    move(node, target)
    return len(steps)


@pytest.mark.parametrize(("origin", "target"), AGENT_WAYS)
@pytest.mark.parametrize("fault", [Killed, PowerCut])
@pytest.mark.parametrize("is_doomed", [False, True], ids=["crashing", "before the reboot"])
@walk_budget.exhaustive
def test_crashing_agent_rolls_back_despite_interruption_at_any_effect(
    fault: type[BaseException], origin: Target, target: Target, is_doomed: bool
) -> None:
    """The files of a target are in effect before its reboot: an interruption shows the crash."""

    def start() -> Node:
        return doomed(origin) if is_doomed else crashing(origin, target)

    effects = count_effects(start(), target)
    assert effects > 20
    for index in walk_budget.sample(range(effects)):
        node = start()
        world = node.world
        left = walks.strike(world, fault, after=index)
        move(node, target)
        assert next(left, None) is None, f"effect {index} did not happen"
        assert_came_back(world, origin, target, "Agent")


def test_crashing_agent_rolls_back_after_other_transaction_ends() -> None:
    node = crashing(A, B)
    world = node.world
    busy = iter([True] * 3)

    def fault_point(step: str) -> None:
        if step == "roll back" and next(busy, False):
            raise BusyError("rpm-ostreed is busy with RefreshMd")

    world.fault_point = fault_point
    move(node, B)
    assert_came_back(world, A, B, "Agent")
    assert next(busy, False) is False


def test_agent_crashing_after_rollback_does_not_reboot_again() -> None:
    for origin, target in AGENT_WAYS:
        node = crashing(origin, target)
        world = node.world
        world.crashes = lambda _: True
        node.settle()
        boots, digest = world.boots, world.booted
        node.settle()
        assert (world.boots, world.booted) == (boots, digest)
        world.crashes = lambda _: False
        for _ in range(2):
            node.settle()
        assert_came_back(world, origin, target, "Agent")


def test_boots_ending_before_verdict_roll_back() -> None:
    node = started()
    world = node.world
    in_trial_of(node, B)
    for _ in range(4):
        if booted_b(world):
            node.turn()
            node.process = None
            world.power_cut()
    node.settle()
    assert_came_back(world, A, B, "Agent")
    assert "was booted 4 times" in world.annotations[key.REASON]


def test_power_cut_before_rollback_reboot_is_no_failed_boot(
    node_of: NodeOf,
) -> None:
    world = walks.world_at(A)
    node = node_of(world)
    node.settle()
    move(node, B)
    world.request_target(A)
    while world.staging is None or world.locked:
        world.drain_controller()
        if node.process is not None:
            node.process.cluster.see()
            world.fault_point = lambda step: cut(step, world)
        node.turn()
        if world.booted == B.digest and world.boots > 2:
            break
    world.fault_point = lambda _: None
    move(node, A)
    assert_at_rest(world, A)


def cut(step: str, world: World) -> None:
    """Cut the power as soon as the staged deployment is the next to boot."""
    if world.staging is not None and not world.locked and step in ("reboot", "unlocked"):
        world.fault_point = lambda _: None
        raise PowerCut


@pytest.mark.parametrize("unit_steps", [1, 4])
@pytest.mark.parametrize("fault", [Killed, PowerCut])
@walk_budget.exhaustive
def test_rollback_survives_interruption_at_any_effect(
    node_of: NodeOf, fault: type[BaseException], unit_steps: int
) -> None:
    def unhealthy_node() -> Node:
        world = walks.world_at(A)
        world.unit_steps = unit_steps
        node = node_of(world)
        node.settle()
        world.is_unhealthy = booted_b
        in_trial_of(node, B)
        return node

    effects = count_effects(unhealthy_node(), B)
    assert effects > 10
    for index in walk_budget.sample(range(effects)):
        node = unhealthy_node()
        world = node.world
        left = walks.strike(world, fault, after=index)
        boots = world.boots
        move(node, B)
        assert next(left, None) is None, f"effect {index} did not happen"
        assert_came_back(world, A, B, "Kubelet")
        assert world.returns == 1
        assert world.boots <= boots + (2 if fault is PowerCut else 1)


def reboot_while_cancelling(node: Node, target: Target, following: Target) -> None:
    """Reboot into an unlocked target after another was requested, before the first is dropped."""
    world = node.world

    def die_at(is_due: Callable[[], bool], phase: Phase) -> None:
        def fault_point(_step: str) -> None:
            if read_phase(world.ledger) is phase and is_due():
                raise Killed

        world.fault_point = fault_point
        for _ in range(40):
            world.drain_controller()
            node.turn()
            if node.process is None and read_phase(world.ledger) is phase:
                break
        world.fault_point = lambda _: None

    node.settle()
    world.request_target(target)
    die_at(lambda: bool(world.staged) and not world.locked, Phase.REBOOTING)
    world.request_target(following)
    die_at(lambda: True, Phase.CANCELLING)
    world.reboot()
    assert world.booted == target.digest


def test_reboot_while_cancelling_rolls_back(node_of: NodeOf) -> None:
    world = walks.world_at(A)
    node = node_of(world)
    reboot_while_cancelling(node, C, B)
    world.api_up = False
    node.settle()
    assert world.booted == A.digest
    world.api_up = True
    node.settle()
    assert_has(world, B)


def end_walk(node: Node, chaos: Any, seed: int) -> None:
    """Walk at random, then without faults, and check that config and image match."""
    world = node.world
    world.fault_point, world.on_wait = chaos.fault_point, chaos.on_wait
    try:
        for _ in range(80):
            chaos.step()
            node.turn()
        world.fault_point, world.on_wait = (lambda _: None), (lambda: None)
        world.disk.calls_left = None
        world.api_up, world.loses_answers = True, 0
        for _ in range(3):
            node.settle()
        ledger = json.loads(world.ledger or "")
        assert ledger["update"] is None
        if ledger["quarantined"] is None:
            assert_at_rest(world, chaos.target)
        current = Target(ledger["current"]["config"], ledger["current"]["image"])
        assert_has(world, current)
        returns = world.returns
        node.settle()
        assert world.returns == returns, "back twice"
    except AssertionError as error:
        raise AssertionError(
            f"seed {seed}: {error}\n{world.annotations}\n{world.ledger}"
        ) from error


@walk_budget.walk
def test_walk_of_images_ends_with_config_and_image_that_match(part: int, node_of: NodeOf) -> None:
    for seed in walk_budget.seeds(part):
        world = walks.world_at(A)
        node = node_of(world)
        node.settle()
        world.is_unhealthy = booted_b
        chaos = walks.Chaos(node, seed)
        end_walk(node, chaos, seed)


BAD: list[tuple[str, Bad]] = [
    ("image", booted_b),
    ("config", has_next),
    ("both", lambda world: booted_b(world) or has_next(world)),
]


@pytest.mark.parametrize(("what", "bad"), BAD)
@walk_budget.walk
def test_walk_with_bad_target_ends_with_config_and_image_that_match(
    what: str, bad: Bad, part: int
) -> None:
    for seed in walk_budget.seeds(part):
        world = configs.world_at(STOCK)
        node = Node(world)
        world.is_unhealthy = bad
        chaos = Chaos(node, seed)
        chaos.target = STOCK
        end_walk(node, chaos, seed)
