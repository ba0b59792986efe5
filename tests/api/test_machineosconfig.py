"""MachineOSConfigs and MachineOSBuilds: every field, unknown fields, wrong types, recorded ones."""

import contextlib
from typing import Any

import pytest
from hypothesis import given

from tests.api.fuzzing import damaged, fuzz
from tests.oracle import needs_oracle, records
from treenail.api.machineosbuild import BuildState, MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.errors import ConfigError

SPEC = "registry.example.com/os@sha256:" + 64 * "1"
CONFIG: dict[str, Any] = {
    "apiVersion": "machineconfiguration.openshift.io/v1",
    "kind": "MachineOSConfig",
    "metadata": {
        "name": "worker",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "annotations": {
            "machineconfiguration.openshift.io/current-machine-os-build": "worker-1",
            "machineconfiguration.openshift.io/rebuild": "",
            "treenail.io/build-sees-config": "true",
            "treenail.io/context": "files",
            "treenail.io/base-image": "registry.example.com/base:9",
        },
    },
    "spec": {
        "machineConfigPool": {"name": "worker"},
        "imageBuilder": {"imageBuilderType": "Job"},
        "baseImagePullSecret": {"name": "pull"},
        "renderedImagePushSecret": {"name": "push"},
        "renderedImagePushSpec": "registry.example.com/os:latest",
        "containerFile": [
            {"containerfileArch": "ARM64", "content": "FROM configs AS final\nRUN arm"},
            {"content": "FROM configs AS final"},
        ],
        "futureField": {"x": 1},
    },
    "status": {
        "currentImagePullSpec": SPEC,
        "observedGeneration": 3,
        "machineOSBuild": {"group": "g", "resource": "machineosbuilds", "name": "worker-1"},
        "conditions": [{"type": "Accepted", "status": "False", "reason": "PoolTaken"}],
    },
}


def test_config_is_parsed_with_every_field() -> None:
    found = MachineOSConfig.from_json(CONFIG)
    assert (found.name, found.pool, found.created) == ("worker", "worker", "2026-01-01T00:00:00Z")
    assert (found.push_spec, found.push_secret) == ("registry.example.com/os:latest", "push")
    assert (found.base_pull_secret, found.builder_type) == ("pull", "Job")
    assert (found.pull_spec, found.observed_generation) == (SPEC, 3)
    assert (found.current_build, found.context_name) == ("worker-1", "files")
    assert found.base_image == "registry.example.com/base:9"
    assert found.needs_rebuild
    assert found.sees_config
    assert found.problem == "PoolTaken"
    assert found.spec["futureField"] == {"x": 1}


def test_architecture_without_entry_takes_that_of_no_architecture() -> None:
    found = MachineOSConfig.from_json(CONFIG)
    arm, other = found.find_containerfile("ARM64"), found.find_containerfile("S390X")
    assert arm.content.endswith("RUN arm")
    assert other.architecture == "NoArch"
    assert MachineOSConfig.from_json({}).find_containerfile("AMD64") is None


def test_empty_objects_are_read_with_defaults() -> None:
    config, build = MachineOSConfig.from_json({}), MachineOSBuild.from_json({"spec": None})
    assert not config.needs_rebuild
    assert not config.sees_config
    assert (config.problem, config.is_deleting) == ("", False)
    assert (build.state, build.condition, build.message) == (BuildState.INITIAL, None, "")


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ([], "expected an object"),
        ({"kind": "Node"}, "found 'Node'"),
        ({"spec": {"containerFile": {}}}, r"spec\.containerFile: expected a list"),
        ({"spec": {"containerFile": ["x"]}}, r"spec\.containerFile\[0\]: expected an object"),
        ({"spec": {"machineConfigPool": "worker"}}, r"spec\.machineConfigPool"),
        ({"status": {"conditions": [1]}}, r"status\.conditions\[0\]"),
    ],
)
def test_wrong_types_name_the_field(document: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        MachineOSConfig.from_json(document)


def test_state_of_build_is_its_latest_true_condition() -> None:
    conditions = [
        {"type": "Prepared", "status": "True", "reason": "Prepared", "message": "a"},
        {"type": "Failed", "status": "True", "reason": "DiskFull", "message": "b"},
    ]
    found = MachineOSBuild.from_json({"status": {"conditions": conditions}})
    assert (found.state, found.message) == (BuildState.FAILED, "b")
    assert found.state.has_ended
    assert not BuildState.BUILDING.has_ended


@fuzz
@given(damaged(CONFIG))
def test_damaged_config_is_parsed_or_rejected(document: object) -> None:
    with contextlib.suppress(ConfigError):
        found = MachineOSConfig.from_json(document)
        assert isinstance(found.problem + found.created + found.current_build, str)


@needs_oracle
def test_objects_of_the_mco_are_parsed() -> None:
    compared = 0
    for record in records("mosb"):
        if record["mosc"]:
            MachineOSConfig.from_json(record["mosc"])
        if record["out"]:
            found = MachineOSBuild.from_json(record["out"])
            # Two of the recorded rendered configs have no name.
            assert found.config in (record["mc"]["metadata"]["name"], "")
            assert found.image_config == record["mosc"]["metadata"]["name"]
            compared += 1
    assert compared == 48
