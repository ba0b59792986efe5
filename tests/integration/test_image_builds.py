"""A lab with a registry: machines pull built images, and Jobs reach the registry only."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drains import Drains
from tests.integration.build_job import BuildJob
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.clocks import SystemClock
from treenail.oci_content import OCI_INDEX
from treenail_lab.cluster import Lab, LabPlan, build_rendered_config
from treenail_lab.image_builds import (
    BASE_REPOSITORY,
    CERTIFICATES,
    LabRegistry,
    find_build_refusal,
)
from treenail_lab.images import ARCHITECTURE
from treenail_lab.lifetime.owner import owner

pytestmark = pytest.mark.integration

BEFORE = "41.20260101"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab of one node with a registry and a Node for builds."""
    why, remedy = find_build_refusal()
    if why:
        pytest.skip(f"{why}: {remedy}")
    plan = LabPlan(nodes=("worker-0",), images=(), registry_version=BEFORE)
    with owner.temporary_directory() as directory, Lab(directory, plan) as found:
        yield found


@pytest.mark.long
def test_machine_of_bootc_boots_the_image_that_a_job_built_and_pushed() -> None:
    plan = LabPlan(
        nodes=("worker-0",),
        images=(),
        registry_version=BEFORE,
        agent_settings='backend = "bootc"\n',
    )
    with owner.temporary_directory() as directory, Lab(directory, plan) as found:
        build_and_boot(found)


def test_machine_boots_the_image_that_a_job_built_and_pushed(lab: Lab) -> None:
    build_and_boot(lab)


def build_and_boot(lab: Lab) -> None:
    """Build an image in a Job, and let the node boot it."""
    registry, machine = lab.registry, lab.machines["worker-0"]
    booted = machine.booted_deployment
    assert booted is not None
    assert booted.digest == registry.installed.digest
    text = "RUN echo built > /etc/built && chmod 640 /etc/built\nCOPY hello /usr/lib/built/\n"
    job = BuildJob(lab, registry, "ok", text)
    job.create()
    assert "Complete" in job.wait_end()
    digest = str(job.read_results()["push"]["digest"])
    image = f"{registry.host}/os/built@{digest}"
    drains = Drains(lab.open_client(lab.server.admin_kubeconfig), SystemClock())
    drains.start()
    try:
        config = lab.add_config(build_rendered_config("rendered-worker-1"))
        lab.request_update("worker-0", config, image)
        wait_until(lambda: lab.read_annotations("worker-0").get(key.STATE) == "Done", limit_s=90)
    finally:
        drains.stop()
    assert lab.read_annotations("worker-0")[key.CURRENT_OS_IMAGE] == image
    now = machine.booted_deployment
    assert now is not None
    assert now.digest == digest
    assert (machine.root / "etc/built").read_text("utf-8") == "built\n"
    assert (machine.root / "etc/built").stat().st_mode & 0o777 == 0o640
    assert (machine.root / "usr/lib/built/hello").read_text("utf-8") == "hello\n"


def push_list(registry: LabRegistry) -> str:
    """Push a manifest list with the base image; return its pull spec by digest."""
    client = registry.open_client()
    try:
        base = client.get_manifest(BASE_REPOSITORY, BEFORE)
        entry = {
            "mediaType": base.media_type,
            "digest": base.digest,
            "size": len(base.content),
            "platform": {"architecture": ARCHITECTURE, "os": "linux"},
        }
        content = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]}
        digest = client.put_manifest(
            BASE_REPOSITORY, "list", OCI_INDEX, json.dumps(content).encode()
        )
    finally:
        client.close()
    return f"{registry.host}/{BASE_REPOSITORY}@{digest}"


def test_builds_of_one_text_have_one_digest_and_a_list_of_manifests_is_a_base(lab: Lab) -> None:
    registry = lab.registry
    text = "RUN echo same > /usr/lib/same\n"
    jobs = [
        BuildJob(lab, registry, "first", text),
        BuildJob(lab, registry, "second", text),
        BuildJob(lab, registry, "list", text, base=push_list(registry)),
    ]
    for job in jobs:
        # Each pod has storage of its own, which is empty.
        job.create()
    for job in jobs:
        assert "Complete" in job.wait_end(), job.read_results()
    first, second, _ = (job.read_results()["push"]["digest"] for job in jobs)
    assert first == second


def test_instruction_that_fails_ends_the_job_at_once(lab: Lab) -> None:
    job = BuildJob(lab, lab.registry, "bad", "RUN true\nRUN echo cause >&2; exit 3\n")
    job.create()
    assert job.wait_end()["Failed"] == "PodFailurePolicy"
    result = job.read_results()["build"]
    assert (result["reason"], result["line"]) == ("InstructionFailed", 2)
    assert "cause" in str(result["message"])


def test_run_reaches_nothing_but_the_registry(lab: Lab) -> None:
    # The shell of the image has no sockets: the names of the interfaces must do.
    job = BuildJob(lab, lab.registry, "net", 'RUN test "$(ls /sys/class/net)" = lo\n')
    job.create()
    assert "Complete" in job.wait_end(), job.read_results()


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
