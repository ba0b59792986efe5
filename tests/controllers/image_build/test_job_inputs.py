"""Inputs of a Job: ConfigMaps that a user may change while it runs, as the kubelet shows them."""

import json
from pathlib import Path

import pytest

from tests.controllers.image_build.site import BuildSite, Json
from tests.controllers.image_build.test_planner import RecordingObjects, make_objects
from tests.fixtures.controllers import CLOCK
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.builder.build_spec import BuildDirectories
from treenail.controllers.image_build import build_planner, job_builder
from treenail.controllers.image_build.cluster_reader import ClusterReader
from treenail.errors import FileError, HostError
from treenail.image.build_inputs import LAYERS
from treenail.kube.resources import CONFIGMAPS, get_object

TEXT = "FROM configs AS final\nCOPY motd /etc/motd\n"


def show_inputs(site: BuildSite, job: Json, directory: Path) -> BuildDirectories:
    """Write the files as the kubelet does; return them with the digest of the Job."""
    pod = job["spec"]["template"]["spec"]
    sources = next(each["projected"]["sources"] for each in pod["volumes"] if "projected" in each)
    for source in sources:
        name, items = source["configMap"]["name"], source["configMap"]["items"]
        data = site.client.get(CONFIGMAPS, name, namespace=site.namespace)["data"]
        for item in items:
            path = directory / "..2026_01_01" / item["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(data[item["key"]])
            link = directory / item["path"]
            link.parent.mkdir(exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(path)
    digests = {
        container["args"][container["args"].index("--inputs-digest") + 1]
        for container in (*pod["initContainers"], *pod["containers"])
    }
    assert len(digests) == 1
    return BuildDirectories(directory, directory.parent / "work", digests.pop())


@pytest.mark.integration
@pytest.mark.parametrize("changed", ["motd", "Containerfile", "build.json", "ca.pem"])
def test_phase_rejects_inputs_that_changed_after_its_job_was_created(
    site: BuildSite, tmp_path: Path, changed: str
) -> None:
    site.put_context("files", {"motd": "first"})
    site.start_pool(TEXT, annotations={"treenail.io/context": "files"})
    with site.controller():
        (job,) = wait_until(site.jobs, limit_s=20)
    directories = show_inputs(site, job, tmp_path / "inputs")
    inputs = directories.read_inputs()
    assert inputs.context == {"motd": b"first"}
    assert inputs.spec.labels["io.treenail.machine-os-config"] == "worker"
    own = f"containerfile-{job['metadata']['labels'][key.IMAGE_BUILD]}"
    name = "files" if changed == "motd" else own
    body = site.client.get(CONFIGMAPS, name, namespace=site.namespace)
    get_object(body, "data")[changed] += " "
    site.client.update(CONFIGMAPS, name, body, namespace=site.namespace)
    with pytest.raises(HostError, match="was changed after the Job was created"):
        show_inputs(site, job, tmp_path / "inputs").read_inputs()


def test_input_without_end_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "Containerfile").symlink_to("/dev/zero")
    with pytest.raises(FileError, match="longer than 1048576 bytes"):
        BuildDirectories(tmp_path, tmp_path).read_inputs()


@pytest.mark.parametrize("option", ["", LAYERS])
def test_cache_belongs_to_one_image_config(option: str) -> None:
    planner = build_planner.BuildPlanner(
        ClusterReader(RecordingObjects(), CLOCK, namespace="builds"),
        options=tuple(filter(None, (option,))),
    )
    settings = job_builder.JobSettings(cache_repository="registry.example.com/os/cache")
    keys, caches = set(), set()
    for name in ("worker", "other"):
        config, pool = make_objects(TEXT.replace("COPY motd /etc/motd", "RUN true"), name=name)
        plan = planner.plan_build(config, pool, frozenset())
        keys.add(plan.systems[0].wanted.share_key)
        body = job_builder.build_input_configmap(
            plan, plan.systems[0], job_builder.BuildReference("build", "1", name), settings
        )
        caches.add(json.loads(get_object(body, "data")["build.json"])["cacheRepository"])
    # Instructions without a cache are shared: nothing of one build is part of another's.
    assert len(keys) == (2 if option else 1)
    assert caches == {f"registry.example.com/os/cache/{name}" for name in ("worker", "other")}
