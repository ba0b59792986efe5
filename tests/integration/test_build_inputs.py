"""Entitlements and the cache of builds, from the controller to the registry of a lab."""

import base64
import gzip
import io
import json
import tarfile
from collections.abc import Iterator

import pytest

from tests.waiting import wait_until
from treenail.api.machineosbuild import BuildState, MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.kube.api_client import Json
from treenail.kube.resources import (
    CONFIGMAPS,
    EVENTS,
    JOBS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    PODS,
    SECRETS,
)
from treenail.manifests.installation import InstallOptions
from treenail.registry.client import RegistryClient
from treenail.registry.names import parse_descriptor
from treenail_lab.cluster import Lab, LabPlan
from treenail_lab.controllers import QUICK_OPTIONS, ControllerReplicas
from treenail_lab.demo import pool
from treenail_lab.demo.pool import DemoBuild
from treenail_lab.image_builds import find_build_refusal
from treenail_lab.lifetime.owner import owner

pytestmark = pytest.mark.integration

NAMESPACE = InstallOptions().namespace
CACHE = "os/cache"
OWN_CACHE = f"{CACHE}/worker"
REPOSITORY = "os/node"
ENTITLEMENT = "entitlement-5d1c0ffee5"
KEY, REPO = "gpg-key-5d1c0ffee5", "repository-5d1c0ffee5"
TEXT = """\
FROM configs AS final
RUN cat /proc/sys/kernel/random/uuid > /usr/lib/once
RUN cat /etc/pki/entitlement/key.pem /etc/pki/rpm-gpg/key /etc/yum.repos.d/site.repo > /dev/null
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab whose builds have a cache in the registry and all entitlements."""
    why, remedy = find_build_refusal()
    if why:
        pytest.skip(f"{why}: {remedy}")
    plan = LabPlan(nodes=("worker-0",), images=(), registry_version="41.20260101")
    with owner.temporary_directory() as directory, Lab(directory, plan) as found:
        options = (*QUICK_OPTIONS, f"--build-cache={found.registry.host}/{CACHE}")
        controllers = ControllerReplicas(found, enable=("render", "build"), arguments=options)
        controllers.create_manifests()
        create_entitlements(found)
        pool.create_pool_without_image(found, found.registry.installed.pull_spec)
        build = DemoBuild(found, found.registry, TEXT)
        build.create_inputs()
        build.request_build()
        controllers.start_replica()
        try:
            yield found
        finally:
            controllers.stop()


def create_entitlements(lab: Lab) -> None:
    for resource, name, file, content in (
        (SECRETS, "etc-pki-entitlement-worker", "key.pem", ENTITLEMENT),
        (SECRETS, "etc-pki-rpm-gpg", "key", KEY),
        (CONFIGMAPS, "etc-yum-repos-d", "site.repo", REPO),
    ):
        data = "stringData" if resource is SECRETS else "data"
        body: Json = {"metadata": {"name": name}, data: {file: content}}
        lab.client.create(resource, body, namespace=NAMESPACE)


def wait_image(lab: Lab, before: str = "") -> str:
    """The image of the present build, which must succeed; ``before`` does not count."""

    def read() -> str:
        config = MachineOSConfig.from_json(lab.client.get(MACHINEOSCONFIGS, "worker"))
        assert config.problem == "" or "wait for the render controller" in config.problem
        if not config.current_build:
            return ""
        build = MachineOSBuild.from_json(lab.client.get(MACHINEOSBUILDS, config.current_build))
        assert build.state is not BuildState.FAILED, build.message
        is_ready = build.state is BuildState.SUCCEEDED and build.pull_spec == config.pull_spec
        return config.pull_spec if is_ready and config.pull_spec != before else ""

    return wait_until(read, limit_s=120)


def read_blob(client: RegistryClient, repository: str, descriptor: Json) -> bytes:
    found = bytearray()
    client.read_blob(repository, parse_descriptor(descriptor, where="blob"), found.extend)
    return bytes(found)


def read_file(client: RegistryClient, digest: str, name: str) -> str:
    """Content of a file in the last layer that has it."""
    found = ""
    for descriptor in json.loads(client.get_manifest(REPOSITORY, digest).content)["layers"]:
        layer = read_blob(client, REPOSITORY, descriptor)
        with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
            if name in archive.getnames():
                file = archive.extractfile(name)
                assert file is not None
                found = file.read().decode()
    return found


