"""An agent that crashes at each start from the first written file on, before any boot trial."""

import pytest

from tests.daemon.configuration.test_config_walks import APP, STOCK
from tests.daemon.machines import TOP
from tests.daemon.nodes import Node, assert_at_rest
from tests.daemon.reconcile.test_bad_boots import FILES_ALONE, has_other_files, move, started
from tests.daemon.reconcile.test_boot_trials import make_live_update, settle
from tests.fakes.world import Killed, PowerCut, World, read_phase
from treenail.api import annotations as key
from treenail.api.disruptionpolicy import (
    ClusterDisruptionPolicy,
    DisruptionPolicy,
    FileDisruptionPolicy,
    NonePolicyAction,
)
from treenail.host.rollback.undo_log import UNDO_DIRECTORY
from treenail.update.state.ledger_record import Phase, Target

OTHER = "/etc/other.conf"
KUBELET = "/etc/kubelet.conf"
TURNS = 60


def crash_always(_world: World) -> bool:
    return True


def crash_never(_world: World) -> bool:
    return False


def has_kubelet_file(world: World) -> bool:
    return world.file(KUBELET) is not None


def stop_in_applying(node: Node, target: Target, path: str, fault: type[BaseException]) -> None:
    """Strike once the file is written in phase applying; the agent is not started again."""
    world = node.world
    world.request_target(target)

    def strike(_step: str) -> None:
        if read_phase(world.ledger) is Phase.APPLYING and world.file(path) is not None:
            world.fault_point = lambda _: None
            raise fault

    world.fault_point = strike
    for _ in range(TURNS):
        world.drain_controller()
        node.turn()
        if node.process is None and read_phase(world.ledger) is Phase.APPLYING:
            return
    raise AssertionError(f"{path} was never written in phase applying")


def settle_often(node: Node) -> None:
    for _ in range(3):
        node.settle()


def test_power_cut_with_written_files_reboots_after_the_rollback() -> None:
    node = started(STOCK)
    world = node.world
    world.configs[FILES_ALONE.name] = FILES_ALONE
    stop_in_applying(node, Target("files"), OTHER, PowerCut)
    boots = world.boots
    world.crashes = has_other_files
    settle_often(node)
    assert world.file(OTHER) is None
    # The kernel and early services of that boot have read the files.
    assert world.boots > boots
    assert "crashed 5 times" in world.annotations[key.REASON]


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "without a restart"])
def test_update_is_restored_after_crashes_without_a_reboot(is_live: bool) -> None:
    node = started(STOCK)
    target, world = (make_live_update if is_live else make_quiet_update)(node), node.world
    boots = world.boots
    if is_live:
        stop_in_applying(node, target, KUBELET, Killed)
    else:
        stop_when_written(node, target)
    world.crashes = has_kubelet_file
    settle_often(node)
    assert (world.file(KUBELET), world.boots) == (None, boots)
    assert "crashed 5 times" in world.annotations[key.REASON]


def test_damaged_ledger_in_a_live_update_reboots_nothing() -> None:
    node = started(STOCK)
    target, world = make_live_update(node), node.world
    boots = world.boots
    stop_in_applying(node, target, KUBELET, Killed)
    world.crashes = crash_always
    node.turn()
    assert world.crash_record is not None
    world.crashes, world.ledger = crash_never, "not JSON"
    settle(node)
    assert world.boots == boots


def test_live_update_in_report_mode_keeps_its_files() -> None:
    node = started(STOCK)
    target, world = make_live_update(node), node.world
    world.annotations[key.HEALTH_MODE] = "report"
    stop_in_applying(node, target, KUBELET, Killed)
    world.crashes = has_kubelet_file
    settle_often(node)
    assert world.file(KUBELET) is not None


