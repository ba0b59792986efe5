import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from treenail.host.system.resources import DiskUsage, find_process, read_disk_usage


def test_disk_usage_counts_blocks_reserved_for_root():
    state = os.statvfs("/proc")
    assert read_disk_usage(Path("/proc")) == DiskUsage(
        size_bytes=state.f_blocks * state.f_frsize, free_bytes=state.f_bfree * state.f_frsize
    )
    assert 0 < read_disk_usage(Path("/")).free_bytes <= read_disk_usage(Path("/")).size_bytes


def test_disk_usage_of_missing_path_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_disk_usage(tmp_path / "none")


def test_find_process_returns_start_and_memory():
    process = find_process(os.getpid())
    assert 0 < process.started_at <= time.time()
    assert process.memory_bytes > 1024 * 1024


@pytest.mark.parametrize("pid", [-1, 2**30])
def test_find_process_without_process_returns_none(pid):
    assert find_process(pid) is None


@pytest.mark.process
def test_import_does_not_load_psutil():
    agent = Path(__file__).parents[3] / "agent"
    code = "import sys, treenail.host.system.resources; sys.exit('psutil' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(agent)})
