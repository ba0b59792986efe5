"""Wrong inputs of a build: each finding names field, expected and found value, and a remedy."""

import base64
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from tests.api.fuzzing import damaged, fuzz
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosconfig import MachineOSConfig
from treenail.errors import ConfigError
from treenail.image.build_inputs import BuildInputs, describe_hidden_files, find_build_paths
from treenail.image.input_checks import (
    BuildContext,
    InputFinding,
    InputReason,
    find_architecture_findings,
    find_config_findings,
    find_context_findings,
    find_pool_findings,
    find_pull_secret_findings,
    find_push_secret_findings,
    find_rendered_findings,
    find_size_findings,
    read_context,
    read_deadline,
)

DIGEST = "@sha256:" + 64 * "a"
BASE = f"registry.example.com/os/base{DIGEST}"
SPEC: dict[str, Any] = {
    "machineConfigPool": {"name": "worker"},
    "imageBuilder": {"imageBuilderType": "Job"},
    "renderedImagePushSecret": {"name": "push"},
    "renderedImagePushSpec": "registry.example.com/os/node:latest",
    "containerFile": [{"content": "FROM configs AS final\nRUN true\n"}],
}
POOL: dict[str, Any] = {
    "metadata": {"name": "worker"},
    "spec": {"configuration": {"name": "rendered-worker-1"}},
}


def config(
    name: str = "worker", notes: dict[str, str] | None = None, **spec: Any
) -> MachineOSConfig:
    metadata = {"name": name, "annotations": notes or {}}
    return MachineOSConfig.from_json({"metadata": metadata, "spec": {**SPEC, **spec}})


def pool(**more: Any) -> MachineConfigPool:
    return MachineConfigPool.from_json({**POOL, **more})


def rendered(**spec: Any) -> MachineConfig:
    return MachineConfig.from_json(
        {"metadata": {"name": "rendered-worker-1"}, "spec": {"osImageURL": BASE, **spec}}
    )


def secret(**logins: str) -> dict[str, Any]:
    auths = {
        name.replace("_", "."): {"auth": base64.b64encode(login.encode()).decode()}
        for name, login in logins.items()
    }
    content = base64.b64encode(json.dumps({"auths": auths}).encode()).decode()
    return {"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": content}}


def only(found: Iterable[InputFinding]) -> InputFinding:
    (finding,) = found
    assert finding.remedy
    assert "\n" not in str(finding)
    return finding


def test_valid_inputs_have_no_finding() -> None:
    notes = {
        "treenail.io/build-sees-config": "true",
        "treenail.io/build-deadline": "7200",
        "treenail.io/base-image": "registry:5000/os:9",
    }
    found = config(notes=notes)
    assert list(find_config_findings(found)) == []
    assert list(find_pool_findings(found, pool(), found)) == []
    assert list(find_architecture_findings(found, {"arm64"})) == []
    assert list(find_rendered_findings(rendered())) == []
    assert (
        list(find_push_secret_findings(secret(registry_example_com="a:b"), "s", found.push_spec))
        == []
    )
    assert read_deadline(found) == 7200
    assert read_deadline(config()) == 3600


@pytest.mark.parametrize(
    ("more", "reason", "texts"),
    [
        (
            {"renderedImagePushSpec": f"registry.example.com/os{DIGEST}"},
            InputReason.PUSH_SPEC_INVALID,
            ("spec.renderedImagePushSpec: expected REGISTRY/REPOSITORY:TAG", "names a digest"),
        ),
        (
            {"renderedImagePushSpec": "registry.example.com/os"},
            InputReason.PUSH_SPEC_INVALID,
            ("found 'registry.example.com/os': it has no tag",),
        ),
        (
            {"renderedImagePushSpec": "registry.example.com/" + 500 * "x" + ":1"},
            InputReason.PUSH_SPEC_INVALID,
            ("longer than 447 characters",),
        ),
        (
            {"imageBuilder": {"imageBuilderType": "Pod"}},
            InputReason.BUILDER_UNSUPPORTED,
            ("expected Job, found 'Pod'",),
        ),
        (
            {"containerFile": [{"content": "RUN true\n"}]},
            InputReason.CONTAINERFILE_INVALID,
            ("spec.containerFile[0].content", "there is no FROM"),
        ),
        (
            {"containerFile": [{"content": "FROM fedora\n"}]},
            InputReason.CONTAINERFILE_INVALID,
            ("line 1: FROM fedora names no earlier stage",),
        ),
        (
            {"containerFile": [{"content": "FROM configs\n" + 4096 * "#"}]},
            InputReason.CONTAINERFILE_INVALID,
            ("expected at most 4096 characters, found 4109",),
        ),
        (
            {"containerFile": [{"content": ""}, {"containerfileArch": "NoArch", "content": ""}]},
            InputReason.CONTAINERFILE_INVALID,
            ("spec.containerFile[1].containerfileArch", "found two for NoArch"),
        ),
        (
            {"containerFile": [{"containerfileArch": "RISCV", "content": ""}]},
            InputReason.CONTAINERFILE_INVALID,
            ("expected ARM64 or AMD64", "found 'RISCV'"),
        ),
    ],
)
def test_wrong_spec_gives_one_finding(
    more: dict[str, Any], reason: InputReason, texts: tuple[str, ...]
) -> None:
    finding = only(find_config_findings(config(**more)))
    assert finding.reason is reason
    for text in texts:
        assert text in str(finding)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("build-sees-config", "yes", '"true" or "false"'),
        ("build-deadline", "1h", "60 to 86400 seconds"),
        ("build-deadline", "59", "60 to 86400 seconds"),
        ("build-deadline", "9" * 5000, "60 to 86400 seconds"),
        ("base-image", "fedora", "REGISTRY/REPOSITORY:TAG or"),
        ("base-image", f"registry.example.com/os:9{DIGEST}", "REGISTRY/REPOSITORY:TAG or"),
    ],
)
def test_wrong_annotation_gives_one_finding(name: str, value: str, expected: str) -> None:
    finding = only(find_config_findings(config(notes={f"treenail.io/{name}": value})))
    assert finding.reason is InputReason.ANNOTATION_INVALID
    assert finding.field == f"annotation treenail.io/{name}"
    assert finding.expected.startswith(expected)
    assert len(finding.found) <= 102


