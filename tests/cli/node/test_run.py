"""``treenail run`` where there is nothing for it to do, or no memory for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


def test_run_without_ostree_returns_0(
    tmp_path: Path,
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "treenail", "run", "--root", tmp_path, "--node-name", "n1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0
    assert f"{tmp_path} is not booted from OSTree; nothing to do" in ended.stderr
    assert list(tmp_path.iterdir()) == []


# From its start on no allocation succeeds that the allocator maps. Which one is the first to fail
# depends on the memory that the allocator has left.
WITHOUT_MEMORY = """
import resource, sys
from treenail.cli.node.main import main
import treenail.cli.node.run
resource.setrlimit(resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))
sys.exit(main(["run", "--root", sys.argv[1], "--node-name", "n1"]))
"""


@pytest.mark.parametrize(
    ("is_booted", "errors"),
    [
        (False, ("cannot continue: the agent cannot allocate memory",)),
        (
            True,
            (
                "cannot start the process that talks to D-Bus: Cannot allocate memory",
                "cannot continue: the agent cannot allocate memory",
            ),
        ),
    ],
)
def test_run_without_memory_ends_with_an_error(
    tmp_path: Path, *, is_booted: bool, errors: tuple[str, ...]
) -> None:
    settings = tmp_path / "etc/treenail/agent.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text("# a comment\n" * 50_000)
    boot_id = tmp_path / "proc/sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True)
    boot_id.write_text("d1d1a4a7-3f0c-4a3c-9d0a-4a1f3f3a2b1c\n")
    if is_booted:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/ostree-booted").touch()
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMORY, tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert any(f"treenail: {error}" in ended.stderr for error in errors)
    assert "Traceback" not in ended.stderr
