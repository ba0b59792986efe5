"""A node in image mode: what its image contains is compared with the config, and not believed."""

from dataclasses import replace

import pytest

from tests.daemon.configuration.test_config_walks import APP, BAKED, BAKED_TEXT, config, world_at
from tests.daemon.machines import TOP
from tests.daemon.nodes import BACK_ENDS, Node, assert_at_rest, directories
from tests.fakes.disk import Entry
from tests.fakes.world import World
from tests.update.build import A, B
from treenail.api import annotations as key
from treenail.update.state.ledger_record import Target

KEYS = "/home/core/.ssh/authorized_keys.d/ignition"
STATE_FILE = "/var/lib/app/state.conf"
THIRD = Target("third", B.image)
BAKED_B = Entry("file", 0o644, b"of-the-image")


def add_config(world: World, files: dict[str, str], *keys: str) -> None:
    """Add the config of the third target, with these keys of core."""
    found = config(THIRD.config, files)
    if keys:
        users = [{"name": "core", "sshAuthorizedKeys": list(keys)}]
        found = replace(found, config={**found.config, "passwd": {"users": users}})
    world.configs[THIRD.config] = found


def world_with_image(files: dict[str, Entry]) -> World:
    """A node in image mode at A, and an image of B with these files in /usr/etc."""
    world = world_at(A)
    world.vendor = {**world.vendor, B.digest: files}
    return world


def test_keys_beside_the_same_image_change_in_service() -> None:
    world = world_at(A)
    target = Target(THIRD.config, A.image)
    add_config(world, {BAKED: BAKED_TEXT}, "ssh-ed25519 AAAA")
    boots = world.boots
    world.request_target(target)
    Node(world).settle()
    assert_at_rest(world, target)
    assert (world.booted, world.staged, world.boots) == (A.digest, "", boots)
    assert world.file(KEYS) == b"ssh-ed25519 AAAA\n"


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_image_without_the_files_is_refused_before_the_drain(back_end: str) -> None:
    world = world_with_image({"app.conf": Entry("file", 0o644, b"another")})
    add_config(world, {APP: "of-the-image", BAKED: BAKED_TEXT}, "ssh-ed25519 AAAA")
    world.request_target(THIRD)
    with directories() as directory_of:
        Node(world, bootc=directory_of(back_end)).settle()
    reason = world.annotations[key.REASON]
    assert world.annotations[key.STATE] == "Degraded"
    assert f"{APP} has other contents; {BAKED} is missing" in reason
    assert 'image_files = "write"' in reason
    assert "imageFiles: Write" in reason
    assert (world.booted, world.staged, world.stored) == (A.digest, "", set())
    assert key.DESIRED_DRAIN not in world.annotations
    assert (world.file(APP), world.file(KEYS)) == (None, None)


def test_config_that_the_same_image_lacks_is_refused_before_the_drain() -> None:
    world = world_at(A)
    add_config(world, {APP: "of-the-image", BAKED: BAKED_TEXT, STATE_FILE: "s"})
    drain = world.annotations.get(key.DESIRED_DRAIN)
    world.request_target(Target(THIRD.config, A.image))
    Node(world).settle()
    assert world.annotations[key.STATE] == "Degraded"
    assert f"{APP} is missing" in world.annotations[key.REASON]
    assert world.annotations.get(key.DESIRED_DRAIN) == drain
    assert world.annotations[key.CURRENT_CONFIG] == A.config


def test_booted_image_without_the_files_is_rolled_back() -> None:
    world = world_with_image({"app.conf": BAKED_B})
    add_config(world, {APP: "of-the-image"})
    world.request_target(THIRD)
    node = Node(world)
    while key.DESIRED_DRAIN not in world.annotations:
        node.turn()
    assert world.staged
    world.vendor = {**world.vendor, B.digest: {}}
    node.settle()
    assert (world.booted, world.annotations[key.STATE]) == (A.digest, "Degraded")
    assert f"{APP} is missing" in world.annotations[key.REASON]


def test_refused_image_is_tried_again_when_the_agent_may_write() -> None:
    world = world_with_image({})
    add_config(world, {APP: "written"})
    world.request_target(THIRD)
    node = Node(world)
    node.settle()
    assert world.annotations[key.STATE] == "Degraded"
    world.annotations[key.IMAGE_FILES] = "write"
    boots = world.boots
    node.settle()
    assert_at_rest(world, THIRD)
    assert (world.file(APP), world.boots) == (b"written", boots + 1)


