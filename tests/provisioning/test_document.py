"""The Ignition config of a new machine: its files, their order, and the encapsulated config."""

import base64
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.provisioning.samples import (
    BASE,
    CLUSTER_IMAGE,
    IMAGE,
    NEW,
    Json,
    make_config,
    make_controller_config,
    make_file,
    make_pool,
)
from treenail.api import annotations as key
from treenail.api.ignition.model import Contents, IgnitionFile
from treenail.api.ignition.parser import parse_ignition
from treenail.config import node_paths
from treenail.config.ignition.emit import VERSIONS_SERVED, VersionTooOldError
from treenail.errors import ConfigError
from treenail.provisioning.content.directory_source import DirectorySource
from treenail.provisioning.content.document import ServedDocument, build_document
from treenail.provisioning.content.source import ServedInputs, SourceSettings

REGISTRY_CA = "/etc/docker/certs.d/registry.example:5000/ca.crt"


def read_inputs(
    directory: Path, *documents: Json, settings: SourceSettings | None = None
) -> ServedInputs:
    for number, document in enumerate(documents):
        (directory / f"{number}.json").write_text(json.dumps(document))
    return DirectorySource(directory, settings or SourceSettings()).read_inputs("worker")


def load(document: ServedDocument, kubeconfig: bytes | None = None) -> Json:
    return json.loads(document.format_body(kubeconfig))


def contents_of(config: Json, path: str) -> bytes:
    (found,) = [each for each in config["storage"]["files"] if each["path"] == path]
    return base64.b64decode(found["contents"]["source"].partition(",")[2])


def paths_of(config: Json) -> list[str]:
    return [each["path"] for each in config["storage"]["files"]]


def encapsulated_of(config: Json) -> Json:
    return json.loads(contents_of(config, node_paths.ENCAPSULATED_CONFIG))


@pytest.mark.parametrize("version", VERSIONS_SERVED)
def test_appended_files_are_beside_the_rendered_config(tmp_path: Path, version: str) -> None:
    inputs = read_inputs(
        tmp_path, make_pool(), make_config(NEW, make_file("/etc/a")), make_controller_config()
    )
    plain = load(build_document(inputs, version))
    mine = [
        IgnitionFile(path, contents=Contents("data:,mine"), mode=0o600, overwrite=True)
        for path in ("/etc/a", REGISTRY_CA, "/etc/b")
    ]
    found = load(build_document(replace(inputs, appended=tuple(mine)), version))
    paths = paths_of(found)
    assert len(paths) == len(set(paths))
    assert paths[-4:] == ["/etc/a", REGISTRY_CA, "/etc/b", node_paths.ENCAPSULATED_CONFIG]
    for path in (node_paths.SERVED_CONFIG, node_paths.ENCAPSULATED_CONFIG):
        assert contents_of(found, path) == contents_of(plain, path)
    parse_ignition(found)


@pytest.mark.parametrize("version", VERSIONS_SERVED)
def test_added_files_follow_those_of_the_config_in_order(tmp_path: Path, version: str) -> None:
    inputs = read_inputs(
        tmp_path, make_pool(), make_config(NEW, make_file("/etc/a")), make_controller_config()
    )
    document = build_document(inputs, version)
    certificates = [node_paths.KUBELET_CA, node_paths.CLOUD_CA, REGISTRY_CA]
    added = [node_paths.SERVED_CONFIG, *certificates, node_paths.ENCAPSULATED_CONFIG]
    assert paths_of(load(document)) == ["/etc/a", node_paths.FIRST_BOOT_ANNOTATIONS, *added]
    found = load(document, b"kubeconfig")
    assert paths_of(found) == [
        "/etc/a",
        node_paths.FIRST_BOOT_ANNOTATIONS,
        node_paths.KUBECONFIG,
        *added,
    ]
    assert found["ignition"]["version"] == version
    assert contents_of(found, node_paths.KUBECONFIG) == b"kubeconfig"
    assert contents_of(found, REGISTRY_CA) == b"registry ca"
    parse_ignition(found)


def test_files_with_secrets_are_readable_by_root_only(tmp_path: Path) -> None:
    inputs = read_inputs(tmp_path, make_pool(), make_config())
    modes = {
        each["path"]: each["mode"]
        for each in load(build_document(inputs, "3.5.0"), b"x")["storage"]["files"]
    }
    assert modes == {
        node_paths.FIRST_BOOT_ANNOTATIONS: 0o644,
        node_paths.KUBECONFIG: 0o600,
        node_paths.SERVED_CONFIG: 0o600,
        node_paths.ENCAPSULATED_CONFIG: 0o644,
    }


def test_annotations_name_the_config_and_no_image(tmp_path: Path) -> None:
    inputs = read_inputs(tmp_path, make_pool(), make_config())
    config = load(build_document(inputs, "3.4.0"))
    assert json.loads(contents_of(config, node_paths.FIRST_BOOT_ANNOTATIONS)) == {
        key.CURRENT_CONFIG: NEW,
        key.DESIRED_CONFIG: NEW,
        key.FIRST_PIVOT_CONFIG: NEW,
        key.STATE: "Done",
    }


def test_annotations_tell_the_first_boot_who_writes_files_beside_an_image(tmp_path: Path) -> None:
    inputs = read_inputs(tmp_path, make_pool(imageFiles="Write"), make_config())
    config = load(build_document(inputs, "3.5.0"))
    found = json.loads(contents_of(config, node_paths.FIRST_BOOT_ANNOTATIONS))
    assert found[key.IMAGE_FILES] == "write"


