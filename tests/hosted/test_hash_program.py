"""HyperShift's config generator: what enters its hashes, and which inputs it refuses.

treenail compares these hashes and computes none. A generator of treenail's
must agree with this program.
"""

import json
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest

from tests.fixtures import hosted
from tests.hosted import programs
from treenail.api.hosted import annotations as hosted_key

pytestmark = [pytest.mark.integration]

Json = dict[str, Any]
_FNV_OFFSET, _FNV_PRIME = 0x811C9DC5, 0x01000193
_RELEASE = "4.21.0"


@pytest.fixture(autouse=True)
def find_hash() -> None:
    programs.find_program("hash")


def hash_text(text: str) -> str:
    """Return FNV-1a of 32 bits in hexadecimal."""
    value = _FNV_OFFSET
    for byte in text.encode():
        value = (value ^ byte) * _FNV_PRIME % 2**32
    return f"{value:08x}"


def ask(requests: Sequence[Json]) -> list[Json]:
    """Return the answer to each request."""
    text = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run(
        [programs.find_program("hash")],
        input=text,
        capture_output=True,
        check=True,
        text=True,
        timeout=120,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def make_config_map(
    name: str, *documents: str, namespace: str = hosted.NAMESPACE, **labels: str
) -> Json:
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "data": {"config": "\n---\n".join(documents)},
    }


def make_document(kind: str, name: str, group: str = "machineconfiguration.openshift.io/v1") -> str:
    spec = {"config": {"ignition": {"version": "3.2.0"}}} if kind == "MachineConfig" else {}
    body = {"apiVersion": group, "kind": kind, "metadata": {"name": name}, "spec": spec}
    return json.dumps(body)


def make_request(*maps: Json, cores: int = 3, **changes: Any) -> Json:
    """A request with the ConfigMaps of the user, and those of the control plane."""
    core = [
        make_config_map(
            f"core-{number}",
            make_document("MachineConfig", f"core-{number}"),
            namespace=hosted.CONTROL_PLANE,
            **{hosted_key.CORE_CONFIG: "true"},
        )
        for number in range(cores)
    ]
    names = [{"name": each["metadata"]["name"]} for each in maps]
    return {
        "hostedCluster": hosted.make_hosted_cluster(),
        "nodePool": hosted.make_node_pool(config=names),
        "configMaps": [*maps, *core],
        "releaseVersion": _RELEASE,
        "haproxy": "",
        "controlPlaneNamespace": hosted.CONTROL_PLANE,
        **changes,
    }


def test_hashes_are_those_of_the_text_and_the_names() -> None:
    config = make_config_map("one", make_document("MachineConfig", "50-a"))
    (plain, other) = ask([make_request(config), make_request(config, releaseVersion="4.21.1")])
    assert plain["hashWithoutVersion"] == hash_text(plain["config"] + "pull-secret")
    assert other["hashWithoutVersion"] == plain["hashWithoutVersion"]
    assert other["config"] == plain["config"]
    assert other["hash"] != plain["hash"]


def test_order_of_documents_does_not_matter() -> None:
    first, second = (make_document("MachineConfig", name) for name in ("50-a", "50-b"))
    answers = ask(
        [
            make_request(make_config_map("one", first, second)),
            make_request(make_config_map("one", second, "", first)),
            make_request(make_config_map("one", second), make_config_map("two", first)),
        ]
    )
    assert len({json.dumps(each) for each in answers}) == 1
    assert answers[0]["config"].count("machineconfiguration.openshift.io/role: worker") == 5


@pytest.mark.parametrize(
    ("documents", "error"),
    [
        ([make_document("MachineOSConfig", "a")], "unsupported config type"),
        ([make_document("MachineConfigPool", "a")], "unsupported config type"),
        ([make_document("ConfigMap", "a", "v1")], "no kind"),
        (["- a list"], "error decoding config"),
    ],
)
def test_other_kinds_are_refused(documents: list[str], error: str) -> None:
    (answer,) = ask([make_request(make_config_map("one", *documents))])
    assert error in answer["error"]


def test_number_of_core_config_maps_is_exact() -> None:
    answers = ask([make_request(cores=cores) for cores in (2, 3, 4)])
    assert [each.get("error") for each in answers] == [
        "expected 3 core ignition configs, found 2",
        None,
        "expected 3 core ignition configs, found 4",
    ]
