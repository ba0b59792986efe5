"""An update's impact is planned before any change, and planned again before it is applied."""

import json
import logging
from dataclasses import replace

import pytest

from tests.config import unappliable
from tests.daemon.configuration.test_config_walks import (
    APP,
    BAKED,
    BAKED_TEXT,
    FREE,
    FREELY,
    NEXT,
    STOCK,
    UNIT,
    config,
    world_at,
)
from tests.daemon.machines import TOP
from tests.daemon.nodes import Node, assert_at_rest
from tests.fakes.disk import Entry
from tests.fakes.world import PLATFORM, World
from tests.update.build import A, B
from treenail.api import annotations as key
from treenail.api.disruptionpolicy import (
    DEFAULT_POLICY,
    ClusterDisruptionPolicy,
    DisruptionPolicy,
    DrainPolicyAction,
    FileDisruptionPolicy,
    NonePolicyAction,
)
from treenail.api.machineconfig import MachineConfig
from treenail.update.state.ledger_record import Phase, Target, from_json

THIRD = Target("third")


def phase(node: Node) -> Phase | None:
    update = from_json(json.loads(node.world.ledger or "{}")).update
    return update.phase if update else None


def test_disruption_policy_decides_impact_of_a_file() -> None:
    world = world_at(STOCK)
    world.configs["third"] = config("third", {APP: "third", BAKED: BAKED_TEXT}, units=(UNIT,))
    free = DisruptionPolicy(files=(FileDisruptionPolicy(APP, (NonePolicyAction(),)),))
    world.policy = ClusterDisruptionPolicy(DEFAULT_POLICY.override_with(free))
    world.request_target(THIRD)
    boots = world.boots
    Node(world).settle()
    assert_at_rest(world, THIRD)
    assert world.boots == boots
    assert world.annotations.get(key.DESIRED_DRAIN) == f"uncordon-{STOCK.config}", (
        "the drain was requested again"
    )


def test_drain_without_reboot_ends_after_files_are_written() -> None:
    world = world_at(STOCK)
    world.configs["third"] = config("third", {APP: "third", BAKED: BAKED_TEXT}, units=(UNIT,))
    drained = DisruptionPolicy(files=(FileDisruptionPolicy(APP, (DrainPolicyAction(),)),))
    world.policy = ClusterDisruptionPolicy(DEFAULT_POLICY.override_with(drained))
    world.request_target(THIRD)
    boots = world.boots
    node = Node(world)
    while world.in_service:
        assert world.file(APP) == b"stock"
        node.turn()
        world.drain_controller()
    node.settle()
    assert_at_rest(world, THIRD)
    assert world.boots == boots
    assert world.annotations[key.DESIRED_DRAIN] == "uncordon-third"


def test_policy_being_updated_is_awaited() -> None:
    world = world_at(NEXT)
    world.policy = replace(world.policy, is_settled=False)
    world.request_target(FREELY)
    node = Node(world)
    for _ in range(4):
        node.turn()
    assert world.annotations[key.STATE] == "Working"
    node.settle()
    assert world.annotations[key.CURRENT_CONFIG] == NEXT.config
    assert world.annotations[key.STATE] == "Degraded", "after ten minutes"
    world.policy = replace(world.policy, is_settled=True)
    node.settle()
    assert_at_rest(world, FREELY)


def test_update_that_now_needs_reboot_is_drained() -> None:
    world = world_at(NEXT)
    world.request_target(FREELY)
    node = Node(world)
    while phase(node) is not Phase.STAGING:
        node.turn()
    changed = world.disk.tree() | {TOP + APP: Entry("file", 0o644, b"changed by another program")}
    boots = world.boots
    node.process = None
    world.disk.replace_by(changed)
    node.settle()
    assert_at_rest(world, FREELY)
    assert world.boots == boots + 1


def test_unknown_file_owner_is_rejected_before_drain() -> None:
    world = world_at(NEXT)
    third = config("third", {APP: "third"})
    third.config["storage"]["files"][0]["user"] = {"name": "no-such-user"}  # type: ignore[index]
    world.configs["third"] = third
    world.request_target(THIRD)
    Node(world).settle()
    assert world.annotations[key.STATE] == "Degraded"
    assert "no-such-user" in world.annotations[key.REASON]
    assert not world.unschedulable
    assert world.file(APP) == b"next"


