"""Names of builds, equal to those that the MCO recorded."""

from dataclasses import replace
from typing import Any

import pytest

from tests.oracle import needs_oracle, records
from treenail.api import annotations as key
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosconfig import MachineOSConfig
from treenail.errors import ConfigError
from treenail.image.build_inputs import compute_build_name

CONFIG: dict[str, Any] = {
    "metadata": {"name": "worker"},
    "spec": {
        "machineConfigPool": {"name": "worker"},
        "imageBuilder": {"imageBuilderType": "Job"},
        "renderedImagePushSecret": {"name": "push"},
        "renderedImagePushSpec": "registry.example.com/os:latest",
    },
}
POOL: dict[str, Any] = {
    "metadata": {"name": "worker"},
    "spec": {
        "configuration": {
            "name": "rendered-worker-1",
            "source": [{"kind": "MachineConfig", "name": name} for name in ("a", "b")],
        },
    },
}
RENDERED: dict[str, Any] = {
    "metadata": {
        "name": "rendered-worker-1",
        "annotations": {"machineconfiguration.openshift.io/release-image-version": "4.20"},
    },
    "spec": {"osImageURL": "registry.example.com/os@sha256:" + 64 * "a"},
}


def name_build(
    config: dict[str, Any] = CONFIG,
    pool: dict[str, Any] = POOL,
    rendered: dict[str, Any] = RENDERED,
) -> str:
    return compute_build_name(
        MachineOSConfig.from_json(config),
        MachineConfigPool.from_json(pool),
        MachineConfig.from_json(rendered),
    )


@needs_oracle
def test_names_equal_those_of_the_mco() -> None:
    compared = 0
    for record in records("mosb"):
        if not (record["mosc"] and record["pool"] and record["mc"]):
            continue
        if record["err"]:
            with pytest.raises(ConfigError, match="expected pool other-pool, found worker"):
                name_build(record["mosc"], record["pool"], record["mc"])
            continue
        found = name_build(record["mosc"], record["pool"], record["mc"])
        assert found == record["out"]["metadata"]["name"]
        compared += 1
    assert compared == 48


def test_list_that_is_not_set_is_hashed_as_null() -> None:
    unset = name_build()
    null = name_build({**CONFIG, "spec": {**CONFIG["spec"], "containerFile": None}})
    empty = name_build({**CONFIG, "spec": {**CONFIG["spec"], "containerFile": []}})
    assert unset == null
    assert unset != empty


def test_architecture_of_a_file_is_that_of_the_api_server() -> None:
    entry = {"content": "FROM configs\n"}
    bare = name_build({**CONFIG, "spec": {**CONFIG["spec"], "containerFile": [entry]}})
    complete = [{"containerfileArch": "NoArch", **entry}]
    assert bare == name_build({**CONFIG, "spec": {**CONFIG["spec"], "containerFile": complete}})
    arm = [{"containerfileArch": "ARM64", **entry}]
    assert bare != name_build({**CONFIG, "spec": {**CONFIG["spec"], "containerFile": arm}})


@pytest.mark.parametrize("field", ["pool", "spec", "images", "release"])
def test_each_input_changes_the_name(field: str) -> None:
    config, pool, rendered = CONFIG, POOL, RENDERED
    if field == "pool":
        pool = {**POOL, "spec": {"configuration": {"name": "rendered-worker-1"}}}
    elif field == "spec":
        config = {**CONFIG, "spec": {**CONFIG["spec"], "renderedImagePushSecret": {"name": "x"}}}
    elif field == "images":
        rendered = {**RENDERED, "spec": {}}
    else:
        rendered = {**RENDERED, "metadata": {"name": "rendered-worker-1"}}
    assert name_build(config, pool, rendered) != name_build()


def test_base_image_of_an_annotation_changes_the_name() -> None:
    noted = {key.BASE_IMAGE: f"registry.example.com/base@sha256:{'b' * 64}"}
    config = {**CONFIG, "metadata": {**CONFIG["metadata"], "annotations": noted}}
    assert name_build(config) != name_build()


def test_files_and_config_that_the_containerfile_sees_change_the_name() -> None:
    noted = {key.BUILD_SEES_CONFIG: "true"}
    sees = {**CONFIG, "metadata": {**CONFIG["metadata"], "annotations": noted}}
    plain = MachineOSConfig.from_json(CONFIG), MachineConfigPool.from_json(POOL)
    files = compute_build_name(
        *plain, MachineConfig.from_json(RENDERED), context_digest=f"sha256:{'c' * 64}"
    )
    assert len({name_build(), name_build(sees), files}) == 3


def test_pause_of_the_pool_does_not_change_the_name() -> None:
    paused = replace(MachineConfigPool.from_json(POOL), paused=True)
    name = compute_build_name(
        MachineOSConfig.from_json(CONFIG), paused, MachineConfig.from_json(RENDERED)
    )
    assert name == name_build()
    assert name.startswith("worker-")
    assert len(name) == len("worker-") + 32
