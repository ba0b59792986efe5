import base64
import json
from dataclasses import replace

import pytest

from treenail.api.component_names import PART_OF_LABELS
from treenail.api.decode import Json
from treenail.api.pullspec import parse_push_spec
from treenail.controllers.handover.handover_objects import (
    Handover,
    HandoverImage,
    HandoverResult,
    build_handover_secret,
    build_result_configmap,
    has_result,
    make_node_record,
    read_handover_secret,
    read_result_configmap,
)
from treenail.errors import ConfigError

CANARY = "hunter2canary"
DIGEST = "sha256:" + 64 * "a"
IMAGE = HandoverImage("master", DIGEST, parse_push_spec("quay.io/example/os:latest", where="p"))
BUILD: Json = {"kind": "MachineOSBuild", "metadata": {"name": "master-1"}}
HANDOVER = Handover((IMAGE,), "10.0.0.5:22625", "pem", "puller", CANARY, (BUILD,))


def make_secret(registry: object, objects: object = ()) -> Json:
    values = {"registry.json": registry, "objects.json": list(objects)}  # type: ignore[call-overload]
    return {
        "data": {
            name: base64.b64encode(json.dumps(each).encode()).decode()
            for name, each in values.items()
        }
    }


def test_secret_is_read_again() -> None:
    secret = build_handover_secret(HANDOVER)
    assert secret["metadata"] == {
        "name": "treenail-install-handover", "namespace": "treenail", "labels": PART_OF_LABELS,
    }  # fmt: skip
    assert read_handover_secret(secret) == HANDOVER
    assert IMAGE.final_image == f"quay.io/example/os@{DIGEST}"
    assert make_node_record(HANDOVER).repositories == ("quay.io/example/os",)


def test_secret_without_bootstrap_registry_is_read_again() -> None:
    handover = Handover((IMAGE,), objects=(BUILD,))
    assert read_handover_secret(build_handover_secret(handover)) == handover


@pytest.mark.parametrize(
    ("secret", "message"),
    [
        ({}, "expected a string, found nothing"),
        ({"data": {"registry.json": "%", "objects.json": ""}}, "not base64"),
        (make_secret([]), "expected an object"),
        (make_secret({"extra": 1}), "unknown field"),
        (make_secret({"images": [{"pool": "master"}]}), "images[0].digest"),
        (
            make_secret({"images": [{"pool": "m", "digest": "sha256:1", "pushSpec": "a/b:c"}]}),
            "cannot use digest",
        ),
        (
            make_secret({"images": 2 * [{"pool": "m", "digest": DIGEST, "pushSpec": "a/b:c"}]}),
            "one for each pool",
        ),
        (make_secret({"images": []}, [{"kind": "Pod"}]), "found 'Pod'"),
        (make_secret({"images": []}, [{"kind": "Secret"}]), "metadata.name"),
        (
            make_secret(
                {
                    "registry": "a/b",
                    "images": [{"pool": "m", "digest": DIGEST, "pushSpec": "a/b:c"}],
                }
            ),
            "the record of the bootstrap registry",
        ),
    ],
)
def test_invalid_secret_is_refused_without_its_content(secret: Json, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_handover_secret(secret)
    assert message in str(error.value)
    assert CANARY not in str(error.value)
    assert CANARY not in repr(HANDOVER)


def test_result_is_read_again() -> None:
    result = HandoverResult({"master": DIGEST}, "10.0.0.5:22625", "2026-01-01T00:00:00Z")
    assert read_result_configmap(build_result_configmap(result)) == result


def test_result_of_another_image_or_registry_is_none_of_this_hand_over() -> None:
    spec = parse_push_spec("registry.example.com/os/master:latest", where="test")
    first, second = ("sha256:" + each * 32 for each in ("ab", "cd"))
    handover = Handover((HandoverImage("master", first, spec),), "bootstrap.example.com:22625")
    result = HandoverResult({"master": first}, handover.registry, "")
    assert has_result(result, handover)
    assert not has_result(None, handover)
    assert not has_result(replace(result, digests={"master": second}), handover)
    assert not has_result(replace(result, digests={"worker": first}), handover)
    assert not has_result(replace(result, registry="older.example.com:22625"), handover)
