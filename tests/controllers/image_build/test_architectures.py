"""Images for nodes of several architectures, on the lab's API server and a real registry."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.builder.test_attestations import make_key
from tests.controllers.image_build.site import (
    CONTAINERFILE,
    BuildSite,
    Kubelet,
    open_site,
    read_architecture,
    read_inputs_name,
)
from tests.registry.images import make_client
from tests.registry.real_registry import PULLER, RegistryService, any_registry, lab_registry
from tests.waiting import wait_until
from treenail.api.pullspec import parse_pull_spec
from treenail.builder.images.attachments import read_documents, verify_image
from treenail.image.build_result import BuildPhase, BuildReason, BuildResult
from treenail.image.oci.attachments import STATEMENT_TYPE
from treenail.kube.api_client import Json
from treenail.kube.resources import MACHINEOSCONFIGS, NODES, SECRETS, get_object

__all__ = ["any_registry", "lab_registry"]
pytestmark = [pytest.mark.integration]

BOTH = ("amd64", "arm64")


@contextmanager
def open_pool(directory: Path, registry: RegistryService) -> Iterator[BuildSite]:
    """A pool with a node of each architecture, a base image for both, and a node that lies."""
    with open_site(directory, registry) as found:
        found.use_base_list(*BOTH)
        found.add_config("rendered-worker-2")
        for name in BOTH:
            found.add_node(f"node-{name}", name)
        found.add_node("node-odd", "pdp-11")
        found.add_pool(config="rendered-worker-2")
        yield found


@pytest.fixture
def site(tmp_path: Path, lab_registry: RegistryService) -> Iterator[BuildSite]:
    with open_pool(tmp_path, lab_registry) as found:
        yield found


def check_list(site: BuildSite, image: str) -> None:
    """Fail unless the image is a list with the config of the pool for both architectures."""
    for name in BOTH:
        found = site.resolve(image, name)
        assert image.endswith(found.index_digest)
        labels = json.loads(found.config)["config"]["Labels"]
        assert labels["machineconfig"] == "rendered-worker-2"


def wait_pods(kubelet: Kubelet) -> dict[str, Json]:
    """Return the pod of each architecture."""
    pods = wait_until(
        lambda: found if len(found := kubelet.find_pods()) == len(BOTH) else [], limit_s=30
    )
    return {read_architecture(each): each for each in pods}


def test_image_without_containerfile_is_a_list_without_a_job(site: BuildSite) -> None:
    site.add_image_config()
    with site.controller():
        image = site.wait_image()
    check_list(site, image)
    assert site.jobs() == []
    (build,) = site.builds()
    assert build["metadata"]["annotations"]["treenail.io/architectures"] == "amd64,arm64"


def test_each_architecture_is_built_by_its_job(
    tmp_path: Path, any_registry: RegistryService
) -> None:
    with open_pool(tmp_path, any_registry) as site:
        check_build_by_jobs(site)


def check_build_by_jobs(site: BuildSite) -> None:
    site.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(site)
    with site.controller():
        pods = wait_pods(kubelet)
        (build,) = site.builds()
        names = {each["metadata"]["name"] for each in site.jobs()}
        assert names == {f"build-{build['metadata']['name']}-{name}" for name in BOTH}
        assert len({read_inputs_name(each) for each in pods.values()}) == len(BOTH)
        digests = {name: kubelet.succeed(pods[name]) for name in BOTH}
        image = site.wait_image()
        wait_until(lambda: site.jobs() == [] and site.inputs() == [])
    check_list(site, image)
    recorded = json.loads(site.builds()[0]["metadata"]["annotations"]["treenail.io/systems"])
    assert {name: each["image"].partition("@")[2] for name, each in recorded.items()} == digests


def test_containerfile_of_each_architecture_is_its_own(site: BuildSite) -> None:
    files = [
        {"containerfileArch": "ARM64", "content": "FROM configs AS final\nRUN echo arm\n"},
        {"containerfileArch": "AMD64", "content": "# The base is enough.\n"},
    ]
    site.add_image_config(containerFile=files)
    kubelet = Kubelet(site)
    with site.controller():
        pod = kubelet.wait_pod()
        assert read_architecture(pod) == "arm64"
        kubelet.succeed(pod)
        check_list(site, site.wait_image())
    assert kubelet.finished == [site.builds()[0]["metadata"]["name"]]


def test_failure_of_one_architecture_fails_the_build_and_names_it(site: BuildSite) -> None:
    site.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(site)
    with site.controller():
        pods = wait_pods(kubelet)
        kubelet.succeed(pods["amd64"])
        reason = BuildReason.INSTRUCTION_FAILED
        kubelet.fail(
            pods["arm64"],
            BuildResult(BuildPhase.BUILD, reason=reason, line=2, message="exit status 1"),
        )
        wait_until(lambda: site.build_state()[0] == "Failed", limit_s=20)
    _, found, message = site.build_state()
    assert found == reason
    assert message.startswith("line 2: for arm64: exit status 1")
    assert site.image() == ""
    assert "arm64" in site.pool_condition("ImageBuildDegraded")[2]


def test_base_without_an_architecture_fails_and_names_it(site: BuildSite) -> None:
    site.use_base_list("amd64")
    site.add_config("rendered-worker-3")
    site.set_config("worker", "rendered-worker-3")
    site.add_image_config()
    with site.controller():
        wait_until(lambda: site.build_state()[0] == "Failed", limit_s=20)
    _, reason, message = site.build_state()
    assert reason == BuildReason.BASE_NOT_FOUND
    assert "it has no image for linux/arm64" in message


def test_each_image_of_a_list_is_signed_and_has_its_provenance(site: BuildSite) -> None:
    site.add_image_config(text=CONTAINERFILE)
    kubelet, key = Kubelet(site), make_key()
    with site.controller(signing_key=key):
        pods = wait_pods(kubelet)
        systems = {name: kubelet.succeed(pods[name]) for name in BOTH}
        spec = parse_pull_spec(site.wait_image(), where="the test")
    client = make_client(site.registry, PULLER)
    for name in BOTH:
        digest = site.resolve(str(spec), name).digest
        verify_image(client, spec.repository, digest, key.public_key)
        (statement,) = map(
            json.loads, read_documents(client, spec.repository, digest, STATEMENT_TYPE)
        )
        sources = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
        expected = {each.partition("sha256:")[2] for each in (site.base, systems[name])}
        assert {each["digest"]["sha256"] for each in sources} == expected
    verify_image(client, spec.repository, spec.digest, key.public_key)
    assert len(read_documents(client, spec.repository, spec.digest, STATEMENT_TYPE)) == 1
    client.close()


def test_node_of_another_architecture_causes_a_new_image(site: BuildSite) -> None:
    site.client.delete(NODES, "node-arm64")
    site.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(site)
    with site.controller():
        kubelet.succeed(kubelet.wait_pod())
        first = site.wait_image()
        assert site.resolve(first, "amd64").index_digest == ""
        site.add_node("node-arm64", "arm64")
        pod = kubelet.wait_pod()
        assert read_architecture(pod) == "arm64"
        assert site.image() == first
        kubelet.succeed(pod)
        check_list(site, site.wait_image(but=first))
    assert len(kubelet.finished) == 2, "the image of amd64 is used again"


def test_list_of_a_deleted_build_is_pruned_with_its_images(
    tmp_path: Path, any_registry: RegistryService
) -> None:
    with open_pool(tmp_path, any_registry) as site:
        site.add_image_config()
        with site.controller():
            first = site.wait_image()
            instances = [site.resolve(first, name).digest for name in BOTH]
            image = first
            for number in range(3, 8):
                site.add_config(f"rendered-worker-{number}", f"v{number}")
                site.set_config("worker", f"rendered-worker-{number}")
                image = site.wait_image(but=image)
            spec = parse_pull_spec(first, where="the test")
            digests = [spec.digest, *instances]
            client = make_client(site.registry)
            wait_until(
                lambda: not any(client.head_manifest(spec.repository, each) for each in digests),
                limit_s=30,
            )
            client.close()
        assert site.resolve(image, "arm64").index_digest


def test_job_of_one_architecture_that_ends_leaves_the_logins_of_the_other(site: BuildSite) -> None:
    site.add_node("node-infra", "amd64", "infra")
    site.add_pool("infra", "rendered-worker-2")
    spec = f"{site.registry.host}/os/worker:latest"
    site.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(site)
    with site.controller():
        pods = wait_pods(kubelet)
        site.add_image_config("infra", CONTAINERFILE, renderedImagePushSpec=spec)
        wait_until(lambda: len(find_owners(site, "amd64")) == 2, limit_s=20)
        files = [{"containerfileArch": "NoArch", "content": "# The base is enough.\n"}]
        site.client.patch(MACHINEOSCONFIGS, "worker", {"spec": {"containerFile": files}})
        check_list(site, site.wait_image())
        wait_until(lambda: not find_owners(site, "arm64"), limit_s=20)
        for name in read_logins(pods["amd64"]):
            site.client.get(SECRETS, name, namespace=site.namespace)
        kubelet.succeed(pods["amd64"])
        site.wait_image("infra")
        wait_until(lambda: site.secrets() == {"push", "global-pull-secret-copy"}, limit_s=20)


def find_owners(site: BuildSite, architecture: str) -> list[str]:
    """Return the builds that wait for the Job of an architecture."""
    return [
        str(owner["name"])
        for job in site.jobs()
        if read_architecture(job["spec"]["template"]) == architecture
        for owner in job["metadata"]["ownerReferences"]
    ]


def read_logins(pod: Json) -> list[str]:
    volumes: Any = get_object(pod, "spec")["volumes"]
    return [str(each["secret"]["secretName"]) for each in volumes if "secret" in each]


def test_tag_of_the_base_needs_every_architecture(site: BuildSite) -> None:
    tags = {name: f"{site.registry.host}/os/base:{name}" for name in ("list", "amd64")}
    site.add_image_config(annotations={"treenail.io/base-image": tags["amd64"]})
    with site.controller():
        wait_until(lambda: site.condition("BaseImageResolved")[0] == "False", limit_s=20)
        assert "linux/arm64" in site.condition("BaseImageResolved")[2]
        site.annotate("worker", {"treenail.io/base-image": tags["list"]})
        check_list(site, site.wait_image())
