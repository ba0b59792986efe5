"""Functions in forked processes."""

import os
import signal
import sys

import pytest

from treenail.errors import ConfigError, HostError
from treenail.installer.bootstrap.forked import run_forked

pytestmark = pytest.mark.process

MODULE = "antigravity_of_a_test"


def load_module() -> tuple[int, bytes]:
    sys.modules[MODULE] = sys
    return os.getpid(), b"x" * 1_000_000


def fail() -> None:
    raise ConfigError("the cause", remedy="the remedy")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_result_comes_from_another_process_that_leaves_nothing() -> None:
    pid, content = run_forked(load_module)
    assert pid != os.getpid()
    assert len(content) == 1_000_000
    assert MODULE not in sys.modules
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_exception_is_raised_with_its_remedy() -> None:
    with pytest.raises(ConfigError, match="the cause") as caught:
        run_forked(fail)
    assert caught.value.remedy == "the remedy"


def test_killed_process_is_an_error() -> None:
    with pytest.raises(HostError, match="without an answer, with wait status 9"):
        run_forked(die)
