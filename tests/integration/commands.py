"""Commands, run as a user runs them, with the packages of this test run."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.integration.site import Site
from treenail_lab.lifetime.fork_server import LabProcess, run_process
from treenail_lab.lifetime.owner import owner

AGENT = "import sys; from treenail.cli.node.main import main; sys.exit(main())"
LAB = "import sys; from treenail_lab.__main__ import main; sys.exit(main())"
LIMIT_S = 100.0
Completed = subprocess.CompletedProcess[str]


def status(site: Site, *arguments: str) -> Completed:
    """``treenail status`` on the machine."""
    return treenail(site, "status", *arguments)


def treenail(site: Site, command: str, *arguments: str) -> Completed:
    """``treenail`` with a command, on the machine."""
    root = str(site.machine.root)
    return run_process(
        [sys.executable, "-c", AGENT, command, "--root", root, *arguments],
        env=_environment(site.machine.address),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@contextmanager
def running(site: Site, *arguments: str) -> Iterator[None]:
    """Within, ``treenail`` runs on the machine's bus; its output is the machine's agent.log."""
    with site.machine.agent_log.open("ab") as output:
        process = LabProcess(
            [sys.executable, "-c", AGENT, *arguments],
            env=_environment(site.machine.address),
            stdout=output,
            stderr=output,
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def treenail_lab(*arguments: str, limit_s: float = LIMIT_S, path: str = "") -> Completed:
    """``treenail-lab``; ``path`` replaces the directories of programs."""
    return subprocess.run(
        [sys.executable, "-c", LAB, *arguments],
        env=_environment("") | ({"PATH": path} if path else {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s,
    )


def _environment(bus: str) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, sys.path))
    return {
        **os.environ,
        **owner.mark_environment(),
        "PYTHONPATH": paths,
        "DBUS_SYSTEM_BUS_ADDRESS": bus,
    }
