"""The build controller on the lab's API server and a real registry."""

import json
from collections.abc import Callable

import pytest

from tests.builder.test_attestations import make_key
from tests.controllers.image_build.site import (
    CONTAINERFILE,
    BuildSite,
    Kubelet,
    read_inputs_name,
)
from tests.registry.images import make_client, make_layer, push_image
from tests.registry.real_registry import PULLER, FaultKind, RegistryFault
from tests.waiting import wait_until
from treenail.api.pullspec import parse_pull_spec
from treenail.builder.images.attachments import attach_packages, read_documents, verify_image
from treenail.image.build_result import BuildPhase, BuildReason, BuildResult
from treenail.image.oci.attachments import SPDX_TYPE, STATEMENT_TYPE
from treenail.kube.resources import MACHINEOSCONFIGS
from treenail.manifests.permissions import BUILD_VERBS, CONTROLLER_VERBS

pytestmark = [pytest.mark.integration]


def test_image_without_containerfile_is_built_without_a_job(site: BuildSite) -> None:
    site.start_pool()
    with site.controller():
        image = site.wait_image()
    assert site.build_state()[:2] == ("Succeeded", "Ready")
    labels = site.read_labels(image)
    assert labels["machineconfig"] == "rendered-worker-0"
    assert labels["machineconfigpool"] == "worker"
    assert labels["baseOSContainerImage"] == site.base
    assert site.jobs() == []
    assert site.condition("Accepted")[0] == "True"
    assert site.condition("ImageReady")[0] == "True"


def test_deleted_image_is_reported_until_it_is_rebuilt(site: BuildSite) -> None:
    site.start_pool()
    with site.controller():
        spec = parse_pull_spec(site.wait_image(), where="x")
    assert site.condition("ImageReady")[0] == "True"
    client = make_client(site.registry)
    client.delete_manifest(spec.repository, spec.digest)
    with site.controller():
        wait_until(lambda: site.condition("ImageReady")[:2] == ("False", "ImageMissing"))
        assert "kubectl annotate machineosconfig worker" in site.condition("ImageReady")[2]
        site.request_rebuild("worker")
        wait_until(lambda: site.condition("ImageReady")[0] == "True", limit_s=20)
    assert client.head_manifest(spec.repository, parse_pull_spec(site.image(), where="x").digest)
    client.close()


def test_image_is_signed_before_it_is_ready(site: BuildSite) -> None:
    site.start_pool()
    key = make_key()
    with site.controller(signing_key=key):
        image = site.wait_image()
    spec = parse_pull_spec(image, where="the test")
    client = make_client(site.registry, PULLER)
    verify_image(client, spec.repository, spec.digest, key.public_key)


def test_image_has_one_statement_of_its_provenance(site: BuildSite) -> None:
    kubelet = site.start_pool(CONTAINERFILE)
    with site.controller():
        system = kubelet.succeed(kubelet.wait_pod())
        spec = parse_pull_spec(site.wait_image(), where="the test")
    client = make_client(site.registry, PULLER)
    documents = read_documents(client, spec.repository, spec.digest, STATEMENT_TYPE)
    (statement,) = map(json.loads, documents)
    client.close()
    assert statement["subject"][0]["digest"] == {"sha256": spec.digest.partition(":")[2]}
    definition = statement["predicate"]["buildDefinition"]
    assert definition["externalParameters"]["machineConfig"] == "rendered-worker-0"
    found = {each["digest"]["sha256"] for each in definition["resolvedDependencies"]}
    assert found == {each.partition("sha256:")[2] for each in (site.base, system)}


def test_packages_of_the_system_part_are_attached_to_the_image(site: BuildSite) -> None:
    kubelet = site.start_pool(CONTAINERFILE)
    client = make_client(site.registry)
    with site.controller():
        pod = kubelet.wait_pod()
        system = push_image(client, "os/worker", "system", layers=[make_layer({"etc/x": b"x"})])
        attach_packages(client, "os/worker", system.digest, b'{"packages":[]}')
        kubelet.succeed(pod, digest=system.digest)
        spec = parse_pull_spec(site.wait_image(), where="the test")
    found = read_documents(client, spec.repository, spec.digest, SPDX_TYPE)
    client.close()
    assert found == (b'{"packages":[]}',)


