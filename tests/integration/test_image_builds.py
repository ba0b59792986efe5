"""A lab with a registry: machines pull built images, and Jobs reach the registry only."""

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.drains import Drains
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.clock import SystemClock
from treenail.registry.client import RegistryClient
from treenail.registry.names import OCI_MANIFEST, Descriptor
from treenail.registry.uploads import upload_blob
from treenail_lab.cluster import Lab, LabPlan, build_rendered_config
from treenail_lab.image_builds import BASE_REPOSITORY, CERTIFICATES, LabRegistry
from treenail_lab.lifetime.owner import owner

pytestmark = pytest.mark.integration

BEFORE, AFTER = "41.20260101", "42.20260601"


def push_derived(registry: LabRegistry, files: dict[str, bytes]) -> str:
    """Push the base image with one more layer; return the pull spec by digest."""
    unpacked = io.BytesIO()
    with tarfile.open(fileobj=unpacked, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o640
            archive.addfile(member, io.BytesIO(content))
    layer = gzip.compress(unpacked.getvalue(), mtime=0)
    client = registry.open_client()
    try:
        base = client.get_manifest(BASE_REPOSITORY, BEFORE)
        manifest = json.loads(base.content)
        config = json.loads(registry.installed.configuration)
        config["config"]["Labels"]["org.opencontainers.image.version"] = AFTER
        config["rootfs"]["diff_ids"].append(digest(unpacked.getvalue()))
        manifest["layers"].append(push(client, layer, "layer.v1.tar+gzip"))
        manifest["config"] = push(client, json.dumps(config).encode(), "config.v1+json")
        content = json.dumps(manifest).encode()
        client.put_manifest(BASE_REPOSITORY, "derived", OCI_MANIFEST, content)
    finally:
        client.close()
    return f"{registry.host}/{BASE_REPOSITORY}@{digest(content)}"


def push(client: RegistryClient, content: bytes, kind: str) -> dict[str, object]:
    media_type = f"application/vnd.oci.image.{kind}"
    blob = Descriptor(media_type, digest(content), len(content))
    upload_blob(client, BASE_REPOSITORY, blob, lambda: io.BytesIO(content))
    return {"mediaType": media_type, "digest": blob.digest, "size": blob.size}


def digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


@pytest.mark.limit(120)
def test_machine_boots_the_image_that_the_registry_has() -> None:
    plan = LabPlan(nodes=("worker-0",), images=(), registry_version=BEFORE)
    with owner.temporary_directory() as directory, Lab(directory, plan) as lab:
        machine = lab.machines["worker-0"]
        assert lab.registry is not None
        drains = Drains(lab.open_client(lab.server.admin_kubeconfig), SystemClock())
        drains.start()
        booted = machine.booted_deployment
        assert booted is not None
        assert booted.digest == lab.registry.installed.digest
        assert (machine.root / "usr/lib/os-release").exists()
        image = push_derived(lab.registry, {"etc/built": b"yes", "usr/lib/built/data": b"\0\1"})
        config = lab.add_config(build_rendered_config("rendered-worker-1"))
        lab.request_update("worker-0", config, image)
        try:
            wait_until(lambda: is_booted(lab, image), limit_s=60)
            wait_until(lambda: lab.read_annotations("worker-0")[key.STATE] == "Done", limit_s=60)
        finally:
            drains.stop()
        assert lab.read_annotations("worker-0")[key.CURRENT_OS_IMAGE] == image
        root: Path = machine.root
        assert (root / "etc/built").read_bytes() == b"yes"
        assert (root / "etc/built").stat().st_mode & 0o777 == 0o640
        assert (root / "usr/lib/built/data").read_bytes() == b"\0\1"


def is_booted(lab: Lab, image: str) -> bool:
    found = lab.machines["worker-0"].booted_deployment
    return found is not None and image.endswith(found.digest)


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")
def test_skopeo_reads_the_registry_with_its_login_and_certificate(tmp_path: Path) -> None:
    with LabRegistry(tmp_path, BEFORE) as registry:
        login = tmp_path / "login.json"
        login.write_bytes(registry.pull_login)
        certificates = tmp_path / CERTIFICATES / registry.host
        name = f"docker://{registry.host}/{BASE_REPOSITORY}:{BEFORE}"
        options = ("--authfile", str(login), "--cert-dir", str(certificates))
        completed = subprocess.run(
            ["skopeo", "inspect", *options, name],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert completed.returncode == 0, completed.stderr
        assert json.loads(completed.stdout)["Digest"] == registry.installed.digest
