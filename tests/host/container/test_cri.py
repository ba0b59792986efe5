"""Check of the container runtime's socket, against real sockets."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from treenail.clocks import SystemClock
from treenail.host.filesystem.root_directory import Root
from treenail.host.system.health_probes import ContainerRuntime
from treenail.process import ProgramRunner

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


def test_runtime_that_accepts_connections_has_no_problem(root: Path) -> None:
    with listening(root / CRIO):
        assert runtime(root).find_problem("crio.service") == ""


def test_socket_without_listener_is_a_problem(root: Path) -> None:
    with listening(root / CRIO):
        pass
    problem = runtime(root).find_problem("crio.service")
    assert problem == f"cannot connect to {root}/{CRIO}: Connection refused"


def test_missing_socket_is_a_problem(root: Path) -> None:
    missing = "run/containerd/containerd.sock: No such file or directory"
    problem = runtime(root).find_problem("containerd.service")
    assert problem == f"cannot connect to {root}/{missing}"
    (root / "run/crio").mkdir(parents=True)
    assert f"cannot connect to {root}/{CRIO}: No such file" in runtime(root).find_problem(
        "crio.service"
    )


def test_socket_below_long_root_is_reached(root: Path) -> None:
    deep = root / ("d" * 100)
    (deep / CRIO).parent.mkdir(parents=True)
    directory = os.open((deep / CRIO).parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{directory}/crio.sock")
        listener.listen()
        os.close(directory)
        assert runtime(deep).find_problem("crio.service") == ""