def test_unknown_value_of_the_annotation_is_reported_once() -> None:
    world = world_with_image({})
    world.annotations[key.IMAGE_FILES] = "Write"
    node = Node(world)
    node.settle()
    node.settle()
    (event,) = (each for each in world.events if each.reason == "InvalidImageFiles")
    assert "'Write' is not baked or write" in event.message
    assert "set the annotation to baked or write" in event.message


def test_files_of_the_image_are_not_written_and_others_are() -> None:
    world = world_with_image({"app.conf": BAKED_B})
    add_config(world, {APP: "of-the-image", STATE_FILE: "s"}, "ssh-ed25519 AAAA")
    world.request_target(THIRD)
    boots = world.boots
    Node(world).settle()
    assert_at_rest(world, THIRD)
    assert world.boots == boots + 1
    assert (world.file(APP), world.file(STATE_FILE)) == (b"of-the-image", b"s")
    assert world.file(KEYS) == b"ssh-ed25519 AAAA\n"
    owned = world.file("/var/lib/treenail/managed.json") or b""
    assert STATE_FILE.encode() in owned
    assert APP.encode() not in owned


def test_local_change_does_not_hide_the_file_of_the_image() -> None:
    world = world_with_image({"app.conf": BAKED_B})
    local = Entry("file", 0o644, b"of a user")
    world.disk.replace_by(world.disk.tree() | {TOP + APP: local})
    add_config(world, {APP: "of-the-image"})
    world.request_target(THIRD)
    Node(world).settle()
    assert_at_rest(world, THIRD)
    assert world.file(APP) == b"of-the-image"


def test_drift_of_a_file_of_the_image_is_found() -> None:
    world = world_with_image({"app.conf": BAKED_B})
    add_config(world, {APP: "of-the-image"})
    world.request_target(THIRD)
    node = Node(world)
    node.settle()
    changed = Entry("file", 0o644, b"changed by a user")
    world.disk.replace_by(world.disk.tree() | {TOP + APP: changed})
    for _ in range(12):
        node.turn()
    assert world.annotations[key.STATE] == "Degraded"
    assert APP in world.annotations[key.REASON]


def test_claimed_config_with_another_image_is_moved_to() -> None:
    world = world_at(A)
    claimed = Target("claimed")
    world.configs["claimed"] = config("claimed", {BAKED: BAKED_TEXT}, image=B.image)
    world.vendor = {A.digest: {}, B.digest: {}}
    world.ledger = None
    world.request_target(claimed)
    world.annotations[key.CURRENT_CONFIG] = "claimed"
    for spelling in key.IMAGE_SPELLINGS.values():
        world.annotations.pop(spelling, None)
    boots = world.boots
    Node(world).settle()
    assert_at_rest(world, claimed)
    assert (world.booted, world.boots) == (B.digest, boots + 1)


def test_files_of_the_image_are_written_when_the_node_leaves_image_mode() -> None:
    world = world_with_image({"app.conf": BAKED_B})
    add_config(world, {APP: "of-the-image"})
    world.request_target(THIRD)
    node = Node(world)
    node.settle()
    outside = Target("outside")
    world.configs["outside"] = config("outside", {APP: "of-the-image"}, image=A.image)
    boots = world.boots
    world.request_target(outside)
    node.settle()
    assert_at_rest(world, outside)
    assert (world.file(APP), world.booted) == (b"of-the-image", A.digest)
    assert world.boots == boots + 1


def test_prestaged_image_without_the_files_is_reported_before_the_update() -> None:
    world = world_with_image({})
    add_config(world, {APP: "of-the-image"})
    world.annotations[key.PRESTAGE_CONFIG] = THIRD.config
    world.annotations[key.PRESTAGE_IMAGE] = THIRD.image
    node = Node(world)
    node.settle()
    assert world.annotations[key.STATE] == "Done"
    assert f"{APP} is missing" in world.annotations[key.PRESTAGE_ERROR]
    world.annotations[key.IMAGE_FILES] = "write"
    node.settle()
    assert world.annotations[key.PRESTAGED] == THIRD.image


def test_image_annotation_stays_until_the_node_left_image_mode() -> None:
    world = world_with_image({"app.conf": BAKED_B})
    add_config(world, {APP: "of-the-image"})
    world.request_target(THIRD)
    node = Node(world)
    node.settle()
    outside = Target("outside")
    world.configs["outside"] = config("outside", {APP: "of-the-image"}, image=A.image)
    reported: list[str] = []

    def look(_effect: str) -> None:
        if world.booted == B.digest:
            reported.append(world.annotations.get(key.CURRENT_OS_IMAGE, ""))

    world.fault_point = look
    world.request_target(outside)
    node.settle()
    assert_at_rest(world, outside)
    assert set(reported) == {B.image}
