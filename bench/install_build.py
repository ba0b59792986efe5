"""Builds of an installation: the time until an image is in the bootstrap registry.

An image with a Containerfile is measured beside plain ``buildah bud`` and ``buildah push`` into a
bootstrap registry of its own. Every run has a new one, so that nothing is pushed already. Needs
root, buildah, docker-registry and busybox-static; without them there is no result.
"""

import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.build import MIB
from bench.result import Result
from tests.builder.base_image import BUSYBOX
from tests.builder.builds import push_base
from tests.installer.pool_builds import InstallSite, RecordingContext
from tests.installer.registries import make_registry, write_auth_file, write_certificates
from treenail.installer.bootstrap.bootstrap_registry import BootstrapRegistry
from treenail_lab.registry.service import PULLER, RegistryService, find_docker_registry

RUNS = 3
LIMIT = 8 << 30
LAYER_S, RATIO = 2.0, 1.15
LAYERS = 5
# Each run makes other content, as in the benchmark `build`.
TEXT = """FROM configs AS final
RUN (echo {run}; cat /usr/lib/layer-0) | gzip -c > /usr/lib/work-1
RUN echo welcome > /etc/motd
RUN (echo {run}; cat /usr/lib/layer-0) | gzip -c > /usr/lib/work-2; \
    gzip -d -c /usr/lib/work-2 > /usr/lib/made
"""


def measure(_seconds: float) -> Iterator[Result]:
    """Yield the seconds of an image with the config alone, and the ratio with a Containerfile."""
    if os.geteuid() or not (BUSYBOX and shutil.which("buildah") and find_docker_registry()):
        return
    with tempfile.TemporaryDirectory() as folder, RegistryService() as registry:
        directory = Path(folder)
        for size in (20, 200):
            base = push_base(registry, directory, sizes=(size * MIB // LAYERS,) * LAYERS)
            shutil.rmtree(directory / "base-layout")
            found = [build_installed(registry, directory, base, "")[0] for _ in range(RUNS)]
            seconds = min(found)
            target = LAYER_S if size == 20 else None
            yield Result(f"config alone on {size} MB, pushed", "s", seconds, target)
        plain, installed, again, work = [], [], [], []
        for run in range(RUNS):
            text = TEXT.format(run=run)
            begin = read_cpu_seconds()
            plain.append(build_plain(registry, directory, f"FROM {base} AS configs\n{text}"))
            middle = read_cpu_seconds()
            first, second = build_installed(registry, directory, base, text)
            work.append((read_cpu_seconds() - middle) / (middle - begin))
            installed.append(first)
            again.append(second)
        yield Result(f"Containerfile on {size} MB: buildah bud and push", "s", min(plain))
        yield Result("  install", "s", min(installed))
        yield Result("  install / buildah", "", min(installed) / min(plain), RATIO)
        # Other programs on the machine change it less.
        yield Result("  install / buildah, CPU time", "", min(work), RATIO)
        yield Result("  install again, equal inputs", "s", min(again))


def read_cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def build_installed(
    registry: RegistryService, directory: Path, base: str, text: str
) -> tuple[float, float]:
    """Return the seconds of a build, and of a second one with equal inputs."""
    site = InstallSite(directory / "install", registry)
    site.base, site.text = base, text
    site.write()
    try:
        with make_registry(site.root, storage_limit=LIMIT) as bootstrap:
            builder, context = site.make_builder(bootstrap), RecordingContext()
            inputs = site.read_inputs()
            times = [time.monotonic()]
            for _ in range(2):
                builder.build_pool_image(inputs, context)
                times.append(time.monotonic())
        if os.environ.get("TREENAIL_BENCH_LOG"):
            print(site.read_report()["seconds"])
        return times[1] - times[0], times[2] - times[1]
    finally:
        shutil.rmtree(site.root)


def build_plain(registry: RegistryService, directory: Path, text: str) -> float:
    """Build and push by hand; return the seconds."""
    work = directory / "plain"
    work.mkdir()
    try:
        with make_registry(work, storage_limit=LIMIT) as bootstrap:
            return run_buildah(registry, bootstrap, work, text)
    finally:
        shutil.rmtree(work)


def run_buildah(
    registry: RegistryService, bootstrap: BootstrapRegistry, work: Path, text: str
) -> float:
    (work / "Containerfile").write_text(text)
    pull = work / "pull.json"
    pull.write_bytes(registry.make_auth_json(PULLER))
    push = write_auth_file(work / "push.json", bootstrap.push_address, bootstrap.push_login)
    certificates = write_certificates(work / "certs", bootstrap)
    # buildah may leave a mount, which ends with the namespace.
    command = ["unshare", "--mount", "buildah", f"--root={work}/storage", f"--runroot={work}/run",
               "--storage-driver=overlay"]  # fmt: skip
    begin = time.monotonic()
    for arguments in (
        ["bud", "--isolation=chroot", "--timestamp=0", f"--authfile={pull}", "--tag=built",
         f"--cert-dir={registry.ca_file.parent}", f"--file={work}/Containerfile", str(work)],
        ["push", f"--authfile={push}", f"--cert-dir={certificates}", "built",
         f"docker://{bootstrap.push_address}/os/node:1"],
    ):  # fmt: skip
        done = subprocess.run([*command, *arguments], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
    return time.monotonic() - begin
