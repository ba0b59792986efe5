"""The build controller on the lab's API server and a real registry."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.builder.test_attestations import make_key
from tests.controllers.image_build.site import (
    CONTAINERFILE,
    BuildSite,
    Json,
    Kubelet,
    MortalTransport,
    open_site,
    read_inputs_name,
)
from tests.registry.images import make_client, make_layer, push_image
from tests.registry.real_registry import PULLER, FaultKind, RegistryFault, RegistryService
from tests.waiting import wait_until
from treenail.api.pullspec import parse_pull_spec
from treenail.builder.images.provenance import attach_packages, read_documents
from treenail.builder.images.signatures import verify_image
from treenail.image.build_result import BuildPhase, BuildReason, BuildResult
from treenail.image.oci.packages import SPDX_TYPE
from treenail.image.oci.provenance import STATEMENT_TYPE
from treenail.kube.resources import EVENTS, MACHINEOSCONFIGS
from treenail.manifests.permissions import BUILD_VERBS, CONTROLLER_VERBS
from treenail.registry.images import resolve_image

pytestmark = [pytest.mark.integration]


@pytest.fixture
def site(tmp_path: Path, lab_registry: RegistryService) -> Iterator[BuildSite]:
    with open_site(tmp_path, lab_registry) as found:
        yield found


def read_labels(site: BuildSite, image: str) -> dict[str, str]:
    spec = parse_pull_spec(image, where="the test")
    client = make_client(site.registry)
    try:
        found = resolve_image(client, spec.repository, spec.digest, "amd64")
    finally:
        client.close()
    labels: dict[str, str] = json.loads(found.config)["config"]["Labels"]
    return labels


def test_image_without_containerfile_is_built_without_a_job(site: BuildSite) -> None:
    site.add_pool()
    site.add_image_config()
    with site.controller():
        image = site.wait_image()
    assert site.build_state()[:2] == ("Succeeded", "Ready")
    labels = read_labels(site, image)
    assert labels["machineconfig"] == "rendered-worker-0"
    assert labels["machineconfigpool"] == "worker"
    assert labels["baseOSContainerImage"] == site.base
    assert site.jobs() == []
    assert site.condition("Accepted")[0] == "True"
    assert site.condition("ImageReady")[0] == "True"


def test_image_is_signed_before_it_is_ready(site: BuildSite) -> None:
    site.add_pool()
    site.add_image_config()
    key = make_key()
    with site.controller(signing_key=key):
        image = site.wait_image()
    spec = parse_pull_spec(image, where="the test")
    client = make_client(site.registry, PULLER)
    verify_image(client, spec.repository, spec.digest, key.public_key)


def test_image_has_one_statement_of_its_provenance(site: BuildSite) -> None:
    site.add_pool()
    site.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(site)
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
    site.add_pool()
    site.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(site)
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
    site.add_pool()
    site.add_image_config()
    with site.controller():
        site.wait_image(limit_s=60)
        reported = wait_until(lambda: find_warnings(site, "ProvenanceNotAttached"))
    assert site.build_state()[0] == "Succeeded"
    (build,) = site.builds()
    report = json.loads(build["metadata"]["annotations"]["treenail.io/build-report"])
    assert report["warning"].startswith("cannot attach the provenance of the image: cannot list")
    assert {each["involvedObject"]["kind"] for each in reported} == {
        "MachineOSBuild",
        "MachineOSConfig",
    }
    assert all(report["warning"] in each["message"] for each in reported)


def find_warnings(site: BuildSite, reason: str) -> list[Json]:
    found = site.client.list(EVENTS, namespace="default").items
    return [each for each in found if (each["type"], each["reason"]) == ("Warning", reason)]


def test_containerfile_is_built_by_a_job_and_gets_the_config(site: BuildSite) -> None:
    site.add_pool()
    site.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(site)
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
    assert read_labels(site, image)["machineconfig"] == "rendered-worker-0"


def test_change_of_files_alone_makes_an_image_without_a_job(site: BuildSite) -> None:
    site.add_pool()
    site.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(site)
    with site.controller() as wire:
        kubelet.succeed(kubelet.wait_pod())
        first = site.wait_image()
        site.add_config("rendered-worker-1", "y")
        site.set_config("worker", "rendered-worker-1")
        second = site.wait_image(but=first)
        assert read_labels(site, second)["machineconfig"] == "rendered-worker-1"
    created = [each for each in wire.writes if each.startswith("POST") and "/jobs" in each]
    assert len(created) == 1


def test_user_error_fails_the_build_with_line_and_remedy(site: BuildSite) -> None:
    site.add_pool()
    site.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(site)
    failure = BuildResult(
        BuildPhase.BUILD, reason=BuildReason.INSTRUCTION_FAILED, line=2, message="no package\nlog"
    )
    with site.controller():
        kubelet.fail(kubelet.wait_pod(), failure)
        wait_until(lambda: site.build_state()[0] == "Failed", limit_s=20)
        wait_until(lambda: site.pool_condition("ImageBuildDegraded")[0] == "True")
    _, reason, message = site.build_state()
    assert reason == "InstructionFailed"
    assert message.startswith("line 2: no package; last output: log; correct the instruction")
    assert "InstructionFailed" in site.condition("ImageReady")
    assert len(site.jobs()) == 1


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
    site.add_pool()
    site.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(site)
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
    site.add_pool()
    site.add_image_config(text=CONTAINERFILE, annotations={"treenail.io/context": "files"})
    kubelet = Kubelet(site)
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
    site.add_pool()
    site.add_image_config(text=CONTAINERFILE, annotations={"treenail.io/context": "files"})
    kubelet = Kubelet(site)
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


def test_evicted_pod_is_replaced_without_a_failure(site: BuildSite) -> None:
    site.add_pool()
    site.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(site)
    with site.controller():
        pod = kubelet.wait_pod()
        kubelet.evict(pod)
        name = pod["metadata"]["name"]

        def find_next() -> list[object]:
            return [each for each in kubelet.find_pods() if each["metadata"]["name"] != name]

        kubelet.succeed(wait_until(find_next, limit_s=30)[0])  # type: ignore[arg-type]
        site.wait_image()
    assert site.build_state()[0] == "Succeeded"


def test_digest_that_the_registry_lacks_is_retried(site: BuildSite) -> None:
    site.add_pool()
    site.add_image_config(text=CONTAINERFILE)
    kubelet = Kubelet(site)
    with site.controller():
        kubelet.succeed(kubelet.wait_pod(), digest=f"sha256:{'5' * 64}")
        wait_until(lambda: site.build_state()[1] == "DigestMismatch", limit_s=20)
    state, _, message = site.build_state()
    assert state == "Building"
    assert "attempt 1 failed; next attempt at " in message
    assert site.image() == ""


def test_secret_without_the_registry_is_a_condition_and_no_build(site: BuildSite) -> None:
    site.add_pool()
    site.add_image_config(renderedImagePushSecret={"name": "absent"})
    with site.controller():
        wait_until(lambda: site.condition("Accepted")[0] == "False", limit_s=20)
    _, reason, message = site.condition("Accepted")
    assert reason == "SecretNotFound"
    assert message.startswith("spec.renderedImagePushSecret: expected the name of a Secret")
    assert "/absent, which does not exist" in message
    assert site.builds() == []


def test_invalid_containerfile_names_line_and_remedy_before_any_job(site: BuildSite) -> None:
    site.add_pool()
    site.add_image_config(text="FROM configs AS final\nRUNN true\n")
    with site.controller():
        wait_until(lambda: site.condition("Accepted")[0] == "False", limit_s=20)
    assert site.condition("Accepted")[1] == "ContainerfileInvalid"
    assert "line 2: unknown instruction 'RUNN'" in site.condition("Accepted")[2]
    assert site.builds() == []


def test_rotated_login_is_used_by_the_next_attempt(site: BuildSite) -> None:
    site.add_pool()
    site.put_secret("push", PULLER)
    site.add_image_config()
    with site.controller():
        wait_until(lambda: site.build_state()[1] in ("PushDenied", "PushLoginRefused"), limit_s=20)
    assert site.image() == ""
    with site.controller():
        site.put_secret("push")
        site.request_rebuild("worker")
        site.wait_image()
    notes = site.image_config()["metadata"]["annotations"]
    assert "machineconfiguration.openshift.io/rebuild" not in notes


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

        def prepare(wire: MortalTransport, number: int = number) -> None:
            wire.die_at, wire.dies_before = number, is_before

        with site.controller(prepare) as wire:
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
