"""MachineConfigs round-trip without loss."""

import contextlib

import pytest
from hypothesis import given

from tests.api.fuzzing import damaged, fuzz, json_objects
from tests.oracle import needs_oracle, rendered
from treenail.api.documents import dump_document, load_document
from treenail.api.machineconfig import MachineConfig
from treenail.api.object_meta import ObjectMeta, OwnerReference
from treenail.errors import ConfigError

FULL = {
    "apiVersion": "machineconfiguration.openshift.io/v1",
    "kind": "MachineConfig",
    "metadata": {
        "name": "rendered-worker-a",
        "uid": "u",
        "resourceVersion": "7",
        "generation": 2,
        "labels": {"a": "b"},
        "annotations": {"machineconfiguration.openshift.io/x": "y"},
        "ownerReferences": [
            {"apiVersion": "v1", "kind": "Pool", "name": "worker", "uid": "p", "controller": True}
        ],
        "managedFields": [{"manager": "m"}],
    },
    "spec": {
        "config": {"ignition": {"version": "3.5.0"}},
        "osImageURL": "registry.example.com/os@sha256:1",
        "baseOSExtensionsContainerImage": "registry.example.com/ext@sha256:2",
        "kernelArguments": ["a=1", "b"],
        "kernelType": "realtime",
        "extensions": ["usbguard"],
        "fips": True,
        "newField": {"x": 1},
    },
    "newTop": [1],
}


def refusal(document: object) -> str:
    with pytest.raises(ConfigError) as caught:
        MachineConfig.from_json(document)
    return str(caught.value)


def with_spec(**spec: object) -> dict[str, object]:
    return {"kind": "MachineConfig", "metadata": {"name": "a"}, "spec": spec}


def test_every_field_is_read() -> None:
    assert MachineConfig.from_json(FULL) == MachineConfig(
        metadata=ObjectMeta(
            name="rendered-worker-a",
            uid="u",
            resource_version="7",
            generation=2,
            labels={"a": "b"},
            annotations={"machineconfiguration.openshift.io/x": "y"},
            owner_references=(OwnerReference("v1", "Pool", "worker", "p", controller=True),),
            others={"managedFields": [{"manager": "m"}]},
        ),
        config={"ignition": {"version": "3.5.0"}},
        os_image_url="registry.example.com/os@sha256:1",
        extensions_image="registry.example.com/ext@sha256:2",
        kernel_arguments=("a=1", "b"),
        kernel_type="realtime",
        extensions=("usbguard",),
        fips=True,
        others={"newTop": [1]},
        spec_others={"newField": {"x": 1}},
    )


def test_unknown_fields_survive_a_round_trip() -> None:
    assert MachineConfig.from_json(FULL).to_json() == FULL


@pytest.mark.parametrize("document", [with_spec(), {"spec": None}, {}, with_spec(config=None)])
def test_empty_spec_requests_nothing(document: dict[str, object]) -> None:
    found = MachineConfig.from_json(document)
    assert (found.config, found.kernel_arguments, found.fips) == (None, (), False)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "expected an object, found a list"),
        ({"kind": "Pod"}, "kind: expected MachineConfig, found 'Pod'"),
        (with_spec(fips="yes"), "spec.fips: expected true or false, found a string"),
        (with_spec(config=[]), "spec.config: expected an object, found a list"),
        (with_spec(kernelArguments="a"), "spec.kernelArguments: expected a list, found a string"),
        (with_spec(extensions=[1]), "spec.extensions[0]: expected a string, found 1"),
        ({"metadata": {"labels": {"a": 1}}}, "metadata.labels.a: expected a string, found 1"),
    ],
)
def test_wrong_field_is_rejected_with_its_location(document: object, message: str) -> None:
    assert refusal(document) == message


@needs_oracle
def test_rendered_configs_of_a_real_cluster_round_trip_without_loss() -> None:
    for path in rendered():
        document = load_document(path.read_text(), where=path.name)
        written = MachineConfig.from_json(document).to_json()
        assert written == document
        assert load_document(dump_document(written), where=path.name) == document


def test_contents_are_absent_from_repr() -> None:
    document = with_spec(config={"passwd": {"users": [{"passwordHash": "canary"}]}})
    assert "canary" not in repr(MachineConfig.from_json(document))


@fuzz
@given(damaged(FULL))
def test_any_damaged_config_is_read_stably_or_rejected(document: object) -> None:
    with contextlib.suppress(ConfigError):
        config = MachineConfig.from_json(document)
        assert MachineConfig.from_json(config.to_json()) == config


@fuzz
@given(json_objects)
def test_any_object_is_read_or_rejected(document: object) -> None:
    with contextlib.suppress(ConfigError):
        MachineConfig.from_json(document)
