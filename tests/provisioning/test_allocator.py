"""The allocator returns freed memory to the kernel."""

import subprocess
import sys

import pytest

PROGRAM = """
from treenail.memory import limit_allocator, release_freed_memory

def read_resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

limit_allocator()
blocks = [bytes([number % 250 + 1]) * 100_000 for number in range(400)]
last = blocks[-1]
full = read_resident()
del blocks
release_freed_memory()
print(full - read_resident())
"""


@pytest.mark.process
def test_freed_blocks_are_released_below_a_block_in_use() -> None:
    command = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60)
    assert int(found.stdout) > 30_000_000
