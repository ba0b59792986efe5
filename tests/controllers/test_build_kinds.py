"""The kinds of image builds, on the lab's API server and on a real one."""

from typing import Any

import pytest

from tests.fixtures.objects import Objects
from treenail.api.machineosbuild import BuildState, MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.errors import InvalidError
from treenail.kube.api_client import Json
from treenail.kube.resources import MACHINEOSBUILDS, MACHINEOSCONFIGS

DIGEST = "@sha256:" + 64 * "a"
SPEC = "registry.example.com/os:latest"
EARLY, LATE = "2026-01-31T12:00:00Z", "2026-01-31T12:00:01Z"
REFERENCE: Json = {"group": "", "resource": "configmaps", "name": "x", "namespace": "builds"}


def config_spec(objects: Objects, **more: object) -> Json:
    return {
        "machineConfigPool": {"name": objects.name},
        "imageBuilder": {"imageBuilderType": "Job"},
        "renderedImagePushSecret": {"name": "push"},
        "renderedImagePushSpec": SPEC,
        **more,
    }


def build_spec(**more: object) -> Json:
    return {
        "machineConfig": {"name": "rendered-worker-1"},
        "machineOSConfig": {"name": "worker"},
        "renderedImagePushSpec": SPEC,
        **more,
    }


def condition(kind: str, status: str = "True", reason: str = "Ready") -> Json:
    return {
        "type": kind, "status": status, "reason": reason, "message": "",
        "lastTransitionTime": EARLY,
    }  # fmt: skip


def test_config_is_stored_unchanged_and_parsed(objects: Objects) -> None:
    spec = config_spec(
        objects,
        baseImagePullSecret={"name": "pull"},
        containerFile=[
            {"containerfileArch": "ARM64", "content": "FROM configs AS final"},
            {"containerfileArch": "NoArch", "content": "ä" * 4096},
        ],
    )
    made = objects.make(MACHINEOSCONFIGS, spec=spec)
    status: Json = {
        "observedGeneration": 1,
        "currentImagePullSpec": f"registry:5000/a/b/c{DIGEST}",
        "machineOSBuild": {"group": "", "resource": "machineosbuilds", "name": "b"},
        "conditions": [condition("Accepted"), condition("treenail.io/More")],
    }
    written = objects.write_status(MACHINEOSCONFIGS, status)

    assert made["spec"] == spec
    assert written["status"] == status
    assert MachineOSConfig.from_json(written).pull_spec.startswith("registry:5000/")


def test_architecture_is_no_architecture_by_default(objects: Objects) -> None:
    made: Any = objects.make(
        MACHINEOSCONFIGS, spec=config_spec(objects, containerFile=[{"content": "FROM x"}])
    )
    assert made["spec"]["containerFile"][0]["containerfileArch"] == "NoArch"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"machineConfigPool": {}}, "machineConfigPool.name"),
        ({"machineConfigPool": {"name": "A_"}}, "machineConfigPool.name"),
        ({"imageBuilder": {"imageBuilderType": "Pod"}}, "imageBuilderType"),
        ({"renderedImagePushSecret": None}, "renderedImagePushSecret"),
        ({"renderedImagePushSpec": ""}, "renderedImagePushSpec"),
        ({"renderedImagePushSpec": "r.example.com/" + 433 * "x" + ":1"}, "renderedImagePushSpec"),
        ({"containerFile": [{"content": 4097 * "x"}]}, "content"),
        ({"containerFile": [{"containerfileArch": "ARM64"}]}, "content"),
        ({"containerFile": [{"containerfileArch": "arm64", "content": ""}]}, "containerfileArch"),
        ({"containerFile": [{"content": "a"}, {"content": "b"}]}, "Duplicate value"),
        (
            {"containerFile": [{"containerfileArch": "AMD64", "content": ""}] * 5},
            "containerFile",
        ),
    ],
)
def test_invalid_config_is_rejected_by_the_schema(
    objects: Objects, more: dict[str, object], said: str
) -> None:
    with pytest.raises(InvalidError, match=said):
        objects.make(MACHINEOSCONFIGS, spec=config_spec(objects, **more))


@pytest.mark.parametrize(
    "text",
    [
        "registry.example.com/os:latest",
        "registry.example.com:5000/a/b/c/d/os:v1.2_3-x",
        "registry:5000/os:1",
        "localhost/os:1",
        # Accepted by the MCO alone; the controller reports them.
        "registry.example.com/OS/Image:latest",
        "registry.example.com/os:-x",
        "image-registry.namespace.svc:5000/some space/os:tag!",
    ],
)
def test_push_spec_of_either_grammar_is_accepted(real_objects: Objects, text: str) -> None:
    real_objects.make(MACHINEOSCONFIGS, spec=config_spec(real_objects, renderedImagePushSpec=text))


@pytest.mark.parametrize(
    "text", ["os", "os:latest", "r.example.com/os", f"r.example.com/os{DIGEST}", "http://r/x:1"]
)
def test_push_spec_without_registry_or_tag_is_rejected(real_objects: Objects, text: str) -> None:
    with pytest.raises(InvalidError, match=r"expected REGISTRY/REPOSITORY:TAG"):
        real_objects.make(
            MACHINEOSCONFIGS, spec=config_spec(real_objects, renderedImagePushSpec=text)
        )


