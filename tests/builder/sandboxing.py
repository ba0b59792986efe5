"""Sandboxed programs for tests, and the condition under which the host can run them."""

import getpass
import os
import shutil
from functools import cache
from pathlib import Path

import pytest

from treenail.builder.buildah.program import SandboxedProgram, choose_id_maps, make_environment
from treenail.clocks import SystemClock
from treenail.errors import TreenailError


def make_program(work: Path) -> SandboxedProgram:
    maps = choose_id_maps(
        os.geteuid(), getpass.getuser(), os.getegid(), proc=Path("/proc"), etc=Path("/etc")
    )
    environ = make_environment(os.environ, work)
    directory = work if work.is_dir() else None
    return SandboxedProgram(SystemClock(), maps, environ, directory=directory)


@cache
def has_namespaces() -> bool:
    """Whether this user can create the namespaces of a build."""
    try:
        program = make_program(Path("/nonexistent"))
        return not program.run_program(["true"], timeout_s=30, add_line=print)
    except TreenailError:
        return False


needs_namespaces = pytest.mark.skipif(
    not has_namespaces(), reason="needs root or subordinate IDs, and user namespaces"
)
needs_buildah = pytest.mark.skipif(
    not has_namespaces() or shutil.which("buildah") is None,
    reason="needs buildah, and root or subordinate IDs",
)
