"""The pod of a build ends in each phase: one image, one current build, never two Jobs at once."""

from collections.abc import Callable, Iterator

import pytest

from tests.waiting import wait_until
from treenail.api.machineosbuild import BuildState, MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.kube.api_client import Json
from treenail.kube.resources import JOBS, MACHINEOSBUILDS, MACHINEOSCONFIGS, PODS
from treenail.manifests.installation import InstallOptions
from treenail_lab.apiserver.objects import Json as Document
from treenail_lab.apiserver.schema.kinds import StorageKey
from treenail_lab.apiserver.store import StoreEvent
from treenail_lab.cluster import Lab, LabPlan
from treenail_lab.controllers import ControllerReplicas
from treenail_lab.demo import pool
from treenail_lab.demo.pool import CONTAINERFILE, DemoBuild
from treenail_lab.image_builds import LabRegistry, find_build_refusal
from treenail_lab.lifetime.owner import owner
from treenail_lab.registry.front import FaultKind, RegistryFault

pytestmark = [pytest.mark.integration]

NAMESPACE = InstallOptions().namespace
REPOSITORY = "os/node"
# Counts for a few seconds: the shell of the image has no program that waits.
BUSY = "RUN echo begin; i=0; while [ $i -lt 2000000 ]; do i=$((i+1)); done"
HELD: dict[str, tuple[str, RegistryFault | None]] = {
    "fetch": ("fetch", RegistryFault(FaultKind.HANG, "GET", "/os/base/blobs/")),
    "build": ("build", None),
    "upload": ("push", RegistryFault(FaultKind.HANG, "PATCH|PUT", "/os/node/blobs/")),
    "manifest": ("push", RegistryFault(FaultKind.HANG, "PUT", "/os/node/manifests/")),
}
"""By moment: the container that runs then, and the request that never gets an answer."""


class JobCensus:
    """Counts the unfinished Jobs at each change."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.most = 0
        self._active: set[str] = set()

    def see(self, storage: StorageKey, event: StoreEvent) -> None:
        if storage != ("batch", "jobs"):
            return
        name = str(event.object["metadata"]["name"])
        self.names.add(name)
        if event.type == "DELETED" or has_ended(event.object):
            self._active.discard(name)
        else:
            self._active.add(name)
        self.most = max(self.most, len(self._active))


def has_ended(job: Document) -> bool:
    conditions = (job.get("status") or {}).get("conditions") or ()
    return any(each["type"] in {"Complete", "Failed"} for each in conditions)


class KilledBuilds:
    """A pool whose images are built but not rolled out, and means to end a pod."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.client = lab, lab.client
        self.census = JobCensus()
        assert lab.registry is not None
        assert lab.builder is not None
        self.registry: LabRegistry = lab.registry
        self.builder = lab.builder

    def request(self, text: str) -> str:
        """Request the build of a text; return the name of its MachineOSBuild."""
        before = self.read_config().current_build
        self.census = JobCensus()
        self.lab.server.call_api(lambda api: api.store.add_listener(self.census.see))
        content: Json = {"containerfileArch": "NoArch", "content": text}
        body: Json = {"spec": {"containerFile": [content]}}
        self.client.patch(MACHINEOSCONFIGS, "worker", body)
        wait_until(lambda: self.read_config().current_build not in ("", before), limit_s=60)
        return self.read_config().current_build

    def read_config(self) -> MachineOSConfig:
        return MachineOSConfig.from_json(self.client.get(MACHINEOSCONFIGS, "worker"))

    def read_build(self, name: str) -> MachineOSBuild:
        return MachineOSBuild.from_json(self.client.get(MACHINEOSBUILDS, name))

    def wait_pod(self, container: str) -> Document:
        """Wait until a container runs; return its pod."""

        def find() -> Document | None:
            for pod in self.client.list(PODS, namespace=NAMESPACE).items:
                status: Document = pod.get("status") or {}  # type: ignore[assignment]
                for kind in ("initContainerStatuses", "containerStatuses"):
                    for each in status.get(kind) or ():
                        if each["name"] == container and "running" in each["state"]:
                            return pod
            return None

        found = wait_until(find, limit_s=60)
        assert found is not None
        return found

    def wait_output(self, pod: Document, container: str, text: str) -> None:
        """Wait until the log of a container has a text."""
        name = pod["metadata"]["name"]
        log = self.builder.log_directory / NAMESPACE / name / f"{container}.log"
        wait_until(lambda: log.exists() and text in log.read_text("utf-8", "replace"), limit_s=60)

    def delete_pod(self, pod: Document, _container: str) -> None:
        """Delete a pod as ``kubectl delete pod --force`` does."""
        name = pod["metadata"]["name"]
        self.client.delete(PODS, name, namespace=NAMESPACE, grace_s=0)

    def kill_container(self, pod: Document, container: str) -> None:
        assert self.builder.kill_container(pod["metadata"]["uid"], container)

    def list_digests(self, prefix: str) -> set[str]:
        """Digests of the tags in the repository that begin with the text."""
        client = self.registry.open_client()
        try:
            tags = [each for each in client.list_tags(REPOSITORY) if each.startswith(prefix)]
            return {client.get_manifest(REPOSITORY, tag).digest for tag in tags}
        finally:
            client.close()


