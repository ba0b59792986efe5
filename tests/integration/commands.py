"""Commands, run as a person would, with the packages of this test run."""

import os
import subprocess
import sys

from tests.integration.site import Site

AGENT = "import sys; from treenail.cli.main import main; sys.exit(main())"
LAB = "import sys; from treenail.lab.command import main; sys.exit(main())"
LIMIT_S = 50.0
Ended = subprocess.CompletedProcess[str]


def status(site: Site, *arguments: str) -> Ended:
    """``treenail status`` on the machine."""
    return treenail(site, "status", "--root", str(site.machine.root), *arguments)


def treenail(site: Site, *arguments: str, limit_s: float = LIMIT_S) -> Ended:
    """``treenail`` on the machine's bus."""
    return _run(AGENT, *arguments, limit_s=limit_s, bus=site.machine.address)


def treenail_lab(*arguments: str, limit_s: float = LIMIT_S) -> Ended:
    """``treenail-lab``."""
    return _run(LAB, *arguments, limit_s=limit_s)


def _run(program: str, *arguments: str, limit_s: float, bus: str = "") -> Ended:
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": paths, "DBUS_SYSTEM_BUS_ADDRESS": bus},
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s,
    )
