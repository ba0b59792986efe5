"""An agent in the shipped unit's sandbox that cannot allocate memory in an update.

Either an allocation fails (RLIMIT_AS), or the kernel kills the process (a memory cgroup).
"""

import itertools
import os
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.records import write_record
from tests.system.nspawn import Container, missing
from tests.system.sandboxed_node import LIMIT_S, SandboxedNode
from tests.waiting import wait_until
from treenail.api import annotations as key

CGROUPS = Path("/sys/fs/cgroup/memory")
"""The memory controller of cgroup v1, which systemd in the container leaves alone."""
pytestmark = [
    pytest.mark.system,
    pytest.mark.long,
    pytest.mark.limit(1_200),
    pytest.mark.skipif(bool(missing()), reason=f"no container: {missing()}"),
]
FILES = tuple(f"/etc/nmstate/openshift/{number}.yml" for number in range(15))
"""A change of them needs neither a drain nor a reboot."""
FILE_BYTES = 200_000
"""So large that the allocator maps memory for the content of each file."""
NUMBERS = itertools.count(1)
WRITING = ("applying", "cancelling")
"""In these phases the agent writes files."""
# The test must see what the Node shows until the next start.
RESTART = "[Service]\nRestartSec=2s\n"


@pytest.fixture(scope="module")
def node(container: Container) -> Iterator[SandboxedNode]:
    with SandboxedNode(container) as found:
        found.install_drop_in(RESTART)
        name = add_update(found)
        found.request(name)
        found.start_agent()
        found.wait_done(name)
        yield found


def add_update(node: SandboxedNode) -> str:
    """Create a config that writes its name into all files."""
    name = f"memory-{next(NUMBERS)}"
    return node.add_config(name, {path: f"{name} ".ljust(FILE_BYTES, ".") for path in FILES})


def read_names(node: SandboxedNode) -> set[str]:
    """Return the configs that the files are of; more than one while the agent writes them."""
    while True:
        phase = node.read_phase()
        names = {node.read(path).partition(" ")[0] for path in FILES}
        if phase not in WRITING:
            assert len(names) == 1, (phase, names)
        if phase == node.read_phase():
            return names


def find_process(node: SandboxedNode) -> int:
    """Return the ID of the agent's process outside the container; 0 without a process."""
    inside = node.show("MainPID")
    space = Path(f"/proc/{node.container.leader}/ns/pid").readlink()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "ns/pid").readlink() == space:
                lines = (path / "status").read_text().splitlines()
                numbers = next(line for line in lines if line.startswith("NSpid:")).split()
                if numbers[-1] == inside:
                    return int(path.name)
        except OSError:  # of another container, or it has ended
            continue
    return 0


def read_size(process: int) -> int:
    """Return the size of its address space in bytes."""
    pages = Path(f"/proc/{process}/statm").read_text().split()[0]
    return int(pages) * resource.getpagesize()


class Limiter:
    """Makes allocations of the agent fail, or the kernel kill it for them."""

    what = "an allocation fails (RLIMIT_AS)"

    def limit(self, process: int, free_bytes: int) -> None:
        """Let the process have so many bytes more than now; 0 for no allocation at all."""
        limit = read_size(process) + free_bytes if free_bytes else 1
        resource.prlimit(process, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    def close(self) -> None:
        """Release what the last limit needed, once the process has ended or the update is done."""


class Killer(Limiter):
    """The memory controller: it counts what a process allocates once it is in a cgroup."""

    what = "the kernel kills it (a memory cgroup)"

    def __init__(self) -> None:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line.split(":")[2] for line in lines if line.split(":")[1] == "memory")
        self._parent = CGROUPS / own.lstrip("/")
        self._group = self._parent / f"treenail-test-{os.getpid()}"

    def limit(self, process: int, free_bytes: int) -> None:
        self._group.mkdir()
        (self._group / "memory.limit_in_bytes").write_text(str(free_bytes))
        (self._group / "cgroup.procs").write_text(str(process))

    def close(self) -> None:
        for process in (self._group / "cgroup.procs").read_text().split():
            (self._parent / "cgroup.procs").write_text(process)
        self._group.rmdir()


