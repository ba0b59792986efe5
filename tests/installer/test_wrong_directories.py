"""Commands of an installation on a directory that is absent, unreadable, or another one."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.installer.processes import (
    COMMAND,
    bootstrap,
    make_directory,
    make_environment,
    run_install,
)
from tests.waiting import PATIENCE, wait_until
from treenail.cli.controller.main import main
from treenail_lab.lifetime.fork_server import LabProcess

COMMANDS = {
    "prepare": ["prepare"],
    "plan": ["plan"],
    "bootstrap": ["bootstrap"],
    "wait-for": ["wait-for", "bootstrap-complete"],
    "gather": ["gather"],
    "reset": ["reset"],
    "image": ["image", "--pool=master", "--output=image"],
}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that other users may enter; pytest's own ones are private."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def make_wrong_path(place: Path, kind: str) -> Path:
    path = place / kind
    if kind == "file":
        path.touch()
    elif kind == "loop":
        path.symlink_to(path)
    return place / ("x" * 300) if kind == "long" else path


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("absent", "it does not exist"),
        ("file", "it is not a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("long", "File name too long"),
    ],
)
def test_path_that_is_no_directory_is_a_usage_error(
    command: str, kind: str, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_wrong_path(tmp_path, kind)
    assert main(["install", *COMMANDS[command], "--dir", str(path)]) == 64
    text = "".join(capsys.readouterr().err.split())
    assert "".join(f"{path}: {cause}".split()) in text
    assert "--dirDIR" in text


@needs_root
@pytest.mark.process
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("hidden", [".", ".treenail"])
def test_directory_of_another_user_is_refused_in_one_sentence(
    command: str, hidden: str, open_path: Path
) -> None:
    root = make_directory(open_path / "cluster")
    (root / ".treenail").mkdir()
    (root / ".treenail/install.json").write_text("{}")
    (root / hidden).chmod(0o700)
    words = ["install", *COMMANDS[command], "--dir", str(root)]
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--",
         sys.executable, "-c", COMMAND, *words],
        env=make_environment(), cwd="/", capture_output=True, text=True, check=False,
        timeout=60 * PATIENCE,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert done.returncode != 0
    if hidden == ".":
        assert f"{root}: Permission denied" in " ".join(done.stderr.split())


@pytest.mark.parametrize("command", ["wait-for", "gather"])
def test_directory_without_an_installation_is_refused_at_once(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["install", *COMMANDS[command], "--dir", str(tmp_path)]) == 64
    text = " ".join(capsys.readouterr().err.split())
    assert f"from {tmp_path}: " in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_wait_before_the_first_start_says_what_it_waits_for(tmp_path: Path) -> None:
    root = make_directory(tmp_path / "cluster")
    log = tmp_path / "log"
    command = [sys.executable, "-c", COMMAND, "install", "wait-for", "bootstrap-complete"]
    with log.open("wb") as output:
        process = LabProcess(
            [*command, f"--dir={root}"], env=make_environment(), stdout=output, stderr=output
        )
    try:
        start = f"waiting for a start of: treenail-controller install bootstrap --dir {root}"
        wait_until(lambda: start in " ".join(log.read_text().split()))
        assert process.poll() is None
        # It follows the installation that begins meanwhile.
        with bootstrap(root):
            wait_until(lambda: "wait for the API server" in log.read_text())
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.process
def test_second_start_does_not_report_a_failure_of_the_first(tmp_path: Path) -> None:
    root = make_directory(tmp_path / "cluster")
    with bootstrap(root) as process:
        process.wait_for_status(step="first-boot", is_serving=True)
        second = run_install("bootstrap", "--dir", root)
        assert second.returncode == 64
        assert "failed" not in second.stderr
        assert f"another process, PID {process.process.pid}, installs" in second.stderr
        assert process.read_status()["phase"] == "running"
