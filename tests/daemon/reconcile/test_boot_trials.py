"""Boot trials across outages, restarts, modes and versions of the agent.

The real reconcile loop runs on a model of a machine, see `tests.fakes.world`.
"""

import json
from collections.abc import Callable

import pytest

from tests.daemon.configuration import test_config_walks as configs
from tests.daemon.configuration.test_config_walks import STOCK, config
from tests.daemon.nodes import Node, assert_at_rest
from tests.daemon.reconcile.test_bad_boots import assert_has, booted_b, in_trial_of, move, started
from tests.fakes.world import FakeCrashRecord, FakeHealth, World
from tests.update.build import A, B, C
from treenail.api import annotations as key
from treenail.api.disruptionpolicy import (
    ClusterDisruptionPolicy,
    DisruptionPolicy,
    FileDisruptionPolicy,
    RestartPolicyAction,
)
from treenail.daemon.reconcile.crash_counter import record_clean_stop
from treenail.errors import LedgerError
from treenail.update.decision.decide_boot import ROLLBACK_REBOOTS_ALLOWED
from treenail.update.state.ledger_record import Target

Json = dict[str, object]


def read_ledger(world: World) -> Json:
    return json.loads(world.ledger or "")


def change_ledger(world: World, change: Callable[[Json], None]) -> None:
    document = read_ledger(world)
    change(document)
    world.ledger = json.dumps(document)


def turn(node: Node) -> None:
    """One turn; an agent that cannot read its ledger exits and is started again."""
    node.world.drain_controller()
    try:
        node.turn()
    except LedgerError:
        node.process = None


def settle(node: Node) -> None:
    for _ in range(60):
        turn(node)


def begin_trial(node: Node) -> None:
    in_trial_of(node, B)
    node.turn()
    assert read_ledger(node.world)["update"]["phase"] == "verifying"


@pytest.mark.parametrize("ledger", ["not JSON", '{"version": 1, "current": 7}'])
def test_new_agent_that_cannot_read_the_ledger_returns_to_the_previous_one(ledger: str) -> None:
    node = started()
    world = node.world
    in_trial_of(node, B)
    readable, world.ledger = world.ledger, ledger
    while booted_b(world):
        turn(node)
    assert (world.booted, world.returns) == (A.digest, 1)
    world.ledger = readable
    settle(node)
    assert_has(world, A)
    assert read_ledger(world)["quarantined"]["target"]["image"] == B.image
    assert world.crash_record is None


def test_damaged_ledger_outside_a_trial_moves_nothing() -> None:
    node = started()
    node.process, node.world.ledger = None, "not JSON"
    boots = node.world.boots
    settle(node)
    assert (node.world.booted, node.world.boots) == (A.digest, boots)


def test_damaged_ledger_after_the_rollback_moves_nothing() -> None:
    node = started()
    world = node.world
    in_trial_of(node, B)
    world.ledger = "not JSON"
    settle(node)
    boots = world.boots
    settle(node)
    assert (world.booted, world.boots) == (A.digest, boots)


def test_new_agent_on_the_ledger_of_an_older_one_finishes_the_update() -> None:
    node = started()
    in_trial_of(node, B)

    def forget(document: Json) -> None:
        for name in ("retry", "retained", "prestaged", "apiBlamed"):
            document.pop(name, None)
        trial = document["update"]["bootTrial"]
        for name in ("healthMode", "failedBefore", "passedBefore", "pausedSeconds"):
            del trial[name]

    change_ledger(node.world, forget)
    node.world.crash_record = None
    node.settle()
    assert_at_rest(node.world, B)


def test_crashes_count_when_an_older_agent_wrote_no_crash_record() -> None:
    node = started()
    world = node.world
    in_trial_of(node, B)
    world.crash_record, world.crashes = None, booted_b
    node.settle()
    assert (world.booted, world.returns) == (A.digest, 1)


