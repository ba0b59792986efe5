"""Image builds on the lab's API server and, unchanged, on the cluster one has.

With the manifests applied, a token of the controllers' account, and the Job controller of the
cluster. The tests report the status of pods as a kubelet does.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.controllers.clusters import LIMIT_S, Place
from tests.controllers.image_build.site import (
    CONTAINERFILE,
    BuildSite,
    Json,
    Kubelet,
    read_architecture,
)
from tests.registry.images import make_client
from tests.registry.real_registry import lab_registry
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.pullspec import parse_pull_spec
from treenail.errors import ForbiddenError, NotFoundError
from treenail.image.build_result import BuildPhase, BuildReason, BuildResult
from treenail.kube.resources import (
    CONFIGMAPS,
    CONTROLLERCONFIGS,
    JOBS,
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    NAMESPACES,
    NODES,
    PODS,
    SECRETS,
)
from treenail.manifests.removal import SELECTOR
from treenail.registry.images import resolve_image
from treenail_lab.registry.service import RegistryService

__all__ = ["lab_registry"]

pytestmark = [pytest.mark.integration, pytest.mark.controllers]

BOTH = ("amd64", "arm64")
STARTED = ("Prepared", "Building")
"""A Job controller may start the pod before the test looks."""
Site = tuple[Place, BuildSite]


@pytest.fixture
def site(kubeconfig: Path, tmp_path: Path, lab_registry: RegistryService) -> Iterator[Site]:
    place = Place(kubeconfig, tmp_path, ("build",))
    found = BuildSite(kubeconfig, lab_registry, namespace=place.prefix)
    try:
        place.install()
        found.prepare()
        found.add_pool()
        yield place, found
    finally:
        for resource, name in (
            (MACHINEOSCONFIGS, "worker"),
            (MACHINECONFIGPOOLS, "worker"),
            (MACHINECONFIGS, "rendered-worker-0"),
            (MACHINECONFIGS, "rendered-worker-2"),
            *((NODES, f"node-{name}") for name in BOTH),
            (CONTROLLERCONFIGS, "machine-config-controller"),
        ):
            with suppress(NotFoundError):
                found.client.delete(resource, name)
        wait_until(lambda: not found.builds(), limit_s=LIMIT_S)
        found.transport.close()
        place.remove()


def list_objects(site: BuildSite, selector: str = "") -> list[str]:
    """Names of all objects that belong to builds, and have these labels too."""
    params = {"labelSelector": ",".join(filter(None, (f"{key.IMAGE_CONFIG}=worker", selector)))}
    found: list[Any] = list(site.client.list(MACHINEOSBUILDS, params=params).items)
    for resource in (JOBS, PODS, SECRETS, CONFIGMAPS):
        found += site.client.list(resource, namespace=site.namespace, params=params).items
    return [str(each["metadata"]["name"]) for each in found]


def test_image_without_a_job_is_ready(site: Site) -> None:
    place, found = site
    found.add_image_config()
    with place.controllers():
        found.wait_image(limit_s=LIMIT_S)
        wait_until(lambda: found.condition("ImageReady")[0] == "True", limit_s=LIMIT_S)
    assert found.build_state()[:2] == ("Succeeded", "Ready")


def test_job_of_a_build_is_accepted_and_its_image_is_ready(site: Site) -> None:
    place, found = site
    labels: Any = found.client.get(NAMESPACES, found.namespace)["metadata"]
    assert labels["labels"]["pod-security.kubernetes.io/enforce"] == "baseline"
    found.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(found)
    with place.controllers():
        pod = wait_until(kubelet.find_pods, limit_s=LIMIT_S)[0]
        assert pod["spec"]["serviceAccountName"] == "treenail-builder"
        (job,) = found.jobs()
        assert len(job["spec"]["podFailurePolicy"]["rules"]) == 2
        unlabelled = {*list_objects(found)} - {*list_objects(found, SELECTOR)}
        assert unlabelled == set()
        kubelet.succeed(pod)
        found.wait_image(limit_s=LIMIT_S)
        wait_until(lambda: not found.jobs(), limit_s=LIMIT_S)
    assert found.build_state()[:2] == ("Succeeded", "Ready")


def test_each_architecture_of_a_pool_is_built_by_its_job(site: Site) -> None:
    place, found = site
    found.use_base_list(*BOTH)
    found.add_config("rendered-worker-2")
    found.set_config("worker", "rendered-worker-2")
    for name in BOTH:
        found.add_node(f"node-{name}", name)
    found.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(found)
    with place.controllers():
        wait_until(lambda: len(kubelet.find_pods()) == len(BOTH), limit_s=LIMIT_S)
        pods = kubelet.find_pods()
        assert {read_architecture(each) for each in pods} == set(BOTH)
        for pod in pods:
            kubelet.succeed(pod)
        image = found.wait_image(limit_s=LIMIT_S)
        wait_until(lambda: not found.jobs(), limit_s=LIMIT_S)
    spec = parse_pull_spec(image, where="the test")
    client = make_client(found.registry)
    for name in BOTH:
        listed = resolve_image(client, spec.repository, spec.digest, name).index_digest
        assert listed == spec.digest
    client.close()


def test_changed_file_of_the_context_is_a_new_build(site: Site) -> None:
    place, found = site
    found.put_context("files", {"motd": "first"})
    found.add_image_config(text=CONTAINERFILE, annotations={"treenail.io/context": "files"})
    kubelet = Kubelet(found)
    with place.controllers():
        kubelet.succeed(wait_until(kubelet.find_pods, limit_s=LIMIT_S)[0])
        first = found.wait_image(limit_s=LIMIT_S)
        found.put_context("files", {"motd": "second"})
        kubelet.succeed(wait_until(kubelet.find_pods, limit_s=LIMIT_S)[0])
        found.wait_image(but=first, limit_s=LIMIT_S)
    assert len(found.builds()) == 2


def test_failed_build_is_reported_and_built_again(site: Site) -> None:
    place, found = site
    found.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(found)
    result = BuildResult(
        BuildPhase.BUILD, reason=BuildReason.INSTRUCTION_FAILED, line=2, message="no package"
    )
    with place.controllers():
        kubelet.fail(wait_until(kubelet.find_pods, limit_s=LIMIT_S)[0], result)
        wait_until(lambda: found.build_state()[0] == "Failed", limit_s=LIMIT_S)
        wait_until(lambda: found.pool_condition("ImageBuildDegraded")[0] == "True", limit_s=LIMIT_S)
        assert found.build_state()[1] == "InstructionFailed"
        found.request_rebuild("worker")
        kubelet.succeed(wait_until(kubelet.find_pods, limit_s=LIMIT_S)[0])
        found.wait_image(limit_s=LIMIT_S)


def test_evicted_pod_of_a_build_is_replaced(site: Site) -> None:
    place, found = site
    found.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(found)
    with place.controllers():
        pod = wait_until(kubelet.find_pods, limit_s=LIMIT_S)[0]
        kubelet.evict(pod)
        kubelet.succeed(wait_until(next_pod(kubelet, pod), limit_s=LIMIT_S)[0])
        found.wait_image(limit_s=LIMIT_S)
    assert len(found.builds()) == 1


def next_pod(kubelet: Kubelet, but: Json) -> Callable[[], list[Json]]:
    def look() -> list[Json]:
        known = but["metadata"]["uid"]
        return [each for each in kubelet.find_pods() if each["metadata"]["uid"] != known]

    return look


def test_deleted_job_cancels_the_build(site: Site) -> None:
    place, found = site
    found.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(found)
    with place.controllers():
        wait_until(kubelet.find_pods, limit_s=LIMIT_S)
        wait_until(lambda: found.build_state()[0] in STARTED, limit_s=LIMIT_S)
        (job,) = found.jobs()
        found.client.delete(
            JOBS, job["metadata"]["name"], namespace=found.namespace, propagation="Background"
        )
        wait_until(lambda: found.build_state()[0] == "Interrupted", limit_s=LIMIT_S)
    assert found.build_state()[1] == "Cancelled"


def test_newer_inputs_replace_the_running_build(site: Site) -> None:
    place, found = site
    found.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(found)
    with place.controllers():
        pod = wait_until(kubelet.find_pods, limit_s=LIMIT_S)[0]
        files = [{"containerfileArch": "NoArch", "content": f"{CONTAINERFILE}LABEL a=b\n"}]
        found.client.patch(MACHINEOSCONFIGS, "worker", {"spec": {"containerFile": files}})
        kubelet.succeed(wait_until(next_pod(kubelet, pod), limit_s=LIMIT_S)[0])
        found.wait_image(limit_s=LIMIT_S)
        states = [found.build_state(each["metadata"]["name"])[:2] for each in found.builds()]
    assert sorted(states) == [("Interrupted", "Superseded"), ("Succeeded", "Ready")]


def test_deleted_config_leaves_no_build_job_or_login(site: Site) -> None:
    place, found = site
    found.add_image_config(text=CONTAINERFILE)
    with place.controllers():
        wait_until(Kubelet(found).find_pods, limit_s=LIMIT_S)
        found.client.delete(MACHINEOSCONFIGS, "worker")
        wait_until(lambda: not list_objects(found), limit_s=LIMIT_S)


def test_pod_with_more_than_the_baseline_is_refused(site: Site) -> None:
    _, found = site
    body: Json = {
        "metadata": {"name": "privileged"},
        "spec": {
            "containers": [{"name": "a", "image": "b", "securityContext": {"privileged": True}}]
        },
    }
    with pytest.raises(ForbiddenError, match="violates PodSecurity"):
        found.client.create(PODS, body, namespace=found.namespace)
