"""Decisions about the objects that a cluster adopts."""

import pytest

from treenail.api import annotations as key
from treenail.api.component_names import PART_OF_LABELS
from treenail.api.decode import Json
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.controllers.handover.adoption import (
    AdoptionAction,
    AnnotateConfig,
    CreateObject,
    DeleteFailedBuild,
    FinishBuild,
    ServeImage,
    can_replace,
    clean_document,
    decide_adoption,
)
from treenail.controllers.handover.handover_objects import Handover
from treenail.kube.resources import SECRETS, get_object

IMAGE = f"quay.io/example/os@sha256:{64 * 'a'}"
OTHER = f"quay.io/example/os@sha256:{64 * 'b'}"
NAME = f"master-{32 * '1'}"
SECRET: Json = {"kind": "Secret", "metadata": {"name": "push", "namespace": "builds", "uid": "x"}}


def make_condition(kind: str) -> Json:
    return {"type": kind, "status": "True", "reason": "R", "message": "m",
            "lastTransitionTime": "2026-01-01T00:00:00Z"}  # fmt: skip


def make_build(state: str = "Succeeded", image: str = IMAGE, **metadata: object) -> Json:
    return {
        "apiVersion": "machineconfiguration.openshift.io/v1",
        "kind": "MachineOSBuild",
        "metadata": {"name": NAME, "labels": {key.TARGET_POOL: "master"}, **metadata},
        "spec": {
            "machineConfig": {"name": "rendered-master-1"},
            "machineOSConfig": {"name": "master"},
            "renderedImagePushSpec": f"quay.io/example/os:{NAME}",
        },
        "status": {
            "conditions": [make_condition(state)] if state else [],
            "digestedImagePushSpec": image,
        },
    }


def make_config(pull_spec: str = "", **annotations: str) -> MachineOSConfig:
    return MachineOSConfig.from_json(
        {
            "kind": "MachineOSConfig",
            "metadata": {"name": "master", "uid": "uid-1", "annotations": annotations},
            "spec": {"machineConfigPool": {"name": "master"}},
            "status": {"currentImagePullSpec": pull_spec},
        }
    )


def decide(
    config: MachineOSConfig | None = None, build: Json | None = None, **metadata: object
) -> tuple[AdoptionAction, ...]:
    return decide_adoption(
        Handover((), objects=(make_build(**metadata),)),
        {} if config is None else {"master": config},
        {} if build is None else {NAME: MachineOSBuild.from_json(build)},
        (),
    )


def kinds(actions: tuple[AdoptionAction, ...]) -> list[type]:
    return [type(each) for each in actions]


def test_missing_objects_are_created_without_fields_of_the_api_server() -> None:
    (create,) = decide_adoption(Handover((), objects=(SECRET,)), {}, {}, ())
    assert isinstance(create, CreateObject)
    metadata = dict(get_object(create.document, "metadata"))
    assert list(get_object(metadata, "annotations")) == [key.ADOPTED_DATA]
    assert metadata | {"annotations": {}} == {
        "name": "push", "namespace": "builds", "annotations": {}, "labels": PART_OF_LABELS,
    }  # fmt: skip
    assert decide_adoption(Handover((), objects=(SECRET,)), {}, {}, {create.key}) == ()
    changed = Handover((), objects=({**SECRET, "data": {"a": "Yg=="}},))
    assert len(decide_adoption(changed, {}, {}, {create.key})) == 1


def test_only_an_unchanged_secret_of_the_installation_is_replaced() -> None:
    first, second = (
        CreateObject(SECRETS, clean_document({**SECRET, "type": "t", "stringData": {"a": text}}))
        for text in ("first", "second")
    )
    assert can_replace(first.document, second.document)
    assert not can_replace(first.document, first.document)
    assert not can_replace(first.document, {**second.document, "type": "u"})
    of_user = {**first.document, "data": {"a": "dXNlcg=="}}
    assert not can_replace(of_user, second.document)
    assert not can_replace({**SECRET, "type": "t"}, second.document)


def test_build_is_created_with_its_owner_and_without_status() -> None:
    (create,) = decide(make_config())
    assert isinstance(create, CreateObject)
    assert "status" not in create.document
    metadata = create.document["metadata"]
    assert isinstance(metadata, dict)
    assert metadata["ownerReferences"][0]["uid"] == "uid-1"


def test_build_without_its_config_waits() -> None:
    assert decide() == ()


@pytest.mark.parametrize("state", ["", "Prepared", "Building"])
def test_build_in_progress_is_finished(state: str) -> None:
    assert kinds(decide(make_config(), make_build(state, ""))) == [FinishBuild]


@pytest.mark.parametrize("state", ["Failed", "Interrupted"])
def test_build_that_ended_without_image_is_deleted(state: str) -> None:
    assert kinds(decide(make_config(), make_build(state, ""))) == [DeleteFailedBuild]


def test_finished_build_is_served() -> None:
    actions = decide(make_config(), make_build(), annotations={key.RESOLVED_BASE: "r"})
    assert kinds(actions) == [AnnotateConfig, ServeImage]
    annotate = actions[0]
    assert isinstance(annotate, AnnotateConfig)
    assert annotate.annotations[key.CURRENT_BUILD] == NAME
    assert IMAGE in annotate.annotations[key.PUSHED_IMAGES]
    # Its base is no tag.
    assert key.RESOLVED_BASE not in annotate.annotations


def test_resolved_tag_of_the_base_is_recorded() -> None:
    config = make_config(**{key.BASE_IMAGE: "quay.io/example/base:stable"})
    actions = decide(config, make_build(), annotations={key.RESOLVED_BASE: "r"})
    annotate = actions[0]
    assert isinstance(annotate, AnnotateConfig)
    assert annotate.annotations[key.RESOLVED_BASE] == "r"


def test_adopted_build_needs_no_write() -> None:
    notes = {key.CURRENT_BUILD: NAME, key.PUSHED_IMAGES: f'{{"{IMAGE}":"{NAME}"}}'}
    assert decide(make_config(IMAGE, **notes), make_build()) == ()


@pytest.mark.parametrize(
    "config",
    [make_config(OTHER), make_config("", **{key.CURRENT_BUILD: "master-2"})],
    ids=["image", "build"],
)
@pytest.mark.parametrize("build", [None, make_build()], ids=["missing", "present"])
def test_newer_image_of_the_cluster_is_not_replaced(
    config: MachineOSConfig, build: Json | None
) -> None:
    assert decide(config, build) == ()


def test_other_image_of_the_same_build_is_not_replaced() -> None:
    assert decide(make_config(), make_build(image=OTHER)) == ()


def test_config_that_is_deleted_adopts_nothing() -> None:
    document: Json = {
        "metadata": {"name": "master", "deletionTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"machineConfigPool": {"name": "master"}},
    }
    assert decide(MachineOSConfig.from_json(document), make_build()) == ()
