"""``treenail run`` where there is nothing for it to do."""

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
