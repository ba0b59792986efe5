"""Image builds: the three phases, beside plain ``buildah bud`` and ``buildah push``.

Needs root, buildah, docker-registry and busybox-static; without them there is no result. All values
are ratios within one run, on the same base and text.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.result import Result
from tests.builder.base_image import BUSYBOX
from tests.builder.builds import make_builder, make_spec, push_base, run_phases
from treenail.builder.local import BuildFiles
from treenail_lab.registry.service import PUSHER, RegistryService

MIB = 1024 * 1024
LAYERS = 5
RUNS = 2
# Each RUN compresses a file of the base, as work that makes content. Each run makes another one:
# buildah and the registry remember the layers that they have seen, and would upload none.
TEXT = """RUN (echo {run}; cat /usr/lib/layer-0) | gzip -c > /usr/lib/work-1
FROM configs AS final
COPY motd /etc/motd
RUN (echo {run}; cat /usr/lib/layer-0) | gzip -c > /usr/lib/work-2; \
    gzip -d -c /usr/lib/work-2 > /usr/lib/made
"""


def measure(_seconds: float) -> Iterator[Result]:
    """Yield the ratios for a base of 200 MB, and of 1 GB where there is space."""
    if os.geteuid() or BUSYBOX is None or shutil.which("buildah") is None:
        return
    sizes = [200, 1000] if shutil.disk_usage(tempfile.gettempdir()).free > 12_000 * MIB else [200]
    for size in sizes:
        with tempfile.TemporaryDirectory() as directory, RegistryService() as registry:
            yield from measure_base(registry, Path(directory), size)


def measure_base(registry: RegistryService, directory: Path, size: int) -> Iterator[Result]:
    base = push_base(registry, directory, sizes=(size * MIB // LAYERS,) * LAYERS)
    shutil.rmtree(directory / "base-layout")
    context = directory / "context"
    context.mkdir()
    (context / "motd").write_text("welcome\n")
    plain, cold, warm = [], [], []
    storage = 0
    text = ""
    for run in range(RUNS):
        text = f"FROM {base} AS configs\n{TEXT.format(run=run)}"
        seconds, _ = build_plain(registry, directory, text, context, "overlay")
        plain.append(seconds)
        cold.append(build_in_phases(registry, directory, text, context, "")[0])
        cache = f"{registry.host}/os/cache-{run}"
        build_in_phases(registry, directory, text, context, cache)
        seconds, storage = build_in_phases(registry, directory, text, context, cache)
        warm.append(seconds)
    _, vfs = build_plain(registry, directory, text, context, "vfs")
    name = f"build on {size} MB"
    yield Result(f"{name}: plain buildah bud and push", "s", min(plain))
    yield Result(f"{name}: cold build", "s", min(cold))
    yield Result(f"{name}: cold build / plain", "", min(cold) / min(plain), 1.15)
    yield Result(f"{name}: with cache / cold build", "", min(warm) / min(cold), 0.7)
    yield Result(f"{name}: storage / vfs", "", storage / vfs, 0.4)


def build_in_phases(
    registry: RegistryService, directory: Path, text: str, context: Path, cache: str
) -> tuple[float, int]:
    """Build once; return the seconds, and the bytes of the storage and the layout."""
    lines: list[str] = []
    builder = make_builder(registry, directory, lines)
    files = BuildFiles({each.name: each.read_bytes() for each in context.iterdir()})
    with builder.open_build(text, make_spec(registry, cache_repository=cache), files) as build:
        begin = time.monotonic()
        result = run_phases(build)
        seconds = time.monotonic() - begin
        assert result.has_succeeded, result.message
        if os.environ.get("TREENAIL_BENCH_LOG"):
            print(*lines, sep="\n")
        return seconds, measure_bytes(build.directories.work)


def build_plain(
    registry: RegistryService, directory: Path, text: str, context: Path, driver: str
) -> tuple[float, int]:
    work = directory / "plain"
    work.mkdir()
    (work / "Containerfile").write_text(text)
    auth = work / "auth.json"
    auth.write_bytes(registry.make_auth_json(PUSHER))
    command = ["buildah", f"--root={work}/storage", f"--runroot={work}/run",
               f"--storage-driver={driver}"]  # fmt: skip
    access = [f"--authfile={auth}", f"--cert-dir={registry.ca_file.parent}"]
    begin = time.monotonic()
    run([*command, "bud", "--isolation=chroot", "--timestamp=0", *access, "--tag=built",
         f"--file={work}/Containerfile", str(context)])  # fmt: skip
    run([*command, "push", *access, "built", f"docker://{registry.host}/os/plain:1"])
    seconds = time.monotonic() - begin
    used = measure_bytes(work)
    shutil.rmtree(work)
    return seconds, used


def run(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def measure_bytes(directory: Path) -> int:
    """Count the bytes on disk, as du(1) does."""
    done = subprocess.run(["du", "-s", "-B1", directory], capture_output=True, check=True)
    return int(done.stdout.split()[0])
