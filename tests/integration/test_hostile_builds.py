"""Containerfiles that fail, hang or come from another editor, built in a lab."""

from collections.abc import Iterator

import pytest

from tests.waiting import wait_until
from treenail.api.machineosbuild import BuildState, MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.kube.api_client import Json
from treenail.kube.resources import MACHINEOSBUILDS, MACHINEOSCONFIGS
from treenail_lab.cluster import Lab, LabPlan
from treenail_lab.controllers import ControllerReplicas
from treenail_lab.demo import pool
from treenail_lab.demo.pool import CONTAINERFILE, DemoBuild
from treenail_lab.image_builds import find_build_refusal
from treenail_lab.lifetime.owner import owner

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab whose pool is built but not rolled out."""
    why, remedy = find_build_refusal()
    if why:
        pytest.skip(f"{why}: {remedy}")
    plan = LabPlan(nodes=("worker-0",), images=(), registry_version="41.20260101")
    with owner.temporary_directory() as directory, Lab(directory, plan) as found:
        controllers = ControllerReplicas(found, enable=("render", "build"))
        controllers.create_manifests()
        controllers.start_replica()
        try:
            assert found.registry is not None
            pool.create_pool_without_image(found, found.registry.installed.pull_spec)
            build = DemoBuild(found, found.registry, CONTAINERFILE)
            build.create_inputs()
            build.request_build()
            yield found
        finally:
            controllers.stop()


def build_text(lab: Lab, text: str) -> MachineOSBuild:
    """Return the build of a text after its first attempt."""
    before = MachineOSConfig.from_json(lab.client.get(MACHINEOSCONFIGS, "worker")).current_build
    content: Json = {"containerfileArch": "NoArch", "content": text}
    notes: Json = {"treenail.io/build-deadline": "60"}
    body: Json = {"metadata": {"annotations": notes}, "spec": {"containerFile": [content]}}
    lab.client.patch(MACHINEOSCONFIGS, "worker", body)

    def read() -> MachineOSBuild | None:
        config = MachineOSConfig.from_json(lab.client.get(MACHINEOSCONFIGS, "worker"))
        if config.current_build in ("", before):
            return None
        found = lab.client.get(MACHINEOSBUILDS, config.current_build)
        build = MachineOSBuild.from_json(found)
        message = build.condition.message if build.condition else ""
        is_over = build.state.has_ended or "next attempt at" in message
        return build if is_over else None

    found = wait_until(read, limit_s=100)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("instruction", "reason", "message"),
    [
        ("RUN echo begin; sleep 1d", "DeadlineExceeded", "last output: begin"),
        ("RUN echo cause; exit 3", "InstructionFailed", "last output: cause"),
        ("COPY absent /x", "InstructionFailed", "absent"),
    ],
)
def test_failed_instruction_has_reason_line_and_output(
    lab: Lab, instruction: str, reason: str, message: str
) -> None:
    condition = build_text(lab, f"FROM configs AS final\n{instruction}\n").condition
    assert condition is not None
    assert condition.reason == reason, condition.message
    assert condition.message.startswith("line 2: ")
    assert message in condition.message


@pytest.mark.parametrize(
    "text", ["\ufeffFROM configs\nRUN true\n", "FROM configs\r\nRUN echo \\\r\n a\r\n"]
)
def test_text_of_another_editor_is_built(lab: Lab, text: str) -> None:
    build = build_text(lab, text)
    assert build.state is BuildState.SUCCEEDED, build.condition