@pytest.fixture(scope="module")
def builds() -> Iterator[KilledBuilds]:
    why, remedy = find_build_refusal()
    if why:
        pytest.skip(f"{why}: {remedy}")
    plan = LabPlan(nodes=("worker-0",), images=(), registry_version="41.20260101")
    with owner.temporary_directory() as directory, Lab(directory, plan) as lab:
        controllers = ControllerReplicas(lab, enable=("render", "build"))
        controllers.create_manifests()
        controllers.start_replica()
        try:
            found = KilledBuilds(lab)
            pool.create_pool_without_image(lab, found.registry.installed.pull_spec)
            build = DemoBuild(lab, found.registry, CONTAINERFILE)
            build.create_inputs()
            build.request_build()
            wait_until(lambda: found.read_config().pull_spec, limit_s=120)
            yield found
        finally:
            controllers.stop()


def end_pod(
    builds: KilledBuilds, moment: str, end: Callable[[Document, str], None], number: str
) -> None:
    """End the pod of a build at a moment; the build must succeed nevertheless."""
    container, fault = HELD[moment]
    before = builds.list_digests("system-")
    if fault is not None:
        builds.registry.service.faults.add(fault)
    run = BUSY if fault is None else "RUN true"
    name = builds.request(f"FROM configs AS final\n{run}\nLABEL n={number}\n")
    pod = builds.wait_pod(container)
    if fault is None:
        builds.wait_output(pod, container, "begin")
    else:
        wait_until(lambda: builds.registry.service.faults.is_empty, limit_s=60)
    end(pod, container)
    wait_until(lambda: builds.read_build(name).state is BuildState.SUCCEEDED, limit_s=240)
    wait_until(lambda: not builds.client.list(JOBS, namespace=NAMESPACE).items, limit_s=60)

    config = builds.read_config()
    assert config.current_build == name
    assert config.pull_spec.partition("@")[2] in builds.list_digests(name)
    assert len(builds.list_digests("system-") - before) == 1
    assert builds.census.most == 1
    assert all(each.startswith(f"build-{name}") for each in builds.census.names)
    # The killed containers left no files.
    pods = builds.builder.log_directory.with_name("pods")
    wait_until(lambda: not any(pods.iterdir()), limit_s=60)


@pytest.mark.parametrize(
    "moment",
    [
        "build",
        "manifest",
        pytest.param("fetch", marks=pytest.mark.long),
        pytest.param("upload", marks=pytest.mark.long),
    ],
)
def test_deleted_pod_is_replaced_and_leads_to_one_image(builds: KilledBuilds, moment: str) -> None:
    end_pod(builds, moment, builds.delete_pod, f"deleted-{moment}")
    assert len(builds.census.names) == 1


# Guarded by the tests of deleted pods; the Job waits 10 s before it replaces a failed pod.
@pytest.mark.long
@pytest.mark.parametrize("moment", HELD)
def test_killed_container_leads_to_one_image(builds: KilledBuilds, moment: str) -> None:
    end_pod(builds, moment, builds.kill_container, f"killed-{moment}")