def test_boots_of_the_origin_are_no_boots_of_the_target() -> None:
    node = started(STOCK)
    world = node.world
    world.configs[FILES_ALONE.name] = FILES_ALONE
    stop_in_applying(node, Target("files"), OTHER, Killed)
    for _ in range(5):
        world.crashes = crash_always
        node.turn()
        node.process = None
        world.power_cut()
    world.crashes = crash_never
    settle_often(node)
    assert "booted" not in world.annotations.get(key.REASON, "")


def make_quiet_update(node: Node) -> Target:
    """A config with a new file that restarts nothing and needs no reboot."""
    target = make_live_update(node)
    files = tuple(FileDisruptionPolicy(each, (NonePolicyAction(),)) for each in (KUBELET, APP))
    node.world.policy = ClusterDisruptionPolicy(DisruptionPolicy(files=files))
    return target


def stop_when_written(node: Node, target: Target) -> None:
    """Kill the agent after the last written file, before it records more."""
    world = node.world
    stop_in_applying(node, target, KUBELET, Killed)
    assert has_kubelet_file(world)


@pytest.mark.parametrize("is_live", [True, False])
def test_update_has_a_trial_after_a_kill_if_it_restarted_the_kubelet(is_live: bool) -> None:
    node = started(STOCK)
    target, world = (make_live_update if is_live else make_quiet_update)(node), node.world
    stop_when_written(node, target)
    world.is_unhealthy = has_kubelet_file
    settle_often(node)
    kept = STOCK if is_live else target
    assert world.annotations[key.CURRENT_CONFIG] == kept.config
    assert has_kubelet_file(world) is not is_live


def test_file_changed_after_a_kill_keeps_the_undo_log() -> None:
    node = started(STOCK)
    target, world = make_quiet_update(node), node.world
    stop_when_written(node, target)
    # The new agent completes the files first; the undo log must still have the earlier change.
    tree = world.disk.tree()
    world.disk.replace_by({path: each for path, each in tree.items() if path != TOP + APP})
    stop_in_applying(node, target, APP, Killed)
    world.crashes = has_kubelet_file
    settle_often(node)
    assert not has_kubelet_file(world)


@pytest.mark.parametrize("drains", [True, False])
def test_file_that_needs_a_reboot_after_a_kill_is_not_left_out_of_it(*, drains: bool) -> None:
    node = started(STOCK)
    node.drains = drains
    target, world = make_live_update(node), node.world
    quiet = FileDisruptionPolicy(KUBELET, (NonePolicyAction(),))
    world.policy = ClusterDisruptionPolicy(DisruptionPolicy(files=(quiet,)))
    boots = world.boots
    stop_when_written(node, target)
    tree = world.disk.tree()
    world.disk.replace_by({path: each for path, each in tree.items() if path != TOP + APP})
    settle_often(node)
    # A reboot would come before the file is written, and the node would say that it is done.
    assert world.boots == boots
    assert world.annotations[key.CURRENT_CONFIG] == STOCK.config
    assert not has_kubelet_file(world)
    assert f"differs from {STOCK.config}: {APP}" in world.annotations[key.REASON]


def test_finished_update_without_a_restart_leaves_no_undo_log() -> None:
    node = started(STOCK)
    target, world = make_quiet_update(node), node.world
    move(node, target)
    assert_at_rest(world, target)
    assert not [path for path in world.disk.tree() if f"{UNDO_DIRECTORY}/" in path]


def test_crashes_that_nothing_can_undo_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    node = started(STOCK)
    target, world = make_quiet_update(node), node.world
    world.request_target(target)

    def strike(_step: str) -> None:
        if read_phase(world.ledger) is Phase.APPLYING:
            world.fault_point = lambda _: None
            raise Killed

    world.fault_point = strike
    for _ in range(TURNS):
        node.turn()
        if node.process is None:
            break
    assert not has_kubelet_file(world)
    world.crashes = crash_always
    for _ in range(TURNS):
        node.turn()
    assert "no written file of it can be restored" in caplog.text
