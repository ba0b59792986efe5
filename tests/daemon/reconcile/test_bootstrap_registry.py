"""The files of the bootstrap registry on a node, from the first boot to the hand-over."""

from dataclasses import replace

import pytest

from tests.daemon import walk_budget
from tests.daemon.machines import TOP
from tests.daemon.nodes import Node, assert_at_rest
from tests.daemon.reconcile.test_walks import world_at
from tests.fakes.disk import Entry, Tree
from tests.fakes.world import World
from tests.update.build import A, B
from treenail.api import annotations as key
from treenail.config.bootstrap_registry import (
    MIRROR_FILE,
    RECORD_FILE,
    BootstrapRegistryRecord,
    encode_record,
    format_mirror_file,
)

REGISTRY = "10.0.0.5:22625"
RECORD = BootstrapRegistryRecord(REGISTRY, "puller", "secret", ("registry.example.com/os/node",))
FILES = {
    MIRROR_FILE: Entry("file", 0o644, format_mirror_file(RECORD)),
    RECORD.ca_path: Entry("file", 0o644, b"pem"),
    RECORD_FILE: Entry("file", 0o600, encode_record(RECORD)),
}


def place_files(world: World, files: dict[str, Entry]) -> None:
    """Write files as Ignition does, with their directories."""
    tree: Tree = dict(world.disk.tree())
    for path, entry in files.items():
        parts = path.split("/")[1:-1]
        for count in range(1, len(parts) + 1):
            tree.setdefault(TOP + "/" + "/".join(parts[:count]), Entry("directory", 0o755, b""))
        tree[TOP + path] = entry
    world.disk.replace_by(tree)


def find_files(world: World) -> set[str]:
    return {path for path in FILES if world.file(path) is not None}


def make_world(files: dict[str, Entry] | None = None) -> World:
    world = world_at(A)
    place_files(world, FILES if files is None else files)
    return world


def request_removal(world: World, registry: str = REGISTRY) -> None:
    world.annotations[key.REMOVE_BOOTSTRAP_REGISTRY] = registry


def test_node_reports_its_bootstrap_registry_until_the_hand_over() -> None:
    world = make_world()
    node = Node(world)
    node.settle()
    assert world.annotations[key.BOOTSTRAP_REGISTRY] == REGISTRY
    assert find_files(world) == set(FILES)
    boots, drains = world.boots, world.annotations.get(key.DESIRED_DRAIN)
    request_removal(world)
    node.turn()
    assert find_files(world) == set()
    assert key.BOOTSTRAP_REGISTRY not in world.annotations
    node.settle()
    assert (world.boots, world.annotations.get(key.DESIRED_DRAIN)) == (boots, drains)
    assert_at_rest(world, A)
    reasons = [each.reason for each in world.events]
    assert reasons.count("BootstrapRegistryRemoved") == 1
    assert "ConfigDriftDetected" not in reasons


def test_removal_of_another_registry_changes_nothing() -> None:
    world = make_world()
    request_removal(world, "10.0.0.6:22625")
    Node(world).settle()
    assert find_files(world) == set(FILES)
    assert world.annotations[key.BOOTSTRAP_REGISTRY] == REGISTRY


def test_mirror_file_of_another_registry_stays() -> None:
    other = format_mirror_file(replace(RECORD, registry="mirror.example.com:5000"))
    world = make_world({**FILES, MIRROR_FILE: Entry("file", 0o644, other)})
    request_removal(world)
    Node(world).settle()
    assert find_files(world) == {MIRROR_FILE}


def test_invalid_record_is_reported_and_changes_nothing() -> None:
    world = make_world({**FILES, RECORD_FILE: Entry("file", 0o600, b"{")})
    request_removal(world)
    Node(world).settle()
    assert find_files(world) == set(FILES)
    messages = [each.message for each in world.events if "BootstrapRegistry" in each.reason]
    assert len(messages) == 1
    assert "cannot use the bootstrap registry" in messages[0]
    assert f"rm {RECORD_FILE}" in messages[0]


def test_removal_while_an_image_is_staged_does_not_wait_for_it() -> None:
    world = make_world()
    node = Node(world)
    node.settle()
    seen: list[set[str]] = []

    def hand_over() -> None:
        seen.append(find_files(world))
        request_removal(world)
        node.process.cluster.see()

    world.on_wait = hand_over
    world.request_target(B)
    node.settle()
    assert seen[:2] == [set(FILES), set()]
    assert_at_rest(world, B)


@pytest.mark.parametrize("turns", range(12))
def test_removal_in_any_phase_lets_the_update_complete(turns: int) -> None:
    world = make_world()
    node = Node(world)
    node.settle()
    world.request_target(B)
    for _ in range(turns):
        world.drain_controller()
        node.turn()
    request_removal(world)
    node.settle()
    assert find_files(world) == set()
    assert_at_rest(world, B)


def test_files_that_a_rollback_restores_are_removed_again() -> None:
    world = make_world()
    node = Node(world)
    node.settle()
    request_removal(world)
    node.settle()
    place_files(world, FILES)
    node.settle()
    assert find_files(world) == set()


@pytest.mark.parametrize("kills", [True, False], ids=["killed", "power cut"])
@walk_budget.exhaustive
def test_removal_survives_end_at_any_disk_call(kills: bool) -> None:
    for calls in range(_count_disk_calls()):
        world, node = _start_removal()
        node.disk_kills = kills
        world.disk.calls_left = calls
        node.settle()
        assert world.disk.calls_left is None, f"disk call {calls} did not happen"
        assert find_files(world) == set(), f"disk call {calls}"
        assert key.BOOTSTRAP_REGISTRY not in world.annotations


def _start_removal() -> tuple[World, Node]:
    world = make_world()
    node = Node(world)
    node.settle()
    request_removal(world)
    return world, node


def _count_disk_calls() -> int:
    world, node = _start_removal()
    world.disk.calls_left = many = 1_000_000
    node.turn()
    return many - world.disk.calls_left
