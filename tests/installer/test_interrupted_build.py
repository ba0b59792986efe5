"""Builds that are killed, and what the next run uses again."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builder.base_image import needs_busybox
from tests.builder.builds import push_base
from tests.builder.sandboxing import needs_buildah
from tests.installer.pool_builds import InstallSite
from tests.installer.registries import make_registry, open_client
from tests.registry.images import make_client, make_layer, push_image
from tests.registry.real_registry import RegistryService, lab_registry, needs_docker_registry
from tests.waiting import wait_until
from treenail_lab.lifetime.fork_server import LabProcess

__all__ = ["lab_registry"]
pytestmark = [pytest.mark.integration, needs_docker_registry]
LONG_TEXT = "FROM configs AS final\nRUN echo began; {pause}; echo built > /usr/lib/built\n"
MIB = 1024 * 1024


def kill_build(site: InstallSite, is_due: Callable[[], object]) -> None:
    """Build in a process of its own, and kill that process when ``is_due``."""
    command = [sys.executable, "-m", "tests.installer.build_program", str(site.root)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with LabProcess(command, env=environ, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: is_due() or process.poll() is not None, limit_s=60.0)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL


def read_output(site: InstallSite) -> str:
    path = site.directory.get_build_logs("master", 1) / "output.log"
    return path.read_text() if path.exists() else ""


def list_blob_pulls(registry: RegistryService) -> list[str]:
    """Return the pulls of layers of the base; its config is read each time."""
    return [
        path
        for method, path, status in registry.front.requests
        if method == "GET" and "/os/base/blobs/" in path and status == 200
    ]


@needs_buildah
@needs_busybox
@pytest.mark.parametrize("phase", ["build", "push"])
def test_killed_build_leaves_pulled_and_built_layers_to_the_next_run(
    tmp_path: Path, lab_registry: RegistryService, phase: str
) -> None:
    site = InstallSite(tmp_path / "install", lab_registry)
    site.base = push_base(lab_registry, tmp_path, sizes=(8 * MIB,))
    site.text = LONG_TEXT.format(pause="sleep 2" if phase == "build" else "true")
    site.write()
    kept = site.directory.builds / "named-master-amd64"
    if phase == "build":
        kill_build(site, lambda: "began" in read_output(site).replace("echo began", ""))
    else:
        kill_build(site, (kept / "build.json").exists)
    assert (kept / "work/layout").exists()
    before = len(list_blob_pulls(lab_registry))
    assert before >= 2
    with make_registry(site.root) as registry:
        image = site.build(registry)
        with open_client(registry, is_push=False) as client:
            assert client.head_manifest("os/node", image.digest) is not None
    # The base's config alone, for the config layer and for the pull; no layer.
    assert len(set(list_blob_pulls(lab_registry)[before:])) <= 1
    attempts = sorted(path.name for path in kept.parent.parent.glob("logs/builds/master/*"))
    assert attempts == ["attempt-1", "attempt-2"]
    output = (site.directory.get_build_logs("master", 2) / "output.log").read_text()
    assert ("STEP" in output) == (phase == "build")
    assert not kept.exists()


def test_registry_killed_during_a_push_is_started_again_and_the_push_succeeds(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = InstallSite(tmp_path / "install", lab_registry)
    client = make_client(lab_registry)
    layers = [make_layer({f"usr/lib/{each}": os.urandom(8 * MIB)}) for each in range(4)]
    base = push_image(client, "os/base", layers=layers)
    client.close()
    site.base = f"{lab_registry.host}/os/base@{base.digest}"
    site.write()
    with make_registry(site.root, storage_limit=256 * MIB) as registry:
        uploads = registry.storage / "docker/registry/v2/repositories/os/node/_uploads"

        first = registry.pids[1]
        assert first is not None

        def kill_registry() -> None:
            wait_until(lambda: uploads.exists() and any(uploads.iterdir()), limit_s=30.0)
            os.kill(first, signal.SIGKILL)

        killer = threading.Thread(target=kill_registry)
        killer.start()
        image = site.build(registry)
        killer.join()
        assert registry.pids[1] != first
        with open_client(registry, is_push=False) as pulling:
            assert pulling.head_manifest("os/node", image.digest) is not None
    assert len(list(site.directory.logs.glob("builds/master/*"))) == 1


@needs_buildah
@needs_busybox
@pytest.mark.parametrize("phase", ["build", "push"])
def test_layer_that_a_power_cut_damaged_is_built_again(
    tmp_path: Path, lab_registry: RegistryService, phase: str
) -> None:
    site = InstallSite(tmp_path / "install", lab_registry)
    site.base = push_base(lab_registry, tmp_path)
    site.text = LONG_TEXT.format(pause="sleep 2" if phase == "build" else "true")
    site.write()
    kept = site.directory.builds / "named-master-amd64"
    if phase == "build":
        kill_build(site, lambda: "began" in read_output(site).replace("echo began", ""))
    else:
        kill_build(site, (kept / "build.json").exists)
    for blob in (kept / "work/layout/blobs/sha256").iterdir():
        if blob.stat().st_size > 2000 or blob.read_bytes()[:2] == b"\x1f\x8b":
            os.truncate(blob, blob.stat().st_size // 2)
    with make_registry(site.root) as registry:
        image = site.build(registry)
        with open_client(registry, is_push=False) as client:
            assert client.head_manifest("os/node", image.digest) is not None
    assert len(list(site.directory.logs.glob("builds/master/*"))) == 2