def iter_contents(client: RegistryClient, repository: str) -> Iterator[bytes]:
    """Every manifest and blob of a repository, unpacked."""
    waiting = [*client.list_tags(repository)]
    while waiting:
        manifest = client.get_manifest(repository, waiting.pop())
        yield manifest.content
        document = json.loads(manifest.content)
        waiting += [each["digest"] for each in document.get("manifests", [])]
        for each in [*document.get("layers", []), document.get("config")]:
            if each is not None:
                blob = read_blob(client, repository, each)
                yield gzip.decompress(blob) if blob.startswith(b"\x1f\x8b") else blob


def test_build_has_entitlements_and_no_blob_or_object_contains_them(lab: Lab) -> None:
    wait_image(lab)
    client = lab.registry.open_client()
    try:
        for repository in (REPOSITORY, OWN_CACHE):
            contents = [*iter_contents(client, repository)]
            # What the text has written is found, so the search sees all layers.
            assert any(b"usr/lib/once" in each for each in contents), repository
            for secret in (ENTITLEMENT, KEY, REPO):
                assert not any(secret.encode() in each for each in contents), repository
    finally:
        client.close()
    for resource in (MACHINEOSBUILDS, MACHINEOSCONFIGS, JOBS, PODS, CONFIGMAPS, EVENTS):
        for found in lab.client.list(resource).items:
            text = json.dumps(found)
            assert ENTITLEMENT not in text
            assert KEY not in text
            assert REPO not in text or "etc-yum-repos-d" in text
    assert lab.builder is not None
    for path in lab.builder.log_directory.rglob("*"):
        if path.is_file():
            assert ENTITLEMENT not in path.read_text("utf-8", "replace"), path


def test_second_build_takes_instructions_from_the_cache_in_the_registry(lab: Lab) -> None:
    first = wait_image(lab)
    content: Json = {
        "containerfileArch": "NoArch",
        "content": f"{TEXT}RUN echo second > /usr/lib/second\n",
    }
    lab.client.patch(MACHINEOSCONFIGS, "worker", {"spec": {"containerFile": [content]}})
    second = wait_image(lab, before=first)
    client = lab.registry.open_client()
    try:
        once = [
            read_file(client, image.partition("@")[2], "usr/lib/once") for image in (first, second)
        ]
        assert once[0] == once[1] != ""
        digest = second.partition("@")[2]
        assert read_file(client, digest, "usr/lib/second") == "second\n"
    finally:
        client.close()


def test_instruction_of_a_job_has_a_root_of_its_own_and_finds_no_login(lab: Lab) -> None:
    before = wait_image(lab)
    logins = [
        entry["auth"]
        for login in (lab.registry.push_login, lab.registry.pull_login)
        for entry in json.loads(login)["auths"].values()
    ]
    logins += [base64.b64decode(login).decode().partition(":")[2] for login in logins]
    patterns = " ".join(f"{text[:6]} {text[6:]}" for text in logins)
    text = f"""FROM configs AS way
RUN ln -s / /dat
FROM configs AS final
RUN --mount=type=bind,from=way,source=/dat,target=/out,rw \\
  printf '%s%s\\n' {patterns} > /patterns; echo result $(ls /out); \\
  for f in $(busybox grep -rlFf /patterns /out/tmp /out/etc /out/run /out/var /out/build-work \\
    /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2> /dev/null); do \\
  case $f in */patterns) ;; *) echo result login in $f;; esac; done; \\
  read a b c < /proc/self/uid_map; echo result $a $b $c
"""
    content: Json = {"containerfileArch": "NoArch", "content": text}
    lab.client.patch(MACHINEOSCONFIGS, "worker", {"spec": {"containerFile": [content]}})
    wait_image(lab, before=before)
    assert lab.builder is not None
    lines = [
        line
        for path in lab.builder.log_directory.rglob("build.log")
        for line in path.read_text().splitlines()
        if line.startswith("result ")
    ]
    assert len(lines) == 2, lines
    shown = set(lines[0].split()[1:])
    assert "build-work" in shown
    assert not {"build-inputs", "build-secrets", "root", "home"} & shown
    assert lines[1] == f"result 0 {0x7F000000} 65536"
