"""What an update costs is worked out before anything is touched, and looked at again when due."""

import json
from dataclasses import replace

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
from tests.update.build import A
from treenail.api import annotations as key
from treenail.api.disruptionpolicy import (
    DEFAULT_POLICY,
    ClusterDisruptionPolicy,
    DisruptionPolicy,
    DrainPolicyAction,
    FileDisruptionPolicy,
    NonePolicyAction,
)
from treenail.update.state.phases import Phase
from treenail.update.state.record import Target, from_json

THIRD = Target("third")


def phase(node: Node) -> Phase | None:
    update = from_json(json.loads(node.world.ledger or "{}")).update
    return update.phase if update else None


def test_the_policy_of_the_cluster_says_what_a_file_costs() -> None:
    world = world_at(STOCK)
    world.configs["third"] = config("third", {APP: "third", BAKED: BAKED_TEXT}, units=(UNIT,))
    free = DisruptionPolicy(files=(FileDisruptionPolicy(APP, (NonePolicyAction(),)),))
    world.policy = ClusterDisruptionPolicy(DEFAULT_POLICY.override_with(free))
    world.ask_for(THIRD)
    boots = world.boots
    Node(world).settle()
    assert_at_rest(world, THIRD)
    assert world.boots == boots
    assert world.annotations.get(key.DESIRED_DRAIN) == f"uncordon-{STOCK.config}", "not asked anew"


def test_a_drain_without_a_reboot_is_taken_back_after_the_files_are_written() -> None:
    world = world_at(STOCK)
    world.configs["third"] = config("third", {APP: "third", BAKED: BAKED_TEXT}, units=(UNIT,))
    drained = DisruptionPolicy(files=(FileDisruptionPolicy(APP, (DrainPolicyAction(),)),))
    world.policy = ClusterDisruptionPolicy(DEFAULT_POLICY.override_with(drained))
    world.ask_for(THIRD)
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


def test_a_policy_that_is_being_changed_is_waited_for() -> None:
    world = world_at(NEXT)
    world.policy = replace(world.policy, is_settled=False)
    world.ask_for(FREELY)
    node = Node(world)
    node.settle()
    assert world.annotations[key.CURRENT_CONFIG] == NEXT.config
    assert world.annotations[key.STATE] == "Working"
    world.policy = replace(world.policy, is_settled=True)
    node.settle()
    assert_at_rest(world, FREELY)


def test_what_has_come_to_ask_for_a_reboot_since_is_drained_for() -> None:
    world = world_at(NEXT)
    world.ask_for(FREELY)
    node = Node(world)
    while phase(node) is not Phase.STAGING:
        node.turn()
    changed = world.disk.tree() | {TOP + APP: Entry("file", 0o644, b"somebody else's")}
    boots = world.boots
    node.process = None
    world.disk.replace_by(changed)
    node.settle()
    assert_at_rest(world, FREELY)
    assert world.boots == boots + 1


def test_an_owner_whom_the_machine_does_not_know_is_refused_before_the_drain() -> None:
    world = world_at(NEXT)
    third = config("third", {APP: "third"})
    assert third.config is not None
    third.config["storage"]["files"][0]["user"] = {"name": "nobody-here"}  # type: ignore[index]
    world.configs["third"] = third
    world.ask_for(THIRD)
    Node(world).settle()
    assert world.annotations[key.STATE] == "Degraded"
    assert "nobody-here" in world.annotations[key.REASON]
    assert not world.unschedulable
    assert world.file(APP) == b"next"


def test_a_file_in_the_place_of_a_directory_is_refused_before_the_drain() -> None:
    world = world_at(FREELY)
    world.configs["third"] = config("third", {FREE.rpartition("/")[0]: "third"})
    drain = world.annotations.get(key.DESIRED_DRAIN)
    world.ask_for(THIRD)
    Node(world).settle()
    assert world.annotations[key.STATE] == "Degraded"
    assert "is a directory, and is to be none" in world.annotations[key.REASON]
    assert world.annotations.get(key.DESIRED_DRAIN) == drain, "not asked anew"
    assert world.file(APP) == b"next"


def test_what_a_running_node_cannot_be_made_to_be_is_refused_unless_it_is_allowed() -> None:
    world = world_at(NEXT)
    third = config("third", {APP: "next"}, arguments=("n=1", "n=2"))
    assert third.config is not None
    third.config["storage"]["disks"] = [{"device": "/dev/sda"}]  # type: ignore[index]
    world.configs["third"] = third
    world.ask_for(THIRD)
    node = Node(world)
    node.settle()
    assert world.annotations[key.STATE] == "Unreconcilable"
    assert "disks" in world.annotations[key.REASON]
    world.policy = replace(world.policy, irreconcilable_overrides=("Disks",))
    node.process = None
    node.settle()
    assert_at_rest(world, THIRD)


def test_in_image_mode_keys_change_in_service_and_the_image_is_not_deployed_again() -> None:
    world = world_at(A)
    found = config("keys", {APP: "of-the-image"})
    users = [{"name": "core", "sshAuthorizedKeys": ["ssh-ed25519 AAAA"]}]
    world.configs["keys"] = replace(found, config={**found.config, "passwd": {"users": users}})
    boots = world.boots
    target = Target("keys", A.image)
    world.ask_for(target)
    Node(world).settle()
    assert_at_rest(world, target)
    assert (world.booted, world.staged, world.boots) == (A.digest, "", boots)
    assert world.file("/home/core/.ssh/authorized_keys.d/ignition") == b"ssh-ed25519 AAAA\n"


def test_a_drain_that_was_granted_is_not_asked_for_again_after_a_restart() -> None:
    world = world_at(STOCK)
    world.ask_for(NEXT)
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
