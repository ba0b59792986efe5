"""The guide of an installation: its commands run on an installation of the lab."""

import os
import shlex
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from tests.docs.guide import FILE, NOT_RUN, GuideStep, read_guide
from tests.docs.lab_actions import GUIDES
from treenail_lab.controllers import CONTROLLER_COMMAND
from treenail_lab.image_builds import find_build_refusal
from treenail_lab.install.install_lab import (
    PUSH_SECRET,
    InstallInputs,
    InstallLab,
    make_install_plan,
)
from treenail_lab.install.install_run import InstallRun
from treenail_lab.lifetime.fork_server import run_process
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine.ignition import ignition

GUIDE = GUIDES / "install-image-mode.md"
HERE = "tests/docs/test_install_guide.py runs it in a lab of its own"
REFUSAL = find_build_refusal()[0] or ignition.find_refusal()
BOOTSTRAP = "treenail-controller install bootstrap "
MINIMAL = "minimal/"
POOLS = ("master", "worker")


def run_command(text: str, directory: Path) -> str:
    """Run a command of the guide as its reader does; return what it prints."""
    words = shlex.split(text)
    assert words[0] == "treenail-controller"
    done = run_process(
        [*CONTROLLER_COMMAND, *words[1:]],
        cwd=directory,
        env={**os.environ, **owner.mark_environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}"
    return done.stdout


def write_files(steps: list[GuideStep], lab: InstallLab, run: InstallRun, place: Path) -> None:
    """Write the files of the guide in place of those of the lab; keep the lab's MachineConfigs."""
    run.write_inputs()
    for step in steps:
        if step.kind == FILE and not step.argument.startswith(MINIMAL):
            text = step.text.replace("registry.example.com", lab.final.host)
            text = text.replace("PULL_SECRET", lab.release.pull_login.decode())
            (place / step.argument).write_text(text)


@pytest.mark.integration
@pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL or "none")
def test_commands_of_the_guide_install_a_cluster() -> None:
    steps = read_guide(GUIDE)
    commands = [
        each.text for step in steps if (step.kind, step.argument) == (NOT_RUN, HERE)
        for each in step.commands
    ]  # fmt: skip
    printed: dict[str, str] = {}
    with owner.temporary_directory() as place, InstallLab(place, make_install_plan(1, 0)) as lab:
        inputs = InstallInputs(dict.fromkeys(POOLS, ""))
        run = InstallRun(lab, place / "cluster", inputs, StringIO(), 250.0)
        try:
            write_files(steps, lab, run, place)
            assert (place / PUSH_SECRET).exists()
            for text in commands:
                if text.startswith(BOOTSTRAP):
                    run.start_bootstrap()
                    run.start_cluster()
                    lab.open_final_registry()
                    run.wait_for_control_plane()
                else:
                    printed[text.split()[2]] = run_command(text, place)
            run.wait_for_handover()
        finally:
            run.stop()
        assert [each.boots for each in run.list_nodes()] == [2]
        assert (place / "log-bundle.tar.gz").stat().st_mode & 0o077 == 0
    assert list(printed) == ["prepare", "plan", "wait-for", "gather"]
    assert "is prepared; pools with an image: master, worker" in printed["prepare"]
    assert "secrets withheld" in printed["gather"]


@pytest.mark.process
def test_minimal_directory_of_the_guide_is_complete(tmp_path: Path) -> None:
    for step in read_guide(GUIDE):
        if step.kind == FILE and step.argument.startswith(MINIMAL):
            path = tmp_path / step.argument
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step.text)
    prepared = run_command("treenail-controller install prepare --dir minimal --offline", tmp_path)
    assert "minimal is prepared; pools with an image: master, worker" in prepared
    planned = run_command("treenail-controller install plan --dir minimal --offline", tmp_path)
    assert "no reason found why the installation would fail" in planned