def test_old_agent_quarantines_a_target_whose_agent_left_an_unknown_phase() -> None:
    node = started()
    world = node.world
    in_trial_of(node, B)

    def add(document: Json) -> None:
        update = document["update"]
        update |= {"phase": "defrosting", "thaw": {"deep": 1}}
        document["added"] = [1]

    node.process = None
    node.turn()
    node.process = None
    change_ledger(world, add)
    world.rolled_back = True
    world.reboot()
    for _ in range(3):
        node.settle()
    boots = world.boots
    assert_has(world, A)
    ledger = read_ledger(world)
    assert (ledger["update"], ledger["quarantined"]["check"]) == (None, "Boot")
    node.settle()
    assert world.boots == boots, "the update began again"


def test_restarts_by_an_administrator_are_no_crashes() -> None:
    node = started()
    world = node.world
    slow = iter([True] * 30)
    world.is_unhealthy = lambda of: booted_b(of) and next(slow, False)
    in_trial_of(node, B)
    for _ in range(20):
        node.turn()
        record_clean_stop(FakeCrashRecord(world))
        node.process = None
    node.settle()
    assert_at_rest(world, B)
    assert world.returns == 0


def test_outage_longer_than_the_deadline_returns_no_node() -> None:
    node = started()
    world = node.world
    in_trial_of(node, B)
    world.api_up = False
    for _ in range(11):
        node.turn()
    assert node.clock.monotonic() > FakeHealth.DEADLINE_S
    world.api_up = True
    node.settle()
    assert_at_rest(world, B)
    assert world.returns == 0


def test_outage_after_a_restart_returns_no_node_that_reached_the_api_server() -> None:
    """Only the ledger says that the API server answered before the restart."""
    node = started()
    world = node.world
    begin_trial(node)
    while not read_ledger(world)["update"]["bootTrial"]["apiSinceReboot"]:
        node.turn()
    node.process = None
    assert node.settle_in_outage() == (B.digest, 0)
    assert_at_rest(world, B)


def test_rollback_that_boots_the_target_again_ends_after_three_reboots() -> None:
    node = started()
    world = node.world
    world.is_unhealthy = booted_b

    def forget_rollback(step: str) -> None:
        if step == "rolled back":
            world.rolled_back = False

    world.fault_point = forget_rollback
    boots = world.boots
    move(node, B)
    assert (world.booted, world.boots - boots) == (B.digest, 1 + ROLLBACK_REBOOTS_ALLOWED)
    assert "cannot roll back" in world.annotations[key.REASON]


def test_target_that_failed_in_an_outage_is_tried_again_after_it() -> None:
    node = started()
    world = node.world
    in_trial_of(node, B)
    world.api_up = False
    node.settle()
    assert (world.booted, world.returns) == (A.digest, 1)
    assert read_ledger(world)["quarantined"]["failsOnOrigin"]
    world.api_up = True
    for _ in range(2):
        node.settle()
    assert_at_rest(world, B)
    assert world.returns == 1


def test_target_that_lost_the_api_server_alone_stays_quarantined() -> None:
    node = started()
    world = node.world
    in_trial_of(node, B)
    while booted_b(world):
        world.api_up = not booted_b(world)
        world.drain_controller()
        node.turn()
    world.api_up = True
    for _ in range(3):
        node.settle()
    assert world.booted == A.digest
    quarantined = read_ledger(world)["quarantined"]
    assert (quarantined["check"], quarantined["failsOnOrigin"]) == ("ApiServer", False)


def test_check_that_failed_before_the_update_is_reported_and_fails_no_target() -> None:
    node = started()
    world = node.world
    world.is_unhealthy = lambda _: True
    move(node, B)
    assert_at_rest(world, B)
    assert world.returns == 0
    (event,) = [each for each in world.events if each.reason == "HealthCheckFailed"]
    assert "it failed before the reboot, too" in event.message


