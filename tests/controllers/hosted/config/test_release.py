"""Releases: what the command reads, the ConfigMaps, and what a NodePool reads back."""

import base64
import gzip
import json
import random
from typing import Any

import pytest

from tests.controllers.hosted.config import inputs
from tests.controllers.hosted.config.inputs import BASE, IMAGES, machine_config, make_release
from tests.fixtures import hosted
from treenail.api import object_meta
from treenail.api.hosted import annotations as hosted_key
from treenail.config import merge, node_paths
from treenail.controllers.hosted.config import release
from treenail.controllers.hosted.config.pool_config import PoolConfigError
from treenail.controllers.hosted.config.release import PULL_SECRET_PATH
from treenail.errors import ConfigError

Json = dict[str, Any]


def read_configs(*found: Json) -> tuple[release.Release, list[str]]:
    texts = [("base.json", "\n".join(map(json.dumps, found)))]
    return release.read_release(("images", json.dumps(IMAGES).encode()), texts)


def read_images(values: Json) -> release.Release:
    texts = [("base.json", json.dumps(BASE[0]))]
    return release.read_release(("images", json.dumps(values).encode()), texts)[0]


def make_large_release() -> list[Json]:
    """A release of two parts."""
    choose = random.Random(5)
    configs = [
        machine_config(f"02-{number}", {f"/etc/{number}": choose.randbytes(240_000).hex()})
        for number in range(3)
    ]
    return make_release(*BASE, *configs)


LARGE = make_large_release()


@pytest.mark.parametrize(("config_maps", "count"), [(make_release(), 1), (LARGE, 2)])
def test_release_reads_back_from_its_config_maps(config_maps: list[Json], count: int) -> None:
    assert len(config_maps) == count
    for config_map in config_maps:
        assert len(json.dumps(config_map)) <= release.PART_LIMIT
        assert config_map["metadata"]["labels"] == {hosted_key.RELEASE: inputs.VERSION}
        assert object_meta.is_object_name(config_map["metadata"]["name"])
    found = release.find_release(random.Random(1).sample(config_maps, count), hosted.RELEASE)
    assert found == read_configs(*(config.to_json() for config in found.configs))[0]
    assert [config.name for config in found.configs][:2] == ["00-worker", "01-worker-kubelet"]
    assert [*release.build_config_maps(found)] == config_maps


def change(number: int, **data: str) -> list[Json]:
    """The large release with another value in one part."""
    return [
        {**one, "data": {**one["data"], **data}} if index == number else one
        for index, one in enumerate(LARGE)
    ]


OTHER = make_release(releaseVersion="4.23.0")
BOMB_TEXT = base64.b64encode(gzip.compress(bytes(65 * 1024 * 1024))).decode()
BOMB = [{"data": {"releaseImage": "a", "part": "1", "digest": "0" * 64, "content": BOMB_TEXT}}]
RENAMED = [{**LARGE[0], "metadata": {**LARGE[0]["metadata"], "name": "copy"}}]


@pytest.mark.parametrize(
    ("config_maps", "image", "text"),
    [
        ([], hosted.RELEASE, f"expected all parts of release {hosted.RELEASE} , found none"),
        (OTHER, "quay.io/x", f"known releases: {hosted.RELEASE}"),
        (LARGE, "", "release (none)"),
        (LARGE[:1], hosted.RELEASE, "found 01/02 (data.content"),
        (LARGE[1:], hosted.RELEASE, "found 02/02 (data.content"),
        ([*LARGE, *RENAMED], hosted.RELEASE, "found 01/02, 01/02, 02/02 (data.content"),
        (change(0, digest="0" * 64), hosted.RELEASE, "the contents have another digest"),
        (change(0, digest="%"), hosted.RELEASE, "the contents have another digest"),
        (change(1, part="0"), hosted.RELEASE, "found 0, 01/02 (data.content"),
        (change(1, content="AAAA"), hosted.RELEASE, "data.content"),
        (change(1, content="%"), hosted.RELEASE, "expected base64"),
        ([*LARGE, *OTHER], hosted.RELEASE, "found 01/01, 01/02, 02/02 (data.content"),
        (make_release(), f"{hosted.RELEASE}-x", "found none"),
        ([{"data": {"releaseImage": "a"}}], "a", "found ? (data.content"),
        (BOMB, "a", "more than 67108864 bytes when decompressed"),
    ],
)  # fmt: skip
def test_incomplete_release_is_a_condition_with_the_command(
    config_maps: list[Json], image: str, text: str
) -> None:
    with pytest.raises(PoolConfigError) as caught:
        release.find_release(config_maps, image)
    error = caught.value
    assert (error.reason, error.condition) == ("ReleaseBaseMissing", "ValidMachineConfig")
    assert text in str(error)
    assert "treenail-controller hosted release --configs DIR --images FILE" in error.remedy