def test_config_must_have_the_name_of_its_pool(real_objects: Objects) -> None:
    with pytest.raises(InvalidError, match=r"expected the name of the pool in metadata\.name"):
        real_objects.make(
            MACHINEOSCONFIGS, spec=config_spec(real_objects, machineConfigPool={"name": "other"})
        )


def test_observed_generation_never_decreases(real_objects: Objects) -> None:
    real_objects.make(MACHINEOSCONFIGS, spec=config_spec(real_objects))
    real_objects.write_status(MACHINEOSCONFIGS, {"observedGeneration": 2})
    with pytest.raises(InvalidError, match="observedGeneration must not decrease"):
        real_objects.write_status(MACHINEOSCONFIGS, {"observedGeneration": 1})


def test_build_is_stored_unchanged_and_parsed(objects: Objects) -> None:
    made = objects.make(MACHINEOSBUILDS, spec=build_spec())
    status: Json = {
        "buildStart": EARLY,
        "buildEnd": LATE,
        "builder": {"imageBuilderType": "Job", "job": REFERENCE},
        "digestedImagePushSpec": f"registry:5000/a/b/os{DIGEST}",
        "relatedObjects": [REFERENCE],
        "conditions": [
            condition("Prepared", "False"),
            condition("Building", "False"),
            condition("Succeeded"),
            condition("Interrupted", "False"),
            condition("Failed", "False"),
        ],
    }
    written = objects.write_status(MACHINEOSBUILDS, status)

    assert made["spec"] == build_spec()
    assert written["status"] == status
    assert MachineOSBuild.from_json(written).state is BuildState.SUCCEEDED


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"machineConfig": {"name": "short"}}, "machineConfig.name"),
        ({"machineOSConfig": {"name": ""}}, "machineOSConfig.name"),
        ({"renderedImagePushSpec": None}, "renderedImagePushSpec"),
    ],
)
def test_invalid_build_is_rejected_by_the_schema(
    objects: Objects, more: dict[str, object], said: str
) -> None:
    with pytest.raises(InvalidError, match=said):
        objects.make(MACHINEOSBUILDS, spec=build_spec(**more))


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"digestedImagePushSpec": SPEC}, "digestedImagePushSpec"),
        ({"conditions": [condition(f"C{number}") for number in range(9)]}, "conditions"),
        ({"conditions": [condition("Failed", reason="not a reason")]}, "reason"),
        ({"builder": {"imageBuilderType": "Job", "job": {"name": "x"}}}, r"builder\.job"),
    ],
)
def test_invalid_status_is_rejected_by_the_schema(
    objects: Objects, status: Json, said: str
) -> None:
    objects.make(MACHINEOSBUILDS, spec=build_spec())
    with pytest.raises(InvalidError, match=said):
        objects.write_status(MACHINEOSBUILDS, status)


def test_spec_of_a_build_is_immutable(real_objects: Objects) -> None:
    real_objects.make(MACHINEOSBUILDS, spec=build_spec())
    changed = build_spec(machineOSConfig={"name": "other"})
    with pytest.raises(InvalidError, match="the spec is immutable"):
        real_objects.apply(MACHINEOSBUILDS, spec=changed)


@pytest.mark.parametrize("kind", ["Failed", "Interrupted", "Succeeded"])
def test_conditions_of_an_ended_build_are_immutable(real_objects: Objects, kind: str) -> None:
    real_objects.make(MACHINEOSBUILDS, spec=build_spec())
    ended: Json = {"conditions": [condition(kind), condition("Building", "False")]}
    real_objects.write_status(MACHINEOSBUILDS, ended)
    changed: Json = {"conditions": [condition(kind), condition("Building")]}
    with pytest.raises(InvalidError, match="are immutable"):
        real_objects.write_status(MACHINEOSBUILDS, changed)
    real_objects.write_status(MACHINEOSBUILDS, ended)


def test_build_ends_at_its_start_or_later(real_objects: Objects) -> None:
    real_objects.make(MACHINEOSBUILDS, spec=build_spec())
    with pytest.raises(InvalidError, match="buildEnd must not be before buildStart"):
        real_objects.write_status(MACHINEOSBUILDS, {"buildStart": LATE, "buildEnd": EARLY})
    real_objects.write_status(MACHINEOSBUILDS, {"buildStart": EARLY, "buildEnd": EARLY})
    with pytest.raises(InvalidError, match="buildEnd is immutable"):
        real_objects.write_status(MACHINEOSBUILDS, {"buildEnd": LATE})


def test_job_is_required_for_builds_of_jobs_only(real_objects: Objects) -> None:
    real_objects.make(MACHINEOSBUILDS, spec=build_spec())
    for builder in ({"imageBuilderType": "Job"}, {"imageBuilderType": "x", "job": REFERENCE}):
        with pytest.raises(InvalidError, match="job is required when"):
            real_objects.write_status(MACHINEOSBUILDS, {"builder": builder})
