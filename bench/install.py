"""Benchmark of ``treenail-controller install bootstrap``: time until it serves, and memory at rest.

The rendered configs have about 165 KB each, as those of a real cluster. The time begins with the
start of the process and ends with the first config that a machine receives. The image is one layer
on a small base, in docker-registry.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path

from bench.node import read_memory
from bench.result import Result
from tests.installer.directories import make_config, make_pool, write_manifest
from tests.installer.pool_builds import InstallSite
from tests.installer.processes import Bootstrapping, bootstrap
from tests.registry.real_registry import RegistryService
from treenail.api.component_names import NAMESPACE

CONFIG_BYTES = 165_000
FILES = 50
STARTS = 5
LIMIT_S = 60.0
REGISTRY = ("--registry-listen=127.0.0.1:0", "--registry-storage-limit=500Mi")


def measure(seconds: float) -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "stock"
        write_directory(root)
        yield from measure_starts("nothing to build", root, min(seconds, 15.0))
    with tempfile.TemporaryDirectory() as folder, RegistryService() as registry:
        root = Path(folder) / "image"
        site = InstallSite(root, registry, namespace=NAMESPACE)
        site.push_base()
        site.extra = [make_large_config("50-master", "master")]
        site.write()
        yield from measure_starts("image of one layer", root, min(seconds, 15.0), *REGISTRY)


def measure_starts(title: str, root: Path, rest_s: float, *arguments: str) -> Iterator[Result]:
    """Start on the same directory again and again: the first start renders and builds."""
    for name, count in (("first start", 1), ("next start", STARTS)):
        times, work = [], []
        for _ in range(count):
            began = time.monotonic()
            with bootstrap(root, *arguments) as process:
                fetch_config(process)
                times.append(time.monotonic() - began)
                work.append(read_cpu_seconds(process.process.pid))
        limit = None if arguments else 2.0
        yield Result(f"{title}: {name}: served after", "s", min(times), limit)
        # Other programs on the machine change it less.
        yield Result("  CPU time", "s", min(work), limit)
    with bootstrap(root, *arguments) as process:
        fetch_config(process)
        time.sleep(rest_s)
        rss = read_memory(process.process.pid, "Rss")
        yield Result(f"{title}: at rest: RSS", "MiB", rss, 50.0)


def read_cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of its children that ended (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def fetch_config(process: Bootstrapping) -> None:
    def is_served() -> bool:
        return process.log.exists() and "beginning step first-boot" in process.log.read_text()

    wait_until(is_served)
    status, _ = process.fetch()
    if status != HTTPStatus.OK:
        raise RuntimeError(f"no config is served: {status}")


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.01)


def write_directory(root: Path) -> None:
    write_manifest(root, "manifests/pools.yaml", make_pool("master"), make_pool("worker"))
    configs = [make_large_config(f"00-{role}", role) for role in ("master", "worker")]
    write_manifest(root, "manifests/configs.yaml", *configs)


def make_large_config(name: str, role: str) -> dict[str, object]:
    files = [
        {
            "path": f"/etc/bench/{number}",
            "mode": 0o644,
            "contents": {"source": "data:," + f"{number:04d}" * (CONFIG_BYTES // FILES // 4)},
        }
        for number in range(FILES)
    ]
    ignition = {"ignition": {"version": "3.5.0"}, "storage": {"files": files}}
    return make_config(name, role, config=ignition)
