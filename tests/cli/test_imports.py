"""The modules that a resting agent and short commands must not load: each costs memory or time.

Measure a module before it is allowed: ``make bench ARGS="imports node"``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import treenail

pytestmark = pytest.mark.process

D_BUS = {"gi", "pydbus", "xml", "optparse"}
HTTP_CLIENTS = {"kubernetes", "urllib3", "http", "email", "requests", "asyncio"}
OTHERS = {"yaml", "tenacity", "multiprocessing", "concurrent", "pickle", "unittest", "rich"}
CONTROLLERS = {"treenail.controllers", "treenail.builder", "treenail.registry", "treenail.image"}

FORBIDDEN = {
    "treenail.cli.node.run": D_BUS | HTTP_CLIENTS | OTHERS | CONTROLLERS,
    "treenail.cli.node.drift": D_BUS
    | HTTP_CLIENTS
    | OTHERS
    | CONTROLLERS
    | {"datetime", "shutil", "ssl", "_ssl", "treenail.kube", "treenail.update.impact.os_change"},
    "treenail.cli.node.status": D_BUS
    | HTTP_CLIENTS
    | OTHERS
    | CONTROLLERS
    | {
        "datetime",
        "shutil",
        "ssl",
        "_ssl",
        "_hashlib",
        "treenail.kube",
        "treenail.config",
        "treenail.daemon",
    },
    "treenail.cli.node.history": D_BUS
    | HTTP_CLIENTS
    | OTHERS
    | CONTROLLERS
    | {
        "datetime",
        "shutil",
        "ssl",
        "_ssl",
        "_hashlib",
        "treenail.kube",
        "treenail.config",
        "treenail.daemon",
    },
}


@pytest.mark.parametrize("module", FORBIDDEN)
def test_command_loads_no_module_that_costs_too_much(module: str) -> None:
    loaded = load(
        f"import treenail.cli.node.main, treenail.cli.node.main, {module}\n"
        "treenail.cli.node.main.create_parser()"
    )
    assert {name for name in FORBIDDEN[module] if name in loaded} == set()


def test_reading_deployments_loads_no_config_and_no_tls() -> None:
    loaded = load("import treenail.cli.node.status, treenail.cli.node.backend")
    forbidden = {"ssl", "_ssl", "treenail.config", "treenail.kube", "treenail.update.drift"}
    assert forbidden & loaded == set()


def test_comparing_contents_loads_no_patterns_of_secrets() -> None:
    loaded = load(
        "from treenail.observations import EntryKind, PathEntry\n"
        "from treenail.config.drift_comparison import ExpectedEntry, compare_entry\n"
        "entry = ExpectedEntry('/etc/a', EntryKind.FILE, 'new', 0o644)\n"
        "assert compare_entry(entry, PathEntry(EntryKind.FILE, mode=0o644))"
    )
    assert "treenail.config.redact" not in loaded


def test_connecting_to_the_bus_in_another_process_loads_no_gi() -> None:
    loaded = load(
        "import os, treenail.host.machine\n"
        "from treenail.host.systemd.system_bus import SystemBus\n"
        "from treenail.host.systemd.bus_process import BusProcess\n"
        "process = BusProcess(os.environ)\n"
        "SystemBus(service=process)\n"
        "process.start()\n"
        "process.close_connection()"
    )
    assert D_BUS & loaded == set()


def test_load_modules_collects_no_garbage() -> None:
    printed = run_program(
        "import gc\n"
        "from treenail.memory import load_modules\n"
        "phases = []\n"
        "gc.callbacks.append(lambda phase, info: phases.append(phase))\n"
        "gc.set_threshold(1)\n"
        "with load_modules():\n"
        "    phases.clear()\n"
        "    made = [[] for _ in range(1000)]\n"
        "    count = len(phases)\n"
        "print(count, gc.isenabled())"
    )
    assert printed.split() == ["0", "True"]


def test_modules_of_a_command_are_excluded_from_collections(tmp_path: Path) -> None:
    printed = run_program(
        "import gc, sys\n"
        "from treenail.cli.entry import run_treenail\n"
        f"sys.argv = ['treenail', 'drift', '--root', {str(tmp_path)!r}]\n"
        "run_treenail()\n"
        "import treenail.cli.node.drift as drift, treenail.cli.node.main as main\n"
        "collected = {id(each) for each in gc.get_objects()}\n"
        "print(id(vars(drift)) in collected, id(vars(main)) in collected)"
    )
    assert printed.split() == ["False", "False"]


def load(statements: str) -> set[str]:
    """Return the modules after the statements, in an interpreter without site."""
    return set(run_program(f"{statements}\nimport sys\nprint(*sys.modules)").split())


def run_program(program: str) -> str:
    """Run the program in an interpreter without site; return its output."""
    folder = str(Path(str(treenail.__file__)).parents[1])
    path = os.pathsep.join([folder, *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout
