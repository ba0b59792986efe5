"""Steps run in order, resume after a death, and restart at the first changed input."""

import logging
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from tests.installer.dying import DeathError, DyingFiles, FileStep, FullDisk, Fuse
from treenail.errors import ConfigError, FileError, TreenailError
from treenail.installer.directory.install_files import InstallDirectory, InstallFiles
from treenail.installer.directory.install_state import InstallState, StepState
from treenail.installer.install_steps import (
    InstallStepRunner,
    Step,
    StepContext,
    StepLimit,
    StepOverdueError,
    format_limit,
)

INPUTS = {"render": {"pools": "1"}, "build": {"file": "1"}, "publish": {"objects": "1"}}


class Observed:
    """Keeps what the runner reports."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin_step(self, step: Step) -> None:
        self.seen.append(f"begin {step.name}")

    def report(self, text: str) -> None:
        self.seen.append(text)

    def fail_step(self, step: Step, error: TreenailError) -> None:
        self.seen.append(f"fail {step.name}: {error}")


class World:
    """An install directory, and one process after the other that runs its steps."""

    def __init__(self, root: Path) -> None:
        self.directory = InstallDirectory(root)
        self.root = root
        self.clock = FakeClock()
        self.inputs = {name: dict(inputs) for name, inputs in INPUTS.items()}
        self.observed = Observed()

    def run(self, fuse: Fuse | None = None, files: InstallFiles | None = None) -> list[str]:
        """Run a process to its end; return the steps that ran."""
        fuse = fuse or Fuse()
        files = files or DyingFiles(fuse)
        steps = [FileStep(self.directory, name, each, fuse) for name, each in self.inputs.items()]
        state = InstallState(self.directory, files, self.clock)
        runner = InstallStepRunner(state, self.observed, self.clock)
        for step in steps:
            runner.run_step(step)
        return [step.name for step in steps if step.runs]

    def read_outputs(self) -> Mapping[str, str]:
        return {each.name: each.read_text() for each in sorted(self.root.glob("*.out"))}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_second_start_with_equal_inputs_runs_nothing(world: World) -> None:
    assert world.run() == ["render", "build", "publish"]
    assert world.run() == []


def test_changed_input_restarts_at_the_first_affected_step(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.run()
    world.inputs["build"]["file"] = "2"
    with caplog.at_level(logging.INFO):
        assert world.run() == ["build", "publish"]
    assert "restarting at step build: file changed" in caplog.text
    assert world.run() == []


def test_missing_result_restarts_at_its_step(world: World) -> None:
    world.run()
    (world.root / "build.out").unlink()
    assert world.run() == ["build", "publish"]


def test_death_at_each_point_ends_in_the_same_result(tmp_path: Path) -> None:
    reference = World(tmp_path / "reference")
    reference.root.mkdir()
    fuse = Fuse()
    reference.run(fuse)
    assert fuse.passed > 30
    for point in range(1, fuse.passed + 1):
        world = World(tmp_path / f"at-{point}")
        world.root.mkdir()
        with pytest.raises(DeathError):
            world.run(Fuse(point))
        again = world.run()
        assert world.read_outputs() == reference.read_outputs()
        assert world.run() == [], f"after a death at point {point} and {again}"


@pytest.mark.parametrize("seed", range(20))
def test_several_deaths_in_a_row_end_in_the_same_result(world: World, seed: int) -> None:
    source = random.Random(seed)
    deaths = 0
    for _ in range(20):
        try:
            world.run(Fuse(source.randint(1, 12)))
        except DeathError:
            deaths += 1
    world.run()
    assert deaths
    assert world.read_outputs() == {
        "build.out": "file=1",
        "publish.out": "objects=1",
        "render.out": "pools=1",
    }


def test_step_is_recorded_before_it_begins(world: World) -> None:
    # Six files and points: the new state (4), the record of the first step (4), its first point.
    with pytest.raises(DeathError):
        world.run(Fuse(9))
    assert not (world.root / "render.out").exists()
    state = InstallState(world.directory, InstallFiles(), world.clock)
    found = state.find_step("render")
    assert (found.state, found.inputs) == (StepState.RUNNING, {"pools": "1"})


def test_failure_is_recorded_with_its_remedy(world: World) -> None:
    class FailingStep(FileStep):
        def run(self, context: StepContext) -> Mapping[str, str]:
            raise ConfigError("cannot build the image", remedy="fix the Containerfile")

    state = InstallState(world.directory, InstallFiles(), world.clock)
    step = FailingStep(world.directory, "build", {}, Fuse())
    with pytest.raises(ConfigError):
        InstallStepRunner(state, world.observed, world.clock).run_step(step)
    found = InstallState(world.directory, InstallFiles(), world.clock).find_step("build")
    assert (found.state, found.remedy) == (StepState.FAILED, "fix the Containerfile")
    assert world.observed.seen[-1] == "fail build: cannot build the image"
    fixed = FileStep(world.directory, "build", {}, Fuse())
    InstallStepRunner(state, world.observed, world.clock).run_step(fixed)
    assert fixed.runs == 1


def test_full_disk_fails_the_step_and_keeps_the_state(world: World) -> None:
    files = FullDisk()
    world.inputs["build"]["file"] = "1"
    InstallState(world.directory, files, world.clock)
    files.is_full = True
    with pytest.raises(FileError, match="No space left on device"):
        world.run(files=files)
    files.is_full = False
    assert world.run(files=files) == ["render", "build", "publish"]


def test_step_above_its_limit_names_the_limit_and_the_flag(world: World) -> None:
    class WaitingStep(FileStep):
        def run(self, context: StepContext) -> Mapping[str, str]:
            for _ in range(100):
                context.wait(60)
            raise AssertionError

    limit = StepLimit(1800, "--push-timeout")
    step = WaitingStep(world.directory, "push", {}, Fuse(), limit=limit)
    state = InstallState(world.directory, InstallFiles(), world.clock)
    with pytest.raises(
        StepOverdueError, match="cannot write push: the time limit of 30m has passed"
    ) as caught:
        InstallStepRunner(state, world.observed, world.clock).run_step(step)
    assert "--push-timeout TIME" in caught.value.remedy
    assert [format_limit(each) for each in (3600, 45, 0.5, 90)] == ["60m", "45s", "0.5s", "90s"]
