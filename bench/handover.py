"""Benchmark of a hand-over: an image of 1 GB from one docker-registry to another.

It runs only with TREENAIL_BENCH_LARGE=1, and needs docker-registry and skopeo: each run writes 1 GB
three times. ``skopeo copy`` of the same image into an empty registry is measured beside it. Both
registries are those of the bootstrap host, over TLS.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.result import Result
from tests.installer.registries import (
    make_registry,
    open_client,
    write_auth_file,
    write_certificates,
)
from tests.registry.images import make_layer, push_image
from treenail.builder.images.copies import ImageCopier, Place
from treenail.installer.bootstrap.bootstrap_registry import BootstrapRegistry
from treenail_lab.registry.service import find_docker_registry

RATIO = 1.2
PRESENT_S = 1.0
RUNS = 2
LAYERS, LAYER_BYTES = 10, 100_000_000
LIMIT = 4 << 30


def measure(_seconds: float) -> Iterator[Result]:
    """Yield the seconds of both, and of a hand-over whose blobs are present."""
    is_large = os.environ.get("TREENAIL_BENCH_LARGE") == "1"
    if not (is_large and shutil.which("skopeo") and find_docker_registry()):
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with make_registry(root / "source", storage_limit=LIMIT) as source:
            digest = push_large_image(source)
            ours, again, theirs = [], [], []
            for _ in range(RUNS):
                theirs.append(time_copies(root, source, copy_with_skopeo, digest)[0])
                first, second = time_copies(root, source, copy_with_treenail, digest)
                ours.append(first)
                again.append(second)
    yield Result("skopeo copy of 1 GB", "s", min(theirs))
    yield Result("  hand-over", "s", min(ours))
    yield Result("  hand-over / skopeo", "", min(ours) / min(theirs), RATIO)
    yield Result("  hand-over, blobs present", "s", min(again), PRESENT_S)


def push_large_image(registry: BootstrapRegistry) -> str:
    """Push layers that no compression makes smaller; return the digest of the image."""
    layers = (make_layer({"usr/lib/x": os.urandom(LAYER_BYTES)}) for _ in range(LAYERS))
    with open_client(registry, is_push=True) as client:
        return push_image(client, "os/node", "1", layers=layers).digest


def time_copies(
    root: Path,
    source: BootstrapRegistry,
    copy: Callable[[Path, BootstrapRegistry, BootstrapRegistry, str], None],
    digest: str,
) -> tuple[float, float]:
    """Copy twice into an empty registry; return the seconds of both copies."""
    place = root / "target"
    try:
        with make_registry(place, storage_limit=LIMIT) as target:
            times = [time.monotonic()]
            for _ in range(2):
                copy(place, source, target, digest)
                times.append(time.monotonic())
    finally:
        shutil.rmtree(place)
    return times[1] - times[0], times[2] - times[1]


def copy_with_treenail(
    _: Path, source: BootstrapRegistry, target: BootstrapRegistry, digest: str
) -> None:
    with open_client(source, is_push=False) as one, open_client(target, is_push=True) as other:
        ImageCopier(Place(one, "os/node"), Place(other, "os/node")).copy_image(digest)


def copy_with_skopeo(
    place: Path, source: BootstrapRegistry, target: BootstrapRegistry, digest: str
) -> None:
    pull = write_auth_file(place / "pull.json", source.address, source.pull_login)
    push = write_auth_file(place / "push.json", target.push_address, target.push_login)
    command = ["skopeo", "copy", "--all", "--preserve-digests",
               f"--src-authfile={pull}", f"--dest-authfile={push}",
               f"--src-cert-dir={write_certificates(place / 'from', source)}",
               f"--dest-cert-dir={write_certificates(place / 'to', target)}",
               f"docker://{source.address}/os/node@{digest}",
               f"docker://{target.push_address}/os/node:1"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.decode())