def is_written(node: SandboxedNode, path: str, name: str) -> bool:
    return node.read(path).startswith(f"{name} ")


def has_restarted(node: SandboxedNode, before: int) -> bool:
    return node.restart_count() > before


def finish(node: SandboxedNode, name: str, process: int, limiter: Limiter) -> str | None:
    """Wait until the node has the config; return the phase in which the agent ended, or None."""
    ended_in: list[str] = []

    def is_there() -> bool:
        if not ended_in and not Path(f"/proc/{process}").exists():
            ended_in.append(node.read_phase())
        read_names(node)
        return node.read_note(key.CURRENT_CONFIG) == name and not node.read_phase()

    restarts = node.restart_count()
    try:
        wait_until(is_there, limit_s=2 * LIMIT_S)
    finally:
        limiter.close()
    node.wait_done(name)
    assert read_names(node) == {name}
    assert node.restart_count() - restarts == len(ended_in)
    return ended_in[0] if ended_in else None


LIMITERS: list[object] = [
    Limiter,
    pytest.param(
        Killer,
        marks=pytest.mark.skipif(
            not (CGROUPS / "cgroup.procs").exists(), reason="no memory controller of cgroup v1"
        ),
    ),
]
FREE_KIB = (100, *range(1_000, 10_000, 1_000))
WRITTEN = (1, 3, 5, 7, 9, 11)


@pytest.mark.parametrize("kind", LIMITERS)
def test_update_without_memory_is_completed(node: SandboxedNode, kind: type[Limiter]) -> None:
    tracebacks, limiter = node.count_tracebacks(), kind()
    ends = []
    for free in FREE_KIB:
        name = add_update(node)
        process = find_process(node)
        limiter.limit(process, free * 1024)
        node.request(name)
        ends.append(finish(node, name, process, limiter))
    for count in WRITTEN:
        name = add_update(node)
        process = find_process(node)
        node.request(name)
        wait_until(partial(is_written, node, FILES[count - 1], name), limit_s=LIMIT_S)
        limiter.limit(process, 0)
        ends.append(finish(node, name, process, limiter))
    assert node.count_tracebacks() == tracebacks
    assert {"staging", "applying"} <= set(ends)
    write_record(
        "host",
        what=f"no memory from a point of an update on: {kind.what}, under the shipped unit's "
        "sandbox",
        count=len(ends) - ends.count(None),
        result="files are old or new; the next start completes the update",
        command="make test-long ARGS=tests/system/test_agent_memory.py",
    )


def test_lasting_lack_of_memory_is_reported_until_the_limit_is_raised(node: SandboxedNode) -> None:
    before = add_update(node)
    node.request(before)
    node.wait_done(before)
    tracebacks = node.count_tracebacks()
    # Above what the agent needs at rest, and below what it needs for the update.
    limit = read_size(find_process(node)) + (1 << 20)
    node.install_drop_in(f"{RESTART}LimitAS={limit}\n")
    node.run("systemctl", "restart", "treenail")
    name = add_update(node)
    node.request(name)
    for _ in range(3):
        restarts = node.restart_count()
        wait_until(partial(has_restarted, node, restarts), limit_s=LIMIT_S)
        node.wait_degraded("cannot continue: the agent cannot allocate memory; ", "LimitAS")
        assert read_names(node) == {before}
    assert node.count_tracebacks() == tracebacks
    node.install_drop_in(RESTART)
    node.wait_done(name)
    assert read_names(node) == {name}
    write_record(
        "host",
        what="LimitAS= below the need of an update, under the shipped unit's sandbox",
        count=1,
        result="Degraded with the cause and a remedy at each start, no file changed; without the "
        "limit the next start completes the update",
        command="make test-long ARGS=tests/system/test_agent_memory.py",
    )
