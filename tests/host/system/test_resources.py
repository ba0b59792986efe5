import os
import subprocess
import sys
from pathlib import Path

import pytest

from treenail.errors import FileError
from treenail.host.filesystem.root import Root
from treenail.host.system.resources import read_free_bytes, read_memory


def test_free_bytes_are_those_of_the_file_system():
    system = os.statvfs("/proc")
    assert read_free_bytes(Root("/"), "/proc") == system.f_bavail * system.f_frsize == 0
    assert read_free_bytes(Root("/"), "/") > 0


def test_free_bytes_of_missing_path_is_an_error(tmp_path):
    with pytest.raises(FileError, match=r"cannot read the free space of .*/none: No such file"):
        read_free_bytes(Root(tmp_path), "/none")


def test_memory_has_pss_at_most_rss():
    memory = read_memory()
    assert 0 < memory.pss <= memory.rss


@pytest.mark.process
def test_import_of_module_does_not_import_psutil():
    agent = Path(__file__).parents[3] / "agent"
    code = "import sys, treenail.host.system.resources; sys.exit('psutil' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(agent)})