def test_provenance_that_cannot_be_attached_is_reported_and_fails_no_build(
    site: BuildSite,
) -> None:
    site.registry.faults.add(
        RegistryFault(FaultKind.STATUS, method="GET", path="/referrers/", status=500, times=0)
    )
    site.start_pool()
    with site.controller():
        site.wait_image(limit_s=60)
        reported = wait_until(lambda: site.find_events("ProvenanceNotAttached"))
    assert site.build_state()[0] == "Succeeded"
    (build,) = site.builds()
    report = json.loads(build["metadata"]["annotations"]["treenail.io/build-report"])
    assert report["warning"].startswith("cannot attach the provenance of the image: cannot list")
    assert {each["involvedObject"]["kind"] for each in reported} == {
        "MachineOSBuild",
        "MachineOSConfig",
    }
    assert all(report["warning"] in each["message"] for each in reported)


def test_containerfile_is_built_by_a_job_and_gets_the_config(site: BuildSite) -> None:
    kubelet = site.start_pool(CONTAINERFILE)
    with site.controller():
        pod = kubelet.wait_pod()
        names = [each["name"] for each in pod["spec"]["initContainers"]]
        assert names == ["fetch", "build"]
        digest = kubelet.succeed(pod)
        image = site.wait_image()
        wait_until(lambda: site.jobs() == [])
    (build,) = site.builds()
    notes = build["metadata"]["annotations"]
    assert notes["treenail.io/system-image"].endswith(digest)
    assert json.loads(notes["treenail.io/build-report"])["seconds"]["push"] == 3.0
    assert site.build_state()[:2] == ("Succeeded", "Ready")
    assert site.read_labels(image)["machineconfig"] == "rendered-worker-0"


def test_change_of_files_alone_makes_an_image_without_a_job(site: BuildSite) -> None:
    kubelet = site.start_pool(CONTAINERFILE)
    with site.controller() as wire:
        kubelet.succeed(kubelet.wait_pod())
        first = site.wait_image()
        site.add_config("rendered-worker-1", "y")
        site.set_config("worker", "rendered-worker-1")
        second = site.wait_image(but=first)
        assert site.read_labels(second)["machineconfig"] == "rendered-worker-1"
    created = [each for each in wire.writes if each.startswith("POST") and "/jobs" in each]
    assert len(created) == 1


def test_failed_instruction_names_files_of_the_config_that_it_did_not_see(site: BuildSite) -> None:
    file = {"path": "/etc/yum.repos.d/mirror.repo", "contents": {"source": "data:,x"}}
    config = {"ignition": {"version": "3.5.0"}, "storage": {"files": [file]}}
    site.add_config("rendered-worker-1", config=config)
    site.add_pool(config="rendered-worker-1")
    site.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(site)
    failure = BuildResult(BuildPhase.BUILD, reason=BuildReason.INSTRUCTION_FAILED, message="x")
    with site.controller():
        kubelet.fail(kubelet.wait_pod(), failure)
        wait_until(lambda: site.build_state()[0] == "Failed", limit_s=20)
    assert site.build_state()[2].endswith(
        "; if it needs /etc/yum.repos.d/mirror.repo of the config, run: kubectl annotate "
        "machineosconfig worker treenail.io/build-sees-config=true"
    )


def test_failed_build_begins_again_when_the_containerfile_sees_the_config(site: BuildSite) -> None:
    kubelet = site.start_pool(CONTAINERFILE)
    failure = BuildResult(BuildPhase.BUILD, reason=BuildReason.INSTRUCTION_FAILED, message="x")
    with site.controller():
        kubelet.fail(kubelet.wait_pod(), failure)
        wait_until(lambda: site.build_state()[0] == "Failed", limit_s=20)
        site.annotate("worker", {"treenail.io/build-sees-config": "true"})
        kubelet.succeed(kubelet.wait_pod())
        site.wait_image()
    assert len(site.builds()) == 2


