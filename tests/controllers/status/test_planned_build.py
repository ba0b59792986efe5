"""Image builds as steps of a plan."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.controllers.status.test_plan import CHRONY, config, files, planned, pool, snapshot
from tests.fixtures.clusters import open_lab
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.cli.controller import main as command
from treenail.controllers.render import render
from treenail.controllers.status import rollout_plan
from treenail.controllers.status.rollout_plan import RolloutPlanInput, plan_pools
from treenail.kube.resources import MACHINECONFIGPOOLS

IMAGE = f"registry.example.com/os@sha256:{'1' * 64}"


def with_build(found: RolloutPlanInput, rendered: str, **status: Any) -> RolloutPlanInput:
    image_config = MachineOSConfig.from_json(
        {
            "metadata": {"name": "worker"},
            "spec": {"machineConfigPool": {"name": "worker"}},
            "status": {"currentImagePullSpec": IMAGE},
        }
    )
    build = MachineOSBuild.from_json(
        {
            "metadata": {"name": "worker-1"},
            "spec": {
                "machineConfig": {"name": rendered},
                "machineOSConfig": {"name": "worker"},
            },
            "status": {
                "conditions": [{"type": "Succeeded", "status": "True"}],
                "buildStart": "2026-01-01T00:00:00Z",
                "buildEnd": "2026-01-01T00:10:00Z",
                "digestedImagePushSpec": IMAGE,
                **status,
            },
        }
    )
    return replace(found, image_configs={"worker": image_config}, image_builds={"b": build})


def test_build_is_a_step_with_the_duration_of_the_last_one() -> None:
    found = snapshot(2, pool(), config("00"))
    without = plan_pools(found, now=0.0)[0]
    (pool_plan,) = plan_pools(with_build(found, "rendered-worker-0"), now=0.0)
    assert pool_plan.build.duration_s == 600.0
    assert pool_plan.duration_s is not None
    assert pool_plan.duration_s >= 600.0
    assert without.build is None
    text = planned(with_build(found, "rendered-worker-0"))
    # Without Containerfile.
    assert (
        "without a Job, to the image of MachineOSConfig worker first, about 10 min, like worker-1"
        in text
    )


def test_image_that_exists_is_the_target_without_a_build() -> None:
    found = snapshot(2, pool(), config("00"))
    rendered = plan_pools(found, now=0.0)[0].target.config
    (pool_plan,) = plan_pools(with_build(found, rendered), now=0.0)
    assert pool_plan.build is None
    assert pool_plan.target.image == IMAGE


BASE = f"registry.example.com/base@sha256:{'2' * 64}"
TEXT = "FROM configs AS final\nRUN true\n"


def image_config(text: str = TEXT, *, name: str = "worker", **spec: Any) -> dict[str, Any]:
    """Return a MachineOSConfig as a file has it."""
    return {
        "apiVersion": "machineconfiguration.openshift.io/v1",
        "kind": "MachineOSConfig",
        "metadata": {"name": name},
        "spec": {
            "machineConfigPool": {"name": "worker"},
            "imageBuilder": {"imageBuilderType": "Job"},
            "renderedImagePushSecret": {"name": "push"},
            "renderedImagePushSpec": "registry.example.com/os:latest",
            "containerFile": [{"content": text}] if text else [],
            **spec,
        },
    }


def built(
    found: RolloutPlanInput, document: dict[str, Any], job: str = "build-worker-1"
) -> RolloutPlanInput:
    """Return the snapshot after the build of its MachineOSConfig, whose image all nodes have."""
    (name,) = (each.pool.configuration.name for each in found.pools.values())
    status = {"builder": {"job": {"name": job}}} if job else {}
    before = with_build(found, name, **status)
    served = {**document, "status": {"currentImagePullSpec": IMAGE}}
    notes = {"machineconfiguration.openshift.io/current-machine-os-build": "worker-1"}
    served["metadata"] = {**document["metadata"], "annotations": notes}
    return replace(before, image_configs={"worker": MachineOSConfig.from_json(served)})


def test_new_machineosconfig_in_a_file_is_a_build() -> None:
    found = snapshot(2, pool(), config("00", osImageURL=BASE))
    text = planned(found, image_config())
    assert "builds the image of MachineOSConfig worker first, about 5 min" in text
    assert "image (built first)" in text
    assert "because osImageURL changed (part of the operating system), from MachineOSConfig" in text


def test_plan_of_a_built_image_asks_the_user_for_no_files_in_it() -> None:
    found = snapshot(2, pool(), config("00", osImageURL=BASE))
    added = config("50-app", **files(("/etc/app.conf", "data:,x")))
    text = planned(found, image_config(), added)
    assert "the build of MachineOSConfig worker puts into the image: /etc/app.conf" in text
    assert "the image must contain" not in text
    # The same for a config that is added to an image of the cluster.
    again = planned(built(found, image_config()), image_config(), added)
    assert "puts into the image: /etc/app.conf" in again


def test_unchanged_machineosconfig_in_a_file_needs_no_build() -> None:
    found = built(snapshot(2, pool(), config("00", osImageURL=BASE)), image_config())
    # The API server adds the default of the architecture.
    text = planned(found, image_config())
    assert "first, about" not in text
    assert IMAGE in text


def test_changed_containerfile_in_a_file_is_a_build_like_the_last_one() -> None:
    found = built(snapshot(2, pool(), config("00", osImageURL=BASE)), image_config())
    text = planned(found, image_config(TEXT + "RUN false\n"))
    assert "builds the image of MachineOSConfig worker first, about 10 min, like worker-1" in text


@pytest.mark.parametrize("name", ["treenail.io/build-sees-config", "treenail.io/context"])
def test_annotation_that_changes_the_image_in_a_file_is_a_build(name: str) -> None:
    found = built(snapshot(2, pool(), config("00", osImageURL=BASE)), image_config())
    changed = image_config()
    changed["metadata"]["annotations"] = {name: "true"}
    assert "builds the image of MachineOSConfig worker first" in planned(found, changed)


def test_reverted_containerfile_needs_no_build() -> None:
    found = snapshot(2, pool(), config("00", osImageURL=BASE))
    old = rollout_plan.apply_manifests(
        found, render.read_manifests([("file", json.dumps(image_config()))])
    )
    (wanted,) = plan_pools(old, now=0.0)
    name = wanted.build.name
    now = built(found, image_config(TEXT + "RUN false\n"))
    past = replace(
        now.image_builds["b"], metadata=replace(now.image_builds["b"].metadata, name=name)
    )
    (after,) = plan_pools(
        rollout_plan.apply_manifests(
            replace(now, image_builds={"past": past}),
            render.read_manifests([("file", json.dumps(image_config()))]),
        ),
        now=0.0,
    )
    assert after.build is None
    assert after.target.image == IMAGE


def test_changed_files_of_a_built_image_need_no_job() -> None:
    found = built(snapshot(2, pool(), config("00", osImageURL=BASE)), image_config())
    text = planned(found, config("50", **files(("/etc/chrony.conf", CHRONY))))
    assert "adds the config, without a Job, to the image of MachineOSConfig worker first" in text
    assert "about 5 s" in text


def test_changed_base_of_a_built_image_needs_a_job() -> None:
    found = built(snapshot(2, pool(), config("00", osImageURL=BASE)), image_config())
    newer = BASE.replace("2222", "3333")
    text = planned(found, config("00", osImageURL=newer))
    assert "builds the image of MachineOSConfig worker first, about 10 min, like worker-1" in text


@pytest.mark.parametrize(
    ("document", "pool_spec", "problem"),
    [
        (image_config("RUN true\n"), {}, "there is no FROM"),
        (
            image_config(renderedImagePushSpec="registry.example.com/os"),
            {},
            "RenderedImagePushSpec",
        ),
        (image_config(), {"osImage": IMAGE}, "names an image in spec.osImage"),
    ],
)
def test_machineosconfig_that_cannot_be_built_is_a_problem(
    document: dict[str, Any], pool_spec: dict[str, Any], problem: str
) -> None:
    found = snapshot(2, pool(**pool_spec), config("00", osImageURL=BASE))
    text = planned(found, document)
    assert "cannot be planned" in text or "  problem: " in text
    assert problem.lower() in text.lower()
    assert "first, about" not in text


def test_second_machineosconfig_of_a_pool_is_a_problem() -> None:
    found = built(snapshot(2, pool(), config("00", osImageURL=BASE)), image_config())
    text = planned(found, image_config(name="other"))
    assert "problem: MachineOSConfig other: spec.machineConfigPool.name" in text
    assert "for which MachineOSConfig worker builds" in text


def test_plan_of_a_machineosconfig_without_its_pool_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_lab(tmp_path / "api") as (server, client):
        client.create(MACHINECONFIGPOOLS, pool())
        path = tmp_path / "config.json"
        path.write_text(json.dumps(image_config(machineConfigPool={"name": "wroker"})))
        arguments = ["plan", "-f", str(path), "--kubeconfig", str(server.admin_kubeconfig)]
        assert command.main(arguments) == 64
    shown = capsys.readouterr().err
    assert "MachineOSConfig worker names MachineConfigPool 'wroker'" in shown
    assert "found: worker" in shown