def test_second_machineosconfig_of_a_pool_is_not_accepted() -> None:
    second = config("legacy")
    finding = only(find_pool_findings(second, pool(), config("worker")))
    assert finding.reason is InputReason.POOL_TAKEN
    assert "for which MachineOSConfig worker builds" in str(finding)
    assert "kubectl delete machineosconfig legacy" in finding.remedy


def test_nodes_of_several_architectures_need_an_entry_for_each() -> None:
    both = {"arm64", "amd64"}
    assert list(find_architecture_findings(config(), both)) == []
    entries = [{"containerfileArch": "ARM64", "content": "FROM configs\n"}]
    finding = only(find_architecture_findings(config(containerFile=entries), both))
    assert finding.reason is InputReason.ARCHITECTURE_MISSING
    entries.append({"containerfileArch": "NoArch", "content": "FROM configs\n"})
    assert list(find_architecture_findings(config(containerFile=entries), both)) == []


def test_degraded_node_blocks_the_first_build_only() -> None:
    degraded = pool(status={"conditions": [{"type": "NodeDegraded", "status": "True"}]})
    own = config()
    assert only(find_pool_findings(own, degraded, own)).reason is InputReason.POOL_DEGRADED
    later = replace(own, pull_spec=BASE)
    assert list(find_pool_findings(later, degraded, later)) == []


def test_pool_must_exist_and_be_rendered_and_sound() -> None:
    own = config()
    assert only(find_pool_findings(own, None, own)).reason is InputReason.POOL_NOT_FOUND
    empty = pool(spec={})
    assert only(find_pool_findings(own, empty, own)).reason is InputReason.POOL_NOT_RENDERED
    broken = pool(
        status={
            "conditions": [
                {"type": "RenderDegraded", "status": "True", "message": "bad config"},
                {"type": "ImageBuildDegraded", "status": "True"},
            ]
        }
    )
    finding = only(find_pool_findings(own, broken, own))
    assert finding.reason is InputReason.POOL_DEGRADED
    assert "RenderDegraded=True (bad config)" in finding.found


def test_architecture_without_entry_is_named() -> None:
    arm = config(containerFile=[{"containerfileArch": "ARM64", "content": "FROM configs\n"}])
    finding = only(find_architecture_findings(arm, {"amd64"}))
    assert finding.reason is InputReason.ARCHITECTURE_MISSING
    assert "AMD64" in finding.expected
    assert finding.found == "entries for ARM64"
    assert list(find_architecture_findings(config(containerFile=[]), {"riscv64"})) == []
    assert only(find_architecture_findings(config(), {"riscv64"})).expected.count("'riscv64'") == 1


@pytest.mark.parametrize(
    ("spec", "reason", "text"),
    [
        ({"osImageURL": ""}, InputReason.BASE_IMAGE_INVALID, "osImageURL of rendered-worker-1"),
        (
            {"osImageURL": "registry.example.com/os:9"},
            InputReason.BASE_IMAGE_INVALID,
            "it names a tag; name the image by its digest",
        ),
        (
            {"extensions": ["usbguard", "games"], "baseOSExtensionsContainerImage": BASE},
            InputReason.EXTENSION_UNSUPPORTED,
            "found 'games'",
        ),
        (
            {"extensions": ["usbguard"]},
            InputReason.BASE_IMAGE_INVALID,
            "baseOSExtensionsContainerImage of rendered-worker-1",
        ),
        (
            {"kernelType": "64k-pages", "baseOSExtensionsContainerImage": BASE},
            InputReason.EXTENSION_UNSUPPORTED,
            "expected default or realtime on amd64, found '64k-pages'",
        ),
        ({"kernelType": "zen"}, InputReason.EXTENSION_UNSUPPORTED, "found 'zen'"),
    ],
)
def test_rendered_config_that_cannot_be_built_is_found(
    spec: dict[str, Any], reason: InputReason, text: str
) -> None:
    finding = only(find_rendered_findings(rendered(**spec)))
    assert finding.reason is reason
    assert text in str(finding)