def test_changed_file_of_the_context_is_a_new_build(site: BuildSite) -> None:
    site.put_context("files", {"motd": "first"})
    kubelet = site.start_pool(CONTAINERFILE, annotations={"treenail.io/context": "files"})
    with site.controller():
        kubelet.succeed(kubelet.wait_pod())
        first = site.wait_image()
        site.put_context("files", {"motd": "second"})
        kubelet.succeed(kubelet.wait_pod())
        second = site.wait_image(but=first)
        site.put_context("files", {"motd": "first"})
        assert site.wait_image(but=second) == first, "the first image is used again"
    assert len(kubelet.finished) == 2


def test_context_that_is_created_late_is_found_at_once(site: BuildSite) -> None:
    kubelet = site.start_pool(CONTAINERFILE, annotations={"treenail.io/context": "files"})
    with site.controller():
        wait_until(lambda: site.condition("Accepted")[1] == "ContextInvalid", limit_s=20)
        site.put_context("files", {"motd": "first"})
        kubelet.succeed(kubelet.wait_pod())
        site.wait_image()


def test_shared_job_keeps_its_inputs_when_the_first_config_is_deleted(site: BuildSite) -> None:
    spec = f"{site.registry.host}/os/worker:latest"
    for name in ("worker", "infra"):
        site.add_pool(name)
    site.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(site)
    with site.controller():
        pod = kubelet.wait_pod()
        site.add_image_config("infra", CONTAINERFILE, renderedImagePushSpec=spec)
        wait_until(lambda: len(site.owners_of_job()) == 2, limit_s=20)
        site.client.delete(MACHINEOSCONFIGS, "worker")
        wait_until(lambda: len(site.builds()) == 1, limit_s=20)
        wait_until(lambda: len(site.owners_of_job()) == 1, limit_s=20)
        (inputs,) = site.inputs()
        assert inputs["metadata"]["name"] == read_inputs_name(pod)
        assert len(site.secrets() - {"push", "global-pull-secret-copy"}) == 2
        kubelet.succeed(pod)
        site.wait_image("infra")
        wait_until(lambda: site.secrets() == {"push", "global-pull-secret-copy"}, limit_s=20)


@pytest.mark.parametrize(
    ("text", "notes", "reason", "sentence"),
    [
        ("FROM configs AS final\nRUNN true\n", {}, "ContainerfileInvalid",
         "line 2: unknown instruction 'RUNN'"),
        ("", {"context": "absent"}, "ContextInvalid", "/absent"),
        ("", {"base-image": "{host}/os/base:absent"}, "BaseImageUnresolved",
         "cannot resolve {host}/os/base:absent: "),
        ("", {"base-image": "{host}/os/base:latest", "rebuild-schedule": "sundays"},
         "AnnotationInvalid", "annotation treenail.io/rebuild-schedule: expected a list such as"),
        ("", {}, "SecretNotFound", "spec.renderedImagePushSecret: expected the name of a Secret"),
    ],
)  # fmt: skip
def test_invalid_input_is_a_condition_and_no_build(
    site: BuildSite, text: str, notes: dict[str, str], reason: str, sentence: str
) -> None:
    host = site.registry.host
    annotations = {f"treenail.io/{name}": each.format(host=host) for name, each in notes.items()}
    secret = {"name": "absent" if reason == "SecretNotFound" else "push"}
    site.start_pool(text, annotations=annotations, renderedImagePushSecret=secret)
    with site.controller():
        wait_until(lambda: site.condition("Accepted")[0] == "False", limit_s=20)
    assert site.condition("Accepted")[1] == reason
    assert sentence.format(host=host) in site.condition("Accepted")[2]
    assert site.builds() == []


