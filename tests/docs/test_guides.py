"""The guides in docs/guides: each command runs in a lab, and prints what the guide shows."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.docs.build_actions import BuildActions, list_names
from tests.docs.command_lines import find_problems
from tests.docs.guide import FILE, LAB, NOT_RUN, RUN, ConsoleCommand, GuideStep, read_guide
from tests.docs.lab_actions import GUIDES, LabActions, make_os_image
from tests.docs.lab_shell import CLUSTER, LabShells
from tests.docs.printed_output import compare_output
from tests.docs.provision_actions import ProvisionActions
from treenail.kube.resources import MACHINECONFIGPOOLS
from treenail_lab.cluster import POOL, Lab, LabPlan
from treenail_lab.controllers import ALL_CONTROLLERS, ControllerReplicas
from treenail_lab.demo import pool
from treenail_lab.image_builds import find_build_refusal
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine.ignition import ignition
from treenail_lab.machine.settings import MachineSettings

NODES = ("worker-0", "worker-1")
AGENT_SETTINGS = (
    "[limits]\nretry_first_s = 0.1\nretry_max_s = 0.5\n"
    "[health]\ndeadline_s = 6\nsettle_s = 0.1\ninterval_s = 0.1\n"
    "failing_s = 0.5\nready_s = 0.5\noutage_s = 0.5\n"
)
ALL = sorted(GUIDES.glob("*.md"))
WITH_COMMANDS = [guide for guide in ALL if any(step.kind == RUN for step in read_guide(guide))]


VERSION = "41.20260101"
NEEDS_REGISTRY = "the cluster has a registry"
"""Action of a guide whose lab has a registry and a Node for builds."""
NEEDS_MACHINES = "machines are added to the cluster"
"""Action of a guide whose lab gets more machines: these have user data only."""
UPDATE_ID = re.compile(r"(?<=TREENAIL_UPDATE=)[0-9a-f]{32}")


class GuideLab:
    """A lab at rest, its shells and actions; use it as a context manager."""

    def __init__(self, *, has_registry: bool = False, has_newcomers: bool = False) -> None:
        self._has_registry = has_registry
        self._has_newcomers = has_newcomers
        self.update_id = ""
        """The ID of an update that a command printed last; a guide has that of another run."""
        self._stack = ExitStack()

    def __enter__(self) -> "GuideLab":
        with self._stack as started:
            directory = owner.make_directory()
            started.callback(owner.remove_directory, directory)
            settings = MachineSettings(pull_bytes_per_s=1e9, staging_s=0.02)
            plan = LabPlan(
                NODES,
                () if self._has_registry else (make_os_image(VERSION),),
                machine_settings=settings,
                agent_settings=AGENT_SETTINGS,
                registry_version=VERSION if self._has_registry else "",
            )
            lab = started.enter_context(Lab(directory, plan))
            controllers = ControllerReplicas(lab, enable=(*ALL_CONTROLLERS, "generate"))
            started.callback(controllers.stop)
            start_pool(lab, controllers)
            self.shells = started.enter_context(LabShells(lab, directory))
            more: Mapping[str, Callable[..., None]] = {}
            if lab.registry is not None:
                self.shells.names = list_names(lab.registry)
                builds = BuildActions(lab, controllers)
                started.callback(builds.stop)
                more = builds.list_actions()
            if self._has_newcomers:
                newcomers = ProvisionActions(lab, self.shells, controllers)
                started.callback(newcomers.stop)
                more = {**more, **newcomers.list_actions()}
            self.actions = LabActions(lab, self.shells, more)
            self._stack = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def start_pool(lab: Lab, controllers: ControllerReplicas) -> None:
    controllers.create_manifests()
    if lab.registry is None:
        pool.create_pool(lab, lab.installed_image.pull_spec)
        # Images of the lab have no files of MachineConfigs.
        lab.client.patch(MACHINECONFIGPOOLS, POOL, {"spec": {"imageFiles": "Write"}})
    else:
        pool.create_pool_without_image(lab, lab.installed_image.pull_spec)
    controllers.start_replica()
    for node, machine in lab.machines.items():
        # Commands on the node find it, although the host has another name.
        file = machine.root / "etc/treenail/agent.toml"
        file.write_text(f'node_name = "{node}"\n{file.read_text("utf-8")}', "utf-8")


class GuideLabs:
    """Lends one lab to all guides, and a new one after a guide that failed."""

    def __init__(self) -> None:
        self._lab: GuideLab | None = None

    @contextmanager
    def lend(
        self, *, has_registry: bool = False, has_newcomers: bool = False
    ) -> Iterator[GuideLab]:
        if has_registry or has_newcomers:
            with GuideLab(has_registry=has_registry, has_newcomers=has_newcomers) as own:
                own.actions.wait_until_at_rest()
                yield own
                own.actions.wait_until_at_rest()
            return
        lab, self._lab = self._lab or GuideLab().__enter__(), None
        try:
            lab.actions.reset_pool()
            lab.actions.wait_until_at_rest()
            yield lab
            lab.actions.wait_until_at_rest()
        except BaseException:
            lab.__exit__()
            raise
        self._lab = lab

    def close(self) -> None:
        if self._lab is not None:
            self._lab.__exit__()


@pytest.fixture(scope="module")
def guide_labs() -> Iterator[GuideLabs]:
    labs = GuideLabs()
    yield labs
    labs.close()


def ids(path: Path) -> str:
    return path.stem


@pytest.mark.integration
@pytest.mark.limit(900)
@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl here")
@pytest.mark.parametrize("guide", WITH_COMMANDS, ids=ids)
def test_guide_prints_what_its_commands_print(guide: Path, guide_labs: GuideLabs) -> None:
    steps = read_guide(guide)
    has_registry = any(step.argument == NEEDS_REGISTRY for step in steps)
    if has_registry and (refusal := find_build_refusal()[0]):
        pytest.skip(refusal)
    has_newcomers = any(step.argument == NEEDS_MACHINES for step in steps)
    if has_newcomers and (refusal := ignition.find_refusal()):
        pytest.skip(refusal)
    with guide_labs.lend(has_registry=has_registry, has_newcomers=has_newcomers) as lab:
        for step in steps:
            run_step(lab, step)


def run_step(lab: GuideLab, step: GuideStep) -> None:
    if step.argument in (NEEDS_REGISTRY, NEEDS_MACHINES):
        return
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