def test_stream_of_the_pool_chooses_the_release() -> None:
    made = [*make_release(), *make_release(**inputs.STREAM)]
    names = {one["metadata"]["name"] for one in made}
    assert names == {"treenail-release-4.22.1-1", "treenail-release-4.22.1-rhel-10-1"}
    for stream, image in (("", IMAGES), ("rhel-10", inputs.STREAM)):
        found = release.find_release(made, hosted.RELEASE, stream)
        assert found.os_image == image["baseOSContainerImage"]
    with pytest.raises(PoolConfigError, match=r"all parts of release .* rhel-11, found none"):
        release.find_release(made, hosted.RELEASE, "rhel-11")


def test_same_release_is_parsed_once() -> None:
    made = make_release()
    assert release.find_release(made, hosted.RELEASE) is release.find_release(made, hosted.RELEASE)


def pool() -> Json:
    return {
        "apiVersion": "machineconfiguration.openshift.io/v1",
        "kind": "MachineConfigPool",
        "metadata": {"name": "worker"},
    }


def with_labels(labels: Json) -> Json:
    config = machine_config("02-a")
    return {**config, "metadata": {"name": "02-a", "labels": labels}}


OWNER = {
    "apiVersion": "machineconfiguration.openshift.io/v1", "kind": "MachineConfigPool",
    "name": "worker", "uid": "1", "controller": True,
}  # fmt: skip
RENDERED = machine_config("rendered-worker-1")
RENDERED["metadata"]["ownerReferences"] = [OWNER]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            [with_labels({merge.ROLE: "master"})],
            "MachineConfig 02-a: expected a Mach",
        ),
        ([with_labels({})], f"with label {merge.ROLE}: worker"),
        (
            [machine_config("02-a"), machine_config("02-a")],
            "document 2: MachineConfig 02-a is a",
        ),
        ([pool()], "MachineConfigPool worker: expected a MachineConfig"),
        ([machine_config("a", {PULL_SECRET_PATH: "x"})], "has none of /etc/kubernetes/kub"),
        ([machine_config("a", {node_paths.KUBECONFIG: "x"})], "has none of /etc/kubernetes/kub"),
        ([machine_config("")], "has no metadata.name"),
        ([RENDERED], "that is not rendered"),
        ([machine_config("02-a", kernelType="fast")], "MachineConfig 02-a: spec.kernelType: "),
        ([], "couldn't find any MachineConfigs"),
    ],
)
def test_base_config_is_refused_with_its_place(found: list[Json], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_configs(*found)
    assert text in str(caught.value)


def test_base_keeps_no_trace_of_its_cluster() -> None:
    config = machine_config("00-worker", {"/etc/base": "x"}, fipz=True)
    config["metadata"] |= {
        "resourceVersion": "5", "creationTimestamp": hosted.SINCE, "generation": 2,
        "annotations": {merge.GENERATED_BY: "v4", "kubectl.kubernetes.io/x": "topsecret"},
    }  # fmt: skip
    other = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}
    listed = {"apiVersion": "v1", "kind": "List", "items": [config, other]}
    read, warnings = read_configs(listed)
    (base,) = read.configs
    assert base.metadata.annotations == {merge.GENERATED_BY: "v4"}
    assert base.metadata.created == ""
    assert "topsecret" not in json.dumps(read.to_json())
    unknown, ignored = warnings
    assert "MachineConfig 00-worker: spec.fipz: ignored" in unknown
    assert ignored == "ignored: ConfigMap"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"osImage": "x"}, "images.osImage"),
        ({"releaseImage": None}, "images.releaseImage: expected a string"),
        ({"releaseVersion": None}, "images.releaseVersion: expected"),
        ({"releaseVersion": "4.22+x"}, "images: releaseVersion, osImageStream: expected a-z"),
        ({"releaseVersion": "a" * 64}, "images: releaseVersion, osImageStream: expected a-z"),
        ({"baseOSContainerImage": "quay.io/a:1"}, "images is 'quay.io/a:1'"),
        ({"osImageStream": "A"}, "found 4.22.1, A"),
        ({"osImageStream": 1}, "images.osImageStream: "),
    ],
)
def test_images_are_refused_with_the_field(changes: Json, text: str) -> None:
    values = {key: value for key, value in {**IMAGES, **changes}.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        read_images(values)
    assert text in str(caught.value)
