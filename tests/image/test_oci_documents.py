"""Appending a layer to documents of OCI and Docker, and lists of manifests."""

import json
from contextlib import suppress

import pytest

from tests.image.test_config_layer import make_config, make_file
from treenail.errors import ConfigError
from treenail.image.config_layer import make_config_layer
from treenail.image.oci.documents import (
    ImageInstance,
    ImageLabels,
    append_layer,
    make_index,
    read_labels,
)
from treenail.oci_content import (
    DOCKER_LIST,
    DOCKER_MANIFEST,
    OCI_INDEX,
    OCI_MANIFEST,
    compute_digest,
)

LAYER = make_config_layer(make_config(files=[make_file("/etc/app.conf")]))
NEXT = make_config_layer(make_config(files=[make_file("/etc/app.conf", "changed")]))
LABELS = ImageLabels("rendered-worker-a", "worker", "quay.io/os@sha256:1").to_map()
BASE_LAYER = {"mediaType": "x", "digest": compute_digest(b"base"), "size": 4}
CONFIG = {
    "architecture": "amd64",
    "os": "linux",
    "created": "2026-01-01T00:00:00Z",
    "config": {"Labels": {"ostree.final-diffid": "sha256:1", "machineconfig": "old"}, "Cmd": ["x"]},
    "rootfs": {"type": "layers", "diff_ids": [compute_digest(b"plain")]},
    "history": [{"created_by": "base"}],
    "unknown": 1,
}


def make_manifest(media_type: str) -> bytes:
    config = {"mediaType": f"{media_type}.config", "digest": compute_digest(b"c"), "size": 1}
    return json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": media_type,
            "config": config,
            "layers": [BASE_LAYER],
            "annotations": {"a": "b"},
        }
    ).encode()


@pytest.mark.parametrize(
    ("media_type", "layer_type"),
    [
        (OCI_MANIFEST, "application/vnd.oci.image.layer.v1.tar+gzip"),
        (DOCKER_MANIFEST, "application/vnd.docker.image.rootfs.diff.tar.gzip"),
    ],
)
def test_layer_and_labels_are_added_and_the_rest_stays(media_type: str, layer_type: str) -> None:
    base = make_manifest(media_type)
    found = append_layer(media_type, base, json.dumps(CONFIG).encode(), LAYER, LABELS)
    manifest, config = json.loads(found.manifest), json.loads(found.config)
    assert manifest["layers"] == [
        BASE_LAYER,
        {"mediaType": layer_type, "digest": LAYER.digest, "size": LAYER.size},
    ]
    assert manifest["config"] == {
        "mediaType": f"{media_type}.config",
        "digest": compute_digest(found.config),
        "size": len(found.config),
    }
    assert manifest["annotations"] == {"a": "b"}
    assert config["rootfs"]["diff_ids"] == [compute_digest(b"plain"), LAYER.diff_id]
    assert config["unknown"] == 1
    assert config["config"]["Cmd"] == ["x"]
    assert len(config["history"]) == 2
    assert read_labels(found.config) == {
        "ostree.final-diffid": "sha256:1",
        "machineconfig": "rendered-worker-a",
        "machineconfigpool": "worker",
        "baseOSContainerImage": "quay.io/os@sha256:1",
        "io.treenail.config-layer": LAYER.diff_id,
    }
    again = append_layer(media_type, base, json.dumps(CONFIG).encode(), LAYER, LABELS)
    assert again == found


def test_next_config_replaces_the_config_layer() -> None:
    base, config = make_manifest(OCI_MANIFEST), json.dumps(CONFIG).encode()
    first = append_layer(OCI_MANIFEST, base, config, LAYER, LABELS)
    direct = append_layer(OCI_MANIFEST, base, config, NEXT, LABELS)
    assert append_layer(OCI_MANIFEST, first.manifest, first.config, NEXT, LABELS) == direct


@pytest.mark.parametrize(
    ("media_type", "manifest", "config"),
    [
        (OCI_INDEX, make_manifest(OCI_INDEX), json.dumps(CONFIG).encode()),
        (OCI_MANIFEST, b"[]", json.dumps(CONFIG).encode()),
        (OCI_MANIFEST, make_manifest(OCI_MANIFEST), b"no json"),
        (OCI_MANIFEST, make_manifest(OCI_MANIFEST), b"{}"),
        (OCI_MANIFEST, make_manifest(OCI_MANIFEST), b'{"rootfs": {"diff_ids": []}}'),
    ],
)
def test_invalid_base_is_refused(media_type: str, manifest: bytes, config: bytes) -> None:
    with pytest.raises(ConfigError, match="cannot append a layer"):
        append_layer(media_type, manifest, config, LAYER, LABELS)


def test_deeply_nested_config_is_kept_or_refused() -> None:
    manifest = make_manifest(OCI_MANIFEST)

    def append(depth: int) -> bytes:
        nested = "[" * depth + "]" * depth
        config = json.dumps({**CONFIG, "config": {"deep": None}}).replace("null", nested)
        return append_layer(OCI_MANIFEST, manifest, config.encode(), LAYER, LABELS).config

    assert b"[" * 300 in append(300)
    for depth in range(800, 1100):
        with suppress(ConfigError):
            assert b"[" * depth in append(depth)


def test_list_is_ordered_and_has_the_type_of_its_images() -> None:
    arm = ImageInstance(OCI_MANIFEST, compute_digest(b"arm"), 3, "arm64")
    amd = ImageInstance(OCI_MANIFEST, compute_digest(b"amd"), 3, "amd64")
    media_type, content = make_index([arm, amd])
    assert (media_type, content) == make_index([amd, arm])
    assert media_type == OCI_INDEX
    names = [each["platform"]["architecture"] for each in json.loads(content)["manifests"]]
    assert names == ["amd64", "arm64"]
    docker = ImageInstance(DOCKER_MANIFEST, compute_digest(b"amd"), 3, "amd64")
    assert make_index([docker])[0] == DOCKER_LIST
    for instances in ([], [amd, amd]):
        with pytest.raises(ConfigError, match="one image per architecture"):
            make_index(instances)