@pytest.mark.parametrize("name", ["merge", "remote", "tag"])
def test_config_that_no_node_can_apply_is_rejected_before_staging(name: str) -> None:
    world = world_at(NEXT)
    spec, message = unappliable.CASES[name]
    third = MachineConfig.from_json(unappliable.make_machine_config("third", spec))
    world.configs["third"] = third
    world.request_target(THIRD)
    Node(world).settle()
    assert world.annotations[key.STATE] in {"Degraded", "Unreconcilable"}
    assert f"MachineConfig third: {message}" in world.annotations[key.REASON]
    assert not world.unschedulable
    assert world.file(APP) == b"next"


def test_file_at_path_of_directory_is_rejected_before_drain() -> None:
    world = world_at(FREELY)
    world.configs["third"] = config("third", {FREE.rpartition("/")[0]: "third"})
    drain = world.annotations.get(key.DESIRED_DRAIN)
    world.request_target(THIRD)
    Node(world).settle()
    assert world.annotations[key.STATE] == "Degraded"
    assert "a directory exists at this path" in world.annotations[key.REASON]
    # Moving it away would be drift of the present config, which blocks the update.
    assert f"and then run: rmdir {FREE.rpartition('/')[0]}" in world.annotations[key.REASON]
    assert world.annotations.get(key.DESIRED_DRAIN) == drain, "the drain was requested again"
    assert world.file(APP) == b"next"


def test_irreconcilable_config_is_rejected_unless_overridden() -> None:
    world = world_at(NEXT)
    third = config("third", {APP: "next"}, arguments=("n=1", "n=2"))
    third.config["storage"]["disks"] = [{"device": "/dev/sda"}]  # type: ignore[index]
    world.configs["third"] = third
    world.request_target(THIRD)
    node = Node(world)
    node.settle()
    assert world.annotations[key.STATE] == "Unreconcilable"
    assert "disks" in world.annotations[key.REASON]
    world.policy = replace(world.policy, irreconcilable_overrides=("Disks",))
    node.process = None
    node.settle()
    assert_at_rest(world, THIRD)


def test_argument_of_the_machine_stays_when_the_config_drops_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = world_at(B)
    assert from_json(json.loads(world.ledger or "")).machine_arguments == {"b=1": 1}
    world.request_target(NEXT)
    caplog.set_level(logging.INFO)
    Node(world).settle()
    assert_at_rest(world, NEXT)
    counts = from_json(json.loads(world.ledger or "")).machine_arguments
    assert counts == {"b=1": 1, "n=1": 1, "n=2": 0}
    assert any(text.startswith("keeping the kernel argument b=1: ") for text in caplog.messages)


@pytest.mark.parametrize("first", [PLATFORM, ()], ids=["known", "unknown"])
def test_argument_of_a_config_of_an_earlier_agent_goes_where_the_first_boot_is_known(
    first: tuple[str, ...],
) -> None:
    world = world_at(B)
    ledger = json.loads(world.ledger or "")
    del ledger["machineArguments"]
    world.ledger, world.first_arguments = json.dumps(ledger), first
    assert world.system.arguments == (*PLATFORM, "b=1")
    world.request_target(A)
    Node(world).settle()
    assert world.system.arguments == (PLATFORM if first else (*PLATFORM, "b=1"))


def test_granted_drain_is_not_requested_again_after_restart() -> None:
    world = world_at(STOCK)
    world.request_target(NEXT)
    node = Node(world)
    while phase(node) is not Phase.DRAINING or world.annotations[key.STATE] != "Working":
        node.turn()
    node.turn()
    token = world.annotations[key.DESIRED_DRAIN]
    world.drain_controller()
    node.process = None
    seen = {token}
    while phase(node) in {Phase.DRAINING, Phase.APPLYING, Phase.REBOOTING}:
        node.turn()
        seen.add(world.annotations[key.DESIRED_DRAIN])
    assert seen - {token} <= {f"uncordon-{NEXT.config}"}
    node.settle()
    assert_at_rest(world, NEXT)


@pytest.mark.parametrize("target", [A, Target(B.config, A.image)], ids=["writes", "reboots"])
def test_node_uncordoned_during_the_checks_before_a_change_is_drained_again(
    target: Target,
) -> None:
    world = world_at(A)
    node = Node(world)
    node.settle()
    world.request_target(B)
    node.settle()
    world.request_target(target)
    is_uncordoned = iter([True])

    def uncordon_once(of: World) -> bool:
        """The checks before files are written and before the reboot take time."""
        if phase(node) is Phase.DRAINING and of.unschedulable and next(is_uncordoned, False):
            of.unschedulable = False
        return False

    world.is_unhealthy = uncordon_once
    node.settle()
    assert next(is_uncordoned, None) is None
    assert_at_rest(world, target)
