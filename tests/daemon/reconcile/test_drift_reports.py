"""Drift in the log and in the status while no check is possible."""

import json

import pytest

from tests.daemon.configuration.test_config_walks import FREE, config, world_at
from tests.daemon.machines import TOP
from tests.daemon.nodes import Node, Process
from tests.fakes.disk import Entry
from tests.fakes.world import Json, World
from tests.update.build import A
from treenail.config.node_paths import FORCE_FILE
from treenail.daemon.configuration.config_cache import DIRECTORY
from treenail.host.machine import Machine
from treenail.update.state import ledger_record as records
from treenail.update.state.ledger_record import LedgerRecord, Target

OLD, NEW = Target("free-1"), Target("free-2")


class StatusProcess(Process):
    """An agent whose status file is kept."""

    status: Json

    def write_status(self, _machine: Machine, content: bytes) -> None:
        self.status = json.loads(content)


class StatusNode(Node):
    """A node that shows the status of its agent."""

    def start_process(self) -> Process:
        return StatusProcess(self.world, self.clock, drains=self.drains)

    @property
    def drift(self) -> object:
        assert isinstance(self.process, StatusProcess)
        return self.process.status["drift"]


def change_files(world: World, changes: dict[str, Entry]) -> None:
    world.disk.replace_by(world.disk.tree() | {TOP + path: each for path, each in changes.items()})


def read_ledger(world: World) -> LedgerRecord:
    assert world.ledger
    return records.from_json(json.loads(world.ledger))


def run_until_updated(node: Node) -> None:
    for _ in range(30):
        node.world.drain_controller()
        node.turn()
        record = read_ledger(node.world)
        if record.current == NEW and record.update is None:
            return
    raise AssertionError(node.world.annotations)


def test_drift_is_unknown_while_the_config_cannot_be_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    world = world_at(A)
    for number, target in enumerate((OLD, NEW)):
        world.configs[target.config] = config(target.config, {FREE: f"{number}"})
    world.request_target(OLD)
    node = StatusNode(world)
    node.settle()
    assert node.drift == []
    change_files(world, {FREE: Entry("file", 0o644, b"changed by a user")})
    for _ in range(12):
        node.turn()
    assert node.drift == [f"{FREE}: contents differ"]
    # The force file permits the update beside the drift.
    change_files(world, {FORCE_FILE: Entry("file", 0o644, b"")})
    world.request_target(NEW)
    run_until_updated(node)
    cached = f"{TOP}{DIRECTORY}/{NEW.config}.json"
    world.disk.replace_by({p: each for p, each in world.disk.tree().items() if p != cached})
    world.api_up = False
    node.turn()
    assert node.drift is None
    assert "drift resolved" not in caplog.text
    world.api_up = True
    node.settle()
    assert node.drift == []
    assert "drift resolved; machine matches free-2" in caplog.text
