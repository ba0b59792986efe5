"""Tests that names equal those of the Go implementation, with recorded bytes and real configs."""

import json
from typing import Any

import pytest
import yaml

from tests.oracle import DATA, ROOT, needs_oracle, records, render_cases
from treenail.config.rendered_name import digest, encode_yaml, rendered_name

RECORDED = [json.loads(line) for line in (DATA / "goyaml.jsonl").read_text("utf-8").splitlines()]
RENDERED = [case for case in render_cases() if "specYAML" in case]


@pytest.mark.parametrize("record", RECORDED, ids=lambda record: repr(record["value"])[:40])
def test_encoded_bytes_equal_those_of_go_yaml(record: dict[str, Any]) -> None:
    assert encode_yaml(record["value"]).decode() == record["yaml"]


@pytest.mark.parametrize("case", RENDERED, ids=lambda case: case["case"])
def test_rendered_configs_have_the_bytes_and_name_of_go(case: dict[str, Any]) -> None:
    assert encode_yaml(case["spec"]).decode() == case["specYAML"]
    assert rendered_name(case["pool"]["metadata"]["name"], case["spec"]) == case["name"]


@needs_oracle
def test_configs_of_real_cluster_have_the_name_of_go() -> None:
    paths = sorted((ROOT / "bootstrap" / "output" / "machine-configs").glob("*.yaml"))
    assert len(paths) == 3
    for path in paths:
        document = yaml.safe_load(path.read_text("utf-8"))
        name = document["metadata"]["name"]
        pool = document["metadata"]["ownerReferences"][0]["name"]
        assert rendered_name(pool, document["spec"]) == name


@needs_oracle
def test_digest_of_several_documents_equals_that_of_image_build() -> None:
    # The Machine Config Operator names builds by the same hash of three documents.
    compared = 0
    for record in records("mosb"):
        if record["err"]:
            continue
        build, config, machine_config = record["mosc"], record["pool"], record["mc"]
        release = "machineconfiguration.openshift.io/release-image-version"
        images = {
            "BaseOSContainerImage": machine_config["spec"]["osImageURL"],
            "BaseOSExtensionsContainerImage": machine_config["spec"][
                "baseOSExtensionsContainerImage"
            ],
            "OSImageURL": "",
            "ReleaseVersion": machine_config["metadata"]["annotations"][release],
        }
        found = digest(config["spec"].get("configuration") or {}, build["spec"], images)
        assert f"{build['metadata']['name']}-{found}" == record["out"]["metadata"]["name"]
        compared += 1
    assert compared == 48


def test_order_of_keys_does_not_change_the_name() -> None:
    spec = {"config": {"ignition": {"version": "3.5.0"}}, "fips": False, "osImageURL": ""}
    assert rendered_name("worker", spec) == rendered_name("worker", dict(reversed(spec.items())))


def test_order_of_kernel_arguments_and_empty_values_change_the_name() -> None:
    names = {
        digest({"kernelArguments": ["a", "b"]}),
        digest({"kernelArguments": ["b", "a"]}),
        digest({"kernelArguments": ["a", "b"], "extensions": []}),
        digest({"kernelArguments": ["a", "b"], "extensions": None}),
    }
    assert len(names) == 4


@pytest.mark.parametrize(
    "value", [{"y": 1}, {"a-b": 1}, {"": 1}, {"ä": 1}, {"a": 1.5}, {"a": ["x", {"on": 1}]}]
)
def test_value_outside_kubernetes_structures_raises_value_error(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="structure"):
        encode_yaml(value)


def test_keys_with_a_number_are_sorted_by_it() -> None:
    value = {"tpm10": 1, "tpm2": 2, "tpm": 3, "tpms": 4}
    assert encode_yaml(value) == b"tpm: 3\ntpm2: 2\ntpm10: 1\ntpms: 4\n"
