"""The container runtime's socket, as a real one."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from treenail.clock import SystemClock
from treenail.host.container.cri import ContainerRuntime
from treenail.host.filesystem.root import Root
from treenail.host.system.process import ProgramRunner

CRIO = "run/crio/crio.sock"


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as directory:
        yield Path(directory)


@contextmanager
def listening(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield


def runtime(root: Path) -> ContainerRuntime:
    programs = ProgramRunner(SystemClock(), {"PATH": f"{root}:/usr/bin:/bin"})
    return ContainerRuntime(Root(root), programs, timeout_s=5.0)


def test_a_runtime_that_takes_connections_answers(root: Path) -> None:
    with listening(root / CRIO):
        assert runtime(root).find_problem("crio.service") == ""


def test_a_socket_that_nobody_listens_on_is_a_problem(root: Path) -> None:
    with listening(root / CRIO):
        pass
    problem = runtime(root).find_problem("crio.service")
    assert problem == f"{root}/{CRIO} does not answer: Connection refused"


def test_a_socket_that_is_not_there_is_a_problem(root: Path) -> None:
    assert "there is no" in runtime(root).find_problem("containerd.service")
    (root / "run/crio").mkdir(parents=True)
    assert "does not answer: No such file" in runtime(root).find_problem("crio.service")


def test_a_root_far_down_is_no_problem(root: Path) -> None:
    deep = root / ("d" * 100)
    (deep / CRIO).parent.mkdir(parents=True)
    directory = os.open((deep / CRIO).parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{directory}/crio.sock")
        listener.listen()
        os.close(directory)
        assert runtime(deep).find_problem("crio.service") == ""
