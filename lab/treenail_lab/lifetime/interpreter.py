"""The command line of the lab's Python processes.

They start without ``site``, which takes a third of the time of a short process: their search path
is that of this process.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import treenail
import treenail_lab

PYTHON_MODULE = (sys.executable, "-S", "-P", "-m")
"""The words before the name of a module."""


def build_python_path() -> str:
    """Return PYTHONPATH for `PYTHON_MODULE`."""
    # An editable installation finds its packages by a hook of ``site``, without a path.
    packages = [str(Path(str(package.__file__)).parents[1]) for package in (treenail, treenail_lab)]
    return os.pathsep.join(dict.fromkeys(filter(None, [*packages, *sys.path])))


def build_script(command: Sequence[str]) -> str:
    """Return a shell script that runs a command of Python with the script's arguments."""
    words = shlex.join(command)
    return f'#!/bin/sh\nPYTHONPATH={shlex.quote(build_python_path())} exec {words} "$@"\n'
