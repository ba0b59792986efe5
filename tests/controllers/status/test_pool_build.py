"""The image build of a pool in the status."""

from dataclasses import replace

import pytest

from tests.controllers.status.test_status_table import build, make_world
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.cli.controller.status.text import format_table
from treenail.controllers.status.status_table import (
    BuildRow,
    RolloutBlocker,
    build_status_document,
    find_pool_builds,
)

NOW = 1_767_225_630.0


def make_config(**status: object) -> MachineOSConfig:
    name = "machineconfiguration.openshift.io/current-machine-os-build"
    return MachineOSConfig.from_json(
        {
            "metadata": {"name": "os", "annotations": {name: "os-1"}},
            "spec": {"machineConfigPool": {"name": "worker"}},
            "status": status,
        }
    )


def make_build(kind: str, message: str, **status: object) -> MachineOSBuild:
    condition = {"type": kind, "status": "True", "reason": "R", "message": message}
    return MachineOSBuild.from_json(
        {
            "metadata": {"name": "os-1"},
            "status": {"conditions": [condition], "buildStart": "2026-01-01T00:00:00Z"} | status,
        }
    )


def find(config: MachineOSConfig, *builds: MachineOSBuild) -> BuildRow:
    found = find_pool_builds({config.name: config}, {each.name: each for each in builds}, NOW)
    assert list(found) == ["worker"]
    return found["worker"]


def test_running_build_has_its_duration_until_now() -> None:
    found = find(make_config(), make_build("Building", "Job x runs build"))
    assert found == BuildRow("os-1", "Building", "Job x runs build", 30.0)


def test_ended_build_keeps_its_duration() -> None:
    found = find(make_config(), make_build("Succeeded", "", buildEnd="2026-01-01T00:00:12Z"))
    assert (found.state, found.seconds) == ("Succeeded", 12.0)


def test_config_without_a_build_is_pending_and_a_wrong_one_rejected() -> None:
    assert find(make_config()).state == "Pending"
    refusal = {"type": "Accepted", "status": "False", "reason": "PoolTaken", "message": "taken"}
    assert find(make_config(conditions=[refusal])) == BuildRow("os", "Rejected", "taken")


@pytest.mark.parametrize("width", [None, 60])
def test_table_and_document_show_the_build(width: int | None) -> None:
    row = replace(build(make_world("a"))[0], build=BuildRow("os-1", "Failed", "line 2: x\n", 4.0))
    lines = [str(line) for line in format_table([row], width)]
    assert any(line.startswith("  image build: Failed, 4 s: line 2: x\\n") for line in lines)
    document = build_status_document([row], now=NOW)
    assert document["pools"][0]["build"] == {  # type: ignore[index]
        "name": "os-1", "state": "Failed", "message": "line 2: x\n", "seconds": 4,
    }  # fmt: skip


def test_message_of_a_failed_build_that_blocks_the_pool_is_shown_once() -> None:
    blocker = RolloutBlocker("degraded", "image build os-1 failed: line 2: x")
    failed = BuildRow("os-1", "Failed", "line 2: x", 4.0)
    row = replace(build(make_world("a"))[0], build=failed, blockers=(blocker,))
    text = "\n".join(map(str, format_table([row])))
    assert "  image build: Failed, 4 s\n" in text
    assert text.count("line 2: x") == 1