@pytest.mark.parametrize(
    ("spelling", "reported"),
    [(key.DESIRED_OS_IMAGE, key.CURRENT_OS_IMAGE), (key.DESIRED_IMAGE, key.CURRENT_IMAGE)],
)
def test_image_is_in_the_annotations_and_the_encapsulated_config(
    tmp_path: Path, spelling: str, reported: str
) -> None:
    settings = SourceSettings(image_annotation=spelling)
    inputs = read_inputs(tmp_path, make_pool(osImage=IMAGE), make_config(), settings=settings)
    document = build_document(inputs, "3.4.0")
    config = load(document)
    found = json.loads(contents_of(config, node_paths.FIRST_BOOT_ANNOTATIONS))
    assert (found[spelling], found[reported]) == (IMAGE, IMAGE)
    assert encapsulated_of(config)["spec"]["osImageURL"] == IMAGE
    served = json.loads(contents_of(config, node_paths.SERVED_CONFIG))
    assert served["spec"]["osImageURL"] == BASE
    assert document.image == IMAGE


def test_image_of_an_unreachable_registry_is_in_no_file(tmp_path: Path) -> None:
    settings = SourceSettings(needs_cluster=("registry.internal:5000",))
    inputs = read_inputs(
        tmp_path,
        make_pool(osImage=CLUSTER_IMAGE),
        make_config(image=CLUSTER_IMAGE),
        settings=settings,
    )
    document = build_document(inputs, "3.4.0")
    config = load(document)
    assert document.is_image_later
    assert encapsulated_of(config)["spec"]["osImageURL"] == ""
    assert b"registry.internal" not in contents_of(config, node_paths.FIRST_BOOT_ANNOTATIONS)


def test_encapsulated_config_has_an_empty_ignition_config(tmp_path: Path) -> None:
    inputs = read_inputs(tmp_path, make_pool(), make_config(NEW, make_file("/etc/a")))
    found = encapsulated_of(load(build_document(inputs, "3.4.0")))
    assert found["metadata"]["name"] == NEW
    assert found["spec"]["config"] == {"ignition": {"version": "3.4.0"}}
    assert found["spec"]["kernelArguments"] == ["quiet"]


def test_kernel_arguments_move_below_version_3_3_each_time_the_same(tmp_path: Path) -> None:
    arguments = {"shouldExist": ["a=1"]}
    inputs = read_inputs(tmp_path, make_pool(), make_config(kernelArguments=arguments))
    for _ in range(3):
        old = load(build_document(inputs, "3.2.0"))
        assert encapsulated_of(old)["spec"]["kernelArguments"] == ["quiet", "a=1"]
        assert "kernelArguments" not in old
        new = load(build_document(inputs, "3.3.0"))
        assert encapsulated_of(new)["spec"]["kernelArguments"] == ["quiet"]
        assert new["kernelArguments"] == arguments


def test_removed_kernel_arguments_need_version_3_3(tmp_path: Path) -> None:
    arguments = {"shouldNotExist": ["a=1"]}
    inputs = read_inputs(tmp_path, make_pool(), make_config(kernelArguments=arguments))
    with pytest.raises(VersionTooOldError, match=r"kernelArguments\.shouldNotExist.*3\.3\.0"):
        build_document(inputs, "3.2.0")


def test_own_files_at_the_added_paths_are_replaced(tmp_path: Path) -> None:
    paths = (
        node_paths.FIRST_BOOT_ANNOTATIONS,
        node_paths.KUBECONFIG,
        node_paths.KUBELET_CA,
        node_paths.ENCAPSULATED_CONFIG,
    )
    links = [{"path": node_paths.SERVED_CONFIG, "target": "/etc/other"}]
    config = make_config(NEW, *(make_file(path, "own") for path in paths))
    config["spec"]["config"]["storage"]["links"] = links
    inputs = read_inputs(tmp_path, make_pool(), config, make_controller_config())
    found = load(build_document(inputs, "3.5.0"), b"token")
    assert len(paths_of(found)) == len(set(paths_of(found)))
    assert contents_of(found, node_paths.KUBECONFIG) == b"token"
    assert contents_of(found, node_paths.KUBELET_CA) == b"kubelet ca"
    assert "links" not in found["storage"]


def test_own_kubeconfig_stays_without_one_of_the_server(tmp_path: Path) -> None:
    config = make_config(NEW, make_file(node_paths.KUBECONFIG, "own"))
    found = load(build_document(read_inputs(tmp_path, make_pool(), config), "3.5.0"))
    assert contents_of(found, node_paths.KUBECONFIG) == b"own"


def test_config_of_an_unknown_version_is_an_error(tmp_path: Path) -> None:
    config = make_config(ignition={"version": "3.6.0"})
    with pytest.raises(ConfigError, match=r"3\.6\.0"):
        build_document(read_inputs(tmp_path, make_pool(), config), "3.5.0")


@pytest.mark.parametrize(
    ("version", "file", "field"),
    [
        ("3.3.0", make_file("/etc/x") | {"mode": 0o1644}, "mode"),
        ("2.2.0", {"path": "/etc/x", "mode": 0o644}, "contents.source"),
    ],
)
def test_field_that_a_version_lacks_has_its_place_in_the_rendered_config(
    tmp_path: Path, version: str, file: Json, field: str
) -> None:
    """Files that the server replaces come before it in the rendered config."""
    files = [
        make_file(node_paths.KUBECONFIG),
        make_file("/etc/motd"),
        make_file(node_paths.SERVED_CONFIG),
        file,
    ]
    inputs = read_inputs(tmp_path, make_pool(), make_config(NEW, *files))
    with pytest.raises(VersionTooOldError, match=r"storage\.files\[3\]") as caught:
        build_document(inputs, version)
    assert caught.value.field == f"storage.files[3].{field}"