@pytest.mark.parametrize("mode", ["report", "off"])
def test_mode_on_the_node_prevents_the_rollback(mode: str) -> None:
    node = started()
    world = node.world
    world.annotations[key.HEALTH_MODE] = mode
    world.is_unhealthy = booted_b
    move(node, B)
    assert_at_rest(world, B)
    assert world.returns == 0
    events = [each.message for each in world.events if each.reason == "HealthCheckFailed"]
    assert [mode] == (["report"] if events else ["off"])


def test_mode_of_the_reboot_holds_without_api_server() -> None:
    node = started()
    world = node.world
    world.annotations[key.HEALTH_MODE] = "report"
    world.is_unhealthy = booted_b
    in_trial_of(node, B)
    assert node.settle_in_outage() == (B.digest, 0)
    assert_at_rest(world, B)


def test_crashing_agent_stays_in_report_mode() -> None:
    node = started()
    world = node.world
    world.annotations[key.HEALTH_MODE] = "report"
    in_trial_of(node, B)
    world.crashes = booted_b
    node.settle()
    assert (world.booted, world.returns) == (B.digest, 0)


def test_retry_annotation_ends_a_quarantine_once_for_each_value() -> None:
    node = started()
    world = node.world
    world.annotations[key.RETRY] = "before"
    node.settle()
    world.is_unhealthy = booted_b
    move(node, B)
    assert (world.booted, world.returns) == (A.digest, 1), "the old value ended it"
    world.annotations[key.RETRY] = "2026-01-01"
    for _ in range(3):
        node.settle()
    assert (world.booted, world.returns) == (A.digest, 2), "not tried again, or more than once"
    world.is_unhealthy = lambda _: False
    world.annotations[key.RETRY] = "2026-01-02"
    for _ in range(2):
        node.settle()
    assert_at_rest(world, B)


def make_live_update(node: Node) -> Target:
    """A config whose file restarts the kubelet without a reboot or a drain."""
    files = {configs.APP: "stock", configs.BAKED: configs.BAKED_TEXT}
    live = config("live", {**files, "/etc/kubelet.conf": "x"}, image=C.image, units=(configs.UNIT,))
    node.world.configs["live"] = live
    node.world.policy = ClusterDisruptionPolicy(
        DisruptionPolicy(
            files=(
                FileDisruptionPolicy(
                    "/etc/kubelet.conf", (RestartPolicyAction("kubelet.service"),)
                ),
            )
        )
    )
    return Target("live")


def test_update_that_restarts_the_kubelet_is_verified_without_a_reboot() -> None:
    node = started(STOCK)
    target, boots = make_live_update(node), node.world.boots
    node.world.request_target(target)
    shown = set()
    while node.world.annotations.get(key.CURRENT_CONFIG) != target.config:
        node.world.drain_controller()
        node.turn()
        shown.add(node.world.annotations.get(key.POST_CONFIG_ACTION, ""))
    node.settle()
    assert_at_rest(node.world, target)
    assert (node.world.boots, shown) == (boots, {""})
    past = read_ledger(node.world)["history"][0]
    assert "verifying" in past["phaseSeconds"]


def test_update_that_breaks_the_kubelet_without_a_reboot_is_undone_without_one() -> None:
    node = started(STOCK)
    world = node.world
    target, boots = make_live_update(node), world.boots
    world.is_unhealthy = lambda of: of.file("/etc/kubelet.conf") == b"x"
    move(node, target)
    assert_has(world, STOCK)
    ledger = read_ledger(world)
    assert (world.boots, ledger["quarantined"]["check"]) == (boots, "Kubelet")
    assert world.annotations[key.STATE] == "Degraded"


def test_invalid_mode_on_the_node_is_reported_once_and_does_not_hold() -> None:
    node = started()
    world = node.world
    world.annotations[key.HEALTH_MODE] = "pray"
    world.is_unhealthy = booted_b
    move(node, B)
    assert (world.booted, world.returns) == (A.digest, 1)
    messages = {each.message for each in world.events if each.reason == "InvalidHealthMode"}
    assert len(messages) == 1
    assert "'pray' is not a health mode" in messages.pop()
