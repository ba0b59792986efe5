"""Nodes that the Machine Config Daemon has run, or whose machines were made for it."""

import json

import pytest

from tests.api.configs import ignition, with_files
from tests.daemon.machines import ROOT, TOP
from tests.daemon.nodes import Node, assert_at_rest, world_at
from tests.fakes.disk import Entry, MemoryDisk
from tests.fakes.world import World
from treenail.api import annotations as key
from treenail.api.machineconfig import MachineConfig
from treenail.api.object_meta import ObjectMeta
from treenail.daemon.configuration.mcd_state import MCDState
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.update.state.ledger_record import Target

STATE = "/etc/machine-config-daemon"
IMAGE = "registry.example.com/os/node@sha256:" + "a" * 64


def config(name: str, **files: str) -> MachineConfig:
    entries = [
        {"path": f"/etc/{file}", "contents": {"source": f"data:,{text}"}}
        for file, text in files.items()
    ]
    document = with_files(*entries) if entries else ignition()
    return MachineConfig(ObjectMeta(name=name), config=document)


OLD = config("rendered-worker-a", motd="ours", extra="x")
NEW = config("rendered-worker-b")


def left(world: World, **texts: str) -> World:
    """With these files of the daemon's, and those of its config, on the machine."""
    tree = dict(world.disk.tree())
    folders = (STATE, f"{STATE}/orig", f"{STATE}/orig/etc")
    tree |= {TOP + path: Entry("directory", 0o755, b"") for path in folders}
    found = {f"{STATE}/{name}": text for name, text in texts.items()}
    found |= {
        "/etc/motd": "ours",
        "/etc/extra": "x",
        f"{STATE}/orig/etc/motd.mcdorig": "the vendor's",
    }
    tree |= {TOP + path: Entry("file", 0o644, text.encode()) for path, text in found.items()}
    world.disk.replace_by(tree)
    return world


def test_node_of_the_mcd_is_adopted_and_dropped_files_are_removed() -> None:
    world = left(world_at(Target(OLD.name), OLD, NEW), currentconfig=json.dumps(OLD.to_json()))
    world.annotations |= {key.CURRENT_CONFIG: OLD.name, key.STATE: "Done"}
    before = {path: entry for path, entry in world.disk.tree().items() if "/var" not in path}
    node = Node(world)
    node.settle()
    assert_at_rest(world, Target(OLD.name))
    assert before.items() <= world.disk.tree().items()
    world.request_target(Target(NEW.name))
    node.settle()
    assert_at_rest(world, Target(NEW.name))
    assert world.file("/etc/motd") == b"the vendor's"
    assert world.file("/etc/extra") is None


def test_first_boot_annotations_are_written_to_the_node() -> None:
    notes = {key.CURRENT_CONFIG: OLD.name, key.DESIRED_CONFIG: OLD.name, key.STATE: "Done"}
    first_boot = {"node-annotations.json": json.dumps(notes)}
    world = left(world_at(Target(OLD.name), OLD, NEW), **first_boot)
    world.annotations.clear()
    node = Node(world)
    world.api_up = False
    node.turn()
    world.api_up = True
    node.settle()
    assert_at_rest(world, Target(OLD.name))
    assert notes.items() <= world.annotations.items()
    world.request_target(Target(NEW.name))
    node.settle()
    assert_at_rest(world, Target(NEW.name))
    assert world.file("/etc/extra") is None, "it came with the config and goes with it"


def test_lost_annotations_are_restored_from_currentconfig() -> None:
    world = left(
        world_at(Target(OLD.name), OLD),
        currentconfig=json.dumps(OLD.to_json()),
        currentimage=f"{IMAGE}\n",
    )
    world.annotations.clear()
    node = Node(world)
    node.settle()
    assert world.annotations == {key.CURRENT_CONFIG: OLD.name, key.CURRENT_IMAGE: IMAGE}


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "[" * 5000, "{"])
def test_unreadable_mcd_state_writes_no_annotations(text: str) -> None:
    disk: MemoryDisk = left(world_at(Target()), **{"node-annotations.json": text}).disk
    assert MCDState(HostFiles(ROOT, disk)).read_annotations() == {}


def test_first_boot_annotations_of_other_prefixes_are_ignored() -> None:
    notes = {key.DESIRED_CONFIG: "a", "example.com/other": "b"}
    disk = left(world_at(Target()), **{"node-annotations.json": json.dumps(notes)}).disk
    assert MCDState(HostFiles(ROOT, disk)).read_annotations() == {key.DESIRED_CONFIG: "a"}
