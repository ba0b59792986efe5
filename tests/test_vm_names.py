"""Names of images in the OSTree repository of a virtual machine's disk."""

import pytest

from vmlab.guest.names import image_ref, layer_ref

REGISTRY = "docker_3A__2F__2F_quay_2E_io"


@pytest.mark.parametrize(
    ("pull_spec", "escaped"),
    [
        ("quay.io/os/node@sha256:0f", f"{REGISTRY}/os/node_40_sha256_3A_0f"),
        ("quay.io/os/my_node-1", f"{REGISTRY}/os/my__node-1"),
        ("quay.io/os//node/", f"{REGISTRY}/os/_2F_node_2F_"),
    ],
)
def test_image_is_named_as_bootc_names_it(pull_spec: str, escaped: str) -> None:
    assert image_ref(pull_spec) == f"ostree/container/image/{escaped}"


def test_layer_is_named_by_its_digest() -> None:
    assert layer_ref("sha256:0f") == "ostree/container/blob/sha256_3A_0f"
