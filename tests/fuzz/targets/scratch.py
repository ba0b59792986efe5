"""A directory for readers that take a path."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path


@cache
def make_directory() -> Path:
    """Return the directory of this process; the end of the process removes it."""
    found = Path(tempfile.mkdtemp(prefix="treenail-fuzz-"))
    atexit.register(shutil.rmtree, found, ignore_errors=True)
    return found
