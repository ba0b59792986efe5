import os
import subprocess
import sys
from pathlib import Path

import pytest

from treenail.errors import FileError
from treenail.host.filesystem.root import Root
from treenail.host.system.resources import read_free_bytes, read_memory


def test_the_free_space_is_that_of_the_paths_file_system():
    system = os.statvfs("/proc")
    assert read_free_bytes(Root("/"), "/proc") == system.f_bavail * system.f_frsize == 0
    assert read_free_bytes(Root("/"), "/") > 0


def test_the_free_space_of_nothing_is_an_error_of_ours(tmp_path):
    with pytest.raises(FileError, match=r"can't tell the free space at .*/none: No such file"):
        read_free_bytes(Root(tmp_path), "/none")


def test_the_memory_is_that_of_this_process():
    held = read_memory()
    assert 0 < held.pss <= held.rss


@pytest.mark.process
def test_importing_costs_nothing_until_something_is_asked():
    agent = Path(__file__).parents[3] / "agent"
    code = "import sys, treenail.host.system.resources; sys.exit('psutil' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(agent)})
