"""SIGKILL of ``install bootstrap`` around each record of a step: the same cluster, built once.

Registry, buildah, API server and the controller ``install`` are real; a machine asks for its config
all the time.
"""

import json
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.builder.base_image import BUSYBOX
from tests.builder.builds import push_base
from tests.builder.sandboxing import has_namespaces
from tests.installer.asking_machine import AskingMachine
from tests.installer.failures import BrokenSite, take_port
from tests.installer.pool_builds import InstallSite
from tests.installer.processes import make_environment
from tests.installer.test_failed_installs import start_cluster
from tests.records import write_record
from tests.registry.real_registry import RegistryService, lab_registry, needs_docker_registry
from tests.waiting import PATIENCE
from treenail.api.component_names import NAMESPACE
from treenail_lab.lifetime.fork_server import run_process

__all__ = ["lab_registry"]
pytestmark = [pytest.mark.integration, needs_docker_registry]

PROGRAM = "tests.installer.killed_program"
LIMIT_S = 120.0
RUNS = 100
STATE, EVERY = "install.json", ""
Point = tuple[str, int, str]
"""End of the paths that count, number of the write, and ``before`` or ``after`` it."""


def run_bootstrap(site: InstallSite, port: int, point: Point | None = None) -> tuple[int, str]:
    """Run the command, which a point kills; return exit code and log."""
    words = ["install", "bootstrap", f"--dir={site.root}", "--host=127.0.0.1",
             f"--listen=127.0.0.1:{port}", "--registry-listen=127.0.0.1:0",
             "--registry-storage-limit=200Mi", "--stop-when-complete"]  # fmt: skip
    name, number, moment = point or ("no such file", 1, "before")
    done = run_process(
        [sys.executable, "-m", PROGRAM, name, str(number), moment, *words],
        env=make_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S * PATIENCE,
    )
    return done.returncode, done.stderr


def read_result(site: InstallSite) -> dict[str, object]:
    """Return what the cluster has of the installation, without times."""
    build: Any = site.read_object()
    notes = {
        name: value
        for name, value in build["metadata"]["annotations"].items()
        if "report" not in name
    }
    rendered = {
        path.name: path.read_text()
        for folder in (site.directory.machine_pools, site.directory.machine_configs)
        for path in sorted(folder.iterdir())
    }
    image = build["status"]["digestedImagePushSpec"]
    return {"build": build["metadata"]["name"], "image": image, "notes": notes, "files": rendered}


def count_builds(site: InstallSite) -> int:
    """Return the attempts that ran the instructions of the Containerfile."""
    logs = site.directory.logs.glob("builds/master/*/output.log")
    return sum("STEP" in each.read_text() for each in logs)


def list_torn_files(root: Path) -> list[str]:
    """Return the documents of the installation that cannot be read."""
    torn = []
    for path in (root / ".treenail").rglob("*.json"):
        try:
            json.loads(path.read_text())
        except ValueError:
            torn.append(str(path))
    return torn


class KilledInstalls:
    """Installations from equal directories; each in a new cluster."""

    def __init__(self, tmp_path: Path, registry: RegistryService, *, text: str) -> None:
        self._top = tmp_path
        self._registry = registry
        self._base = ""
        self.text = text
        self._runs = 0

    def install(self, *points: Point) -> tuple[dict[str, object], set[str], int, list[int]]:
        """Install, with a kill at each point; return result, configs, builds and exit codes."""
        self._runs += 1
        root = self._top / "cluster"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        install = InstallSite(root, self._registry, final=self._registry.host, namespace=NAMESPACE)
        if not self._base and self.text:
            self._base = push_base(self._registry, self._top)
        elif not self._base:
            install.push_base()
            self._base = install.base
        install.base, install.text = self._base, self.text
        install.write()
        site = BrokenSite(install, has_controller=True)
        with take_port() as port:
            pass
        machine, codes = AskingMachine(install, port), []
        with start_cluster(site, self._top / f"api-{self._runs}"), machine.run():
            for point in points:
                code, log = run_bootstrap(install, port, point)
                assert code in (0, -signal.SIGKILL), f"{point}: {log}"
                codes.append(code)
                assert list_torn_files(root) == [], point
            code, log = run_bootstrap(install, port)
            assert code == 0, f"{points}: {log}"
        shutil.rmtree(self._top / f"api-{self._runs}")
        return read_result(install), machine.configs, count_builds(install), codes


def count_writes(site: InstallSite) -> int:
    """Return the writes of the state of an installation that was not killed: two for each step."""
    steps = json.loads(site.directory.state.read_text())["steps"]
    return 1 + 2 * len(steps)


def list_points(site: InstallSite) -> list[Point]:
    return [
        (STATE, number, moment)
        for number in range(1, count_writes(site) + 1)
        for moment in ("before", "after")
    ]


def draw_write(source: random.Random, last: int) -> Point:
    return EVERY, source.randint(1, last), source.choice(("before", "after"))


def can_build() -> bool:
    return has_namespaces() and BUSYBOX is not None and shutil.which("buildah") is not None


def check_kills(
    installs: KilledInstalls, groups: list[tuple[Point, ...]], expected: dict[str, object]
) -> int:
    """Install with the kills of each group; return the processes that were killed."""
    kills = 0
    for points in groups:
        result, configs, builds, codes = installs.install(*points)
        kills += codes.count(-signal.SIGKILL)
        assert result == expected, points
        assert len(configs) <= 1, points
        if all(name == STATE for name, _, _ in points):
            assert codes == [-signal.SIGKILL] * len(points), points
            assert builds == (1 if installs.text else 0), points
    return kills


@pytest.mark.long
def test_kill_after_the_build_and_before_its_record_builds_nothing_again(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    installs = KilledInstalls(tmp_path, lab_registry, text="")
    _, configs, _, codes = installs.install((STATE, 5, "before"))
    assert codes == [-signal.SIGKILL]
    assert len(configs) <= 1
    log = (tmp_path / "cluster/.treenail/logs/bootstrap.log").read_text()
    assert log.count("built the image of pool master") == 1
    assert "image of pool master is built already" in log


@pytest.mark.long
@pytest.mark.limit(7200)
def test_kill_before_and_after_each_step_ends_in_the_same_cluster(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    text = "FROM configs AS final\nRUN echo built > /usr/lib/built\n" if can_build() else ""
    installs = KilledInstalls(tmp_path, lab_registry, text=text)
    expected, configs, builds, _ = installs.install()
    assert (len(configs), builds) == (1, 1 if text else 0)
    points = list_points(InstallSite(tmp_path / "cluster", lab_registry))
    assert len(points) == 26
    groups: list[tuple[Point, ...]] = [(each,) for each in points]
    kills = check_kills(installs, groups, expected)
    plain = KilledInstalls(tmp_path, lab_registry, text="")
    expected, _, _, _ = plain.install()
    kills += check_kills(plain, groups, expected)
    # Two kills at any write: state, status, configs, certificates, logins, records.
    source = random.Random(17)
    while kills < RUNS:
        pair = (draw_write(source, 70), draw_write(source, 30))
        kills += check_kills(plain, [pair], expected)
    write_record(
        "crash",
        what="SIGKILL of install bootstrap before and after each step and at other writes",
        count=kills,
        result="the same cluster; no second build, no half-written file",
        command="make test-long ARGS=tests/installer/test_killed_bootstrap.py",
    )
