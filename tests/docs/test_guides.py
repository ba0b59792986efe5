"""The guides in docs/guides: each command runs in a lab, and prints what the guide shows."""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.command_lines import find_problems
from tests.docs.guide import FILE, LAB, NOT_RUN, RUN, ConsoleCommand, GuideStep, read_guide
from tests.docs.lab_actions import GUIDES, LabActions, make_os_image
from tests.docs.lab_shell import CLUSTER, LabShells
from tests.docs.printed_output import compare_output
from treenail.kube.resources import MACHINECONFIGPOOLS
from treenail_lab.cluster import POOL, Lab, LabPlan
from treenail_lab.controllers import ControllerReplicas
from treenail_lab.demo import pool
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine.settings import MachineSettings

NODES = ("worker-0", "worker-1")
AGENT_SETTINGS = (
    "[limits]\nretry_first_s = 0.1\nretry_max_s = 0.5\n"
    "[health]\ndeadline_s = 3\nsettle_s = 0.1\ninterval_s = 0.1\n"
    "failing_s = 0.5\nready_s = 0.5\noutage_s = 0.5\n"
)
ALL = sorted(GUIDES.glob("*.md"))
GUIDE_LINES = 150


UPDATE_ID = re.compile(r"(?<=TREENAIL_UPDATE=)[0-9a-f]{32}")


class GuideLab:
    """A lab at rest, its shells and actions."""

    def __init__(self, lab: Lab, shells: LabShells) -> None:
        self.shells = shells
        self.actions = LabActions(lab, shells)
        self.update_id = ""
        """The ID of an update that a command printed last; a guide has that of another run."""


@pytest.fixture(scope="module")
def guide_lab() -> Iterator[GuideLab]:
    first = make_os_image("41.20260101")
    machine_settings = MachineSettings(pull_bytes_per_s=1e9, staging_s=0.02)
    plan = LabPlan(
        NODES, (first,), machine_settings=machine_settings, agent_settings=AGENT_SETTINGS
    )
    directory = owner.make_directory()
    try:
        with Lab(directory, plan) as lab:
            controllers = ControllerReplicas(lab)
            controllers.create_manifests()
            pool.create_pool(lab, first.pull_spec)
            # Images of the lab have no files of MachineConfigs.
            lab.client.patch(MACHINECONFIGPOOLS, POOL, {"spec": {"imageFiles": "Write"}})
            controllers.start_replica()
            for node, machine in lab.machines.items():
                settings = machine.root / "etc/treenail/agent.toml"
                settings.write_text(f'node_name = "{node}"\n{settings.read_text("utf-8")}', "utf-8")
            try:
                with LabShells(lab, directory) as shells:
                    yield GuideLab(lab, shells)
            finally:
                controllers.stop()
    finally:
        owner.remove_directory(directory)


def ids(path: Path) -> str:
    return path.stem


@pytest.mark.integration
@pytest.mark.limit(600)
@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl here")
@pytest.mark.parametrize("guide", ALL, ids=ids)
def test_guide_prints_what_its_commands_print(guide: Path, guide_lab: GuideLab) -> None:
    guide_lab.actions.wait_until_at_rest()
    for step in read_guide(guide):
        run_step(guide_lab, step)
    guide_lab.actions.wait_until_at_rest()


def run_step(lab: GuideLab, step: GuideStep) -> None:
    if step.kind == LAB:
        lab.actions.run(step.argument)
    elif step.kind == FILE:
        place, _, path = step.argument.rpartition(" ")
        lab.shells.write_file(place or CLUSTER, path, step.text)
    elif step.kind == RUN:
        assert step.commands, f"line {step.line}: no command in this block"
        for command in step.commands:
            run_command(lab, step.place, command)


def run_command(lab: GuideLab, place: str, command: ConsoleCommand) -> None:
    done = lab.shells.run(place, UPDATE_ID.sub(lab.update_id, command.text))
    if found := UPDATE_ID.findall(done.stdout):
        lab.update_id = found[-1]
    sys.stdout.write(f"[{place}] $ {command.text}\n{done.stdout}\n")
    where = f"line {command.line}: {command.text}\n"
    assert done.returncode == command.exit_code, f"{where}{done.stdout}"
    if command.output:
        assert not (diff := compare_output(command.output, done.stdout)), f"{where}{diff}"


@pytest.mark.parametrize("guide", ALL, ids=ids)
def test_commands_of_guide_are_accepted_by_parsers(guide: Path) -> None:
    commands = [each for step in read_guide(guide) for each in step.commands]
    problems = {each.line: find_problems(each.text) for each in commands}
    assert {line: found for line, found in problems.items() if found} == {}


NOT_RUN_STEPS = [
    pytest.param(step, id=f"{guide.name}:{step.line}")
    for guide in ALL
    for step in read_guide(guide)
    if step.kind == NOT_RUN
]


@pytest.mark.parametrize("step", NOT_RUN_STEPS)
def test_commands_are_not_run(step: GuideStep) -> None:
    pytest.skip(f"not run: {step.argument}")