def test_base_image_of_the_annotation_replaces_that_of_the_config() -> None:
    found = rendered(osImageURL="bad")
    assert list(find_rendered_findings(found, base_image=BASE)) == []
    finding = only(find_rendered_findings(rendered(), base_image="registry.example.com/os:9"))
    assert finding.field == "annotation treenail.io/base-image"


def test_push_secret_must_hold_a_login_for_the_registry() -> None:
    spec = "registry.example.com/os/node:latest"
    where = "Secret builds/push"
    missing = only(find_push_secret_findings(None, where, spec))
    assert missing.reason is InputReason.SECRET_NOT_FOUND
    assert "kubectl create secret docker-registry push -n builds --docker" in missing.remedy
    wrong = only(find_push_secret_findings({"type": "Opaque"}, where, spec))
    assert wrong.reason is InputReason.SECRET_INVALID
    assert "found 'Opaque'" in str(wrong)
    other = only(find_push_secret_findings(secret(quay_io="canary:hunter2"), where, spec))
    assert "expected a login for registry.example.com" in str(other)
    assert "1 login for other registries" in str(other)
    assert "hunter2" not in str(other)
    assert list(find_pull_secret_findings(secret(quay_io="a:b"), where)) == []
    assert only(find_pull_secret_findings(None, where)).field == "spec.baseImagePullSecret"


def test_context_is_read_with_its_digest() -> None:
    document = {"data": {"a": "1", "b": ""}, "binaryData": {"c": "/w=="}}
    found = read_context(document, "ConfigMap builds/files")
    assert found.files == {"a": b"1", "b": b"", "c": b"\xff"}
    assert found.digest == BuildContext({"c": b"\xff", "b": b"", "a": b"1"}).digest
    assert found.digest != BuildContext({"a": b"", "b": b"1", "c": b"\xff"}).digest
    assert BuildContext().digest == ""


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (None, "which does not exist"),
        ({"data": {"x": 1}}, "expected a string"),
        ({"binaryData": {"x": "?"}}, "expected base64"),
        ({"data": {".treenail-config.tar.gz": ""}}, "names that do not begin with .treenail-"),
        ({"data": {"x": "x" * (1024 * 1024 + 1)}}, "found 1048577 bytes"),
    ],
)
def test_context_that_cannot_be_used_is_found(document: object, text: str) -> None:
    finding = only(find_context_findings(document, "ConfigMap builds/files"))
    assert finding.reason is InputReason.CONTEXT_INVALID
    assert text in str(finding)


def test_config_that_a_job_cannot_see_is_found() -> None:
    assert list(find_size_findings("rendered-worker-1", 1024 * 1024)) == []
    finding = only(find_size_findings("rendered-worker-1", 1024 * 1024 + 1))
    assert finding.reason is InputReason.CONFIG_TOO_LARGE
    assert "treenail.io/build-sees-config" in finding.remedy


def test_inputs_are_those_of_both_objects() -> None:
    found = BuildInputs.from_objects(config(), rendered(extensions=["usbguard"]), "arm64")
    assert found.base_image == BASE
    assert found.containerfile == SPEC["containerFile"][0]["content"]
    assert (found.extensions, found.kernel_type) == (("usbguard",), "default")
    based = config(notes={"treenail.io/base-image": "r.example.com/b:1"})
    assert BuildInputs.from_objects(based, rendered()).base_image == "r.example.com/b:1"


def test_hidden_files_of_the_config_are_named_with_the_annotation() -> None:
    paths = ["/etc/yum.repos.d/a.repo", "/etc/pki/rpm-gpg/key", "/etc/containers/x", "/etc/pki/b"]
    files = [{"path": path} for path in [*paths, "/etc/app", "/etc/pkix"]]
    found = rendered(config={"ignition": {"version": "3.4.0"}, "storage": {"files": files}})
    assert find_build_paths(found) == tuple(sorted(paths))
    text = describe_hidden_files(config(), find_build_paths(found))
    assert text.startswith("if it needs /etc/containers/x, /etc/pki/b, /etc/pki/rpm-gpg/key and 1")
    assert text.endswith("machineosconfig worker treenail.io/build-sees-config=true")
    sees = config(notes={"treenail.io/build-sees-config": "true"})
    assert describe_hidden_files(sees, find_build_paths(found)) == ""
    assert describe_hidden_files(config(), find_build_paths(rendered())) == ""


@fuzz
@given(damaged({"metadata": {"name": "worker"}, "spec": SPEC}))
def test_findings_of_damaged_config_are_bounded(document: object) -> None:
    try:
        found = MachineOSConfig.from_json(document)
    except ConfigError:
        return
    findings = [
        *find_config_findings(found),
        *find_pool_findings(found, None, found),
        *find_architecture_findings(found, {"amd64"}),
    ]
    assert all(len(str(each)) < 2000 for each in findings)