def finish_until(condition: Callable[[], bool], kubelet: Kubelet) -> None:
    """Run every pod to its end until the condition is true."""

    def look() -> bool:
        for pod in kubelet.find_pods():
            kubelet.succeed(pod)
        return condition()

    wait_until(look, limit_s=30)


def is_ready(site: BuildSite, name: str) -> bool:
    return site.condition("ImageReady", name)[0] == "True" and site.jobs() == []


def count_writes(site: BuildSite, kubelet: Kubelet, text: str) -> int:
    site.add_pool("counted")
    site.add_image_config("counted", text)
    with site.controller() as wire:
        finish_until(lambda: is_ready(site, "counted"), kubelet)
    return len(wire.writes)


# The walks of test_decide end the controller at any moment too.
@pytest.mark.parametrize(
    ("text", "jobs", "is_before"),
    [
        ("", 0, True),
        pytest.param("", 0, False, marks=pytest.mark.long),
        pytest.param(CONTAINERFILE, 1, True, marks=pytest.mark.long),
        pytest.param(CONTAINERFILE, 1, False, marks=pytest.mark.long),
    ],
)
def test_kill_at_each_write_leads_to_one_image(
    site: BuildSite, text: str, jobs: int, is_before: bool
) -> None:
    kubelet = Kubelet(site)
    writes = count_writes(site, kubelet, text)
    for number in range(writes):
        name = f"pool-{number}"
        site.add_pool(name)
        site.add_image_config(name, f"{text}LABEL n={number}\n" if text else "")

        with site.controller(die_at=number, dies_before=is_before) as wire:
            finish_until(lambda wire=wire: wire.is_dead, kubelet)  # type: ignore[misc]
        with site.controller():
            finish_until(lambda name=name: is_ready(site, name), kubelet)  # type: ignore[misc]
        own = [each for each in site.builds() if each["spec"]["machineOSConfig"]["name"] == name]
        assert len(own) == 1, number
        assert kubelet.finished.count(own[0]["metadata"]["name"]) == jobs, number


VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def test_controller_uses_every_permission_to_write_and_no_other(site: BuildSite) -> None:
    kubelet = Kubelet(site)
    for name in ("worker", "infra"):
        site.add_pool(name)
        # Both have the same key and repository, so that one adopts the Job of the other.
        spec = f"{site.registry.host}/os/worker:latest"
        site.add_image_config(name, CONTAINERFILE, renderedImagePushSpec=spec)
    with site.controller() as wire:
        pod = kubelet.wait_pod()
        wait_until(lambda: len(site.builds()) == 2, limit_s=20)
        wait_until(lambda: len(site.owners_of_job()) == 2, limit_s=20)
        kubelet.fail(
            pod,
            BuildResult(BuildPhase.BUILD, reason=BuildReason.CONTAINERFILE_INVALID, message="no"),
        )
        for name in ("worker", "infra"):
            wait_until(lambda name=name: site.pool_condition("ImageBuildDegraded", name)[0])  # type: ignore[misc]
        for name in ("worker", "infra"):
            site.request_rebuild(name)
        finish_until(lambda: is_ready(site, "worker") and is_ready(site, "infra"), kubelet)
    used = {find_permission(line) for line in wire.writes}
    granted = {
        (resource.partition(".")[0], verb)
        for verbs in (CONTROLLER_VERBS["build"], BUILD_VERBS)
        for resource, names in verbs.items()
        for verb in names
        if verb in VERBS.values()
    }
    assert used == granted
    assert site.inputs() == []


def find_permission(line: str) -> tuple[str, str]:
    """Return resource and verb of a write: METHOD /apis/GROUP/VERSION[/namespaces/N]/PLURAL..."""
    method, _, path = line.partition(" ")
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    if parts[0] == "namespaces":
        parts = parts[2:]
    resource = f"{parts[0]}/{parts[2]}" if len(parts) > 2 else parts[0]
    return resource, VERBS[method]
