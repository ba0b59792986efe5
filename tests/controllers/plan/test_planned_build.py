"""Image builds as steps of a plan."""

from dataclasses import replace
from typing import Any

from tests.controllers.plan.test_plan import config, planned, pool, snapshot
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.controllers.plan.plan import PlanInput, plan_pools

IMAGE = f"registry.example.com/os@sha256:{'1' * 64}"


def with_build(found: PlanInput, rendered: str, **status: Any) -> PlanInput:
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
    (plan,) = plan_pools(with_build(found, "rendered-worker-0"), now=0.0)
    assert plan.build is not None
    assert plan.build.duration_s == 600.0
    assert plan.duration_s is not None
    assert plan.duration_s >= 600.0
    assert without.build is None
    text = planned(with_build(found, "rendered-worker-0"))
    assert "builds the image of MachineOSConfig worker first, about 10 min, like worker-1" in text


def test_image_that_exists_is_the_target_without_a_build() -> None:
    found = snapshot(2, pool(), config("00"))
    rendered = plan_pools(found, now=0.0)[0].target.config
    (plan,) = plan_pools(with_build(found, rendered), now=0.0)
    assert plan.build is None
    assert plan.target.image == IMAGE
