import base64

import pytest

from treenail.api.controllerconfig import ControllerConfigContents
from treenail.errors import ConfigError


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_controllerconfig_with_every_field_is_read():
    document = {
        "spec": {
            "kubeAPIServerServingCAData": b64("kubelet"),
            "cloudProviderCAData": b64("cloud"),
            "imageRegistryBundleData": [{"file": "registry.example..5000", "data": b64("1")}],
            "imageRegistryBundleUserData": [{"file": "other.example", "data": b64("2")}],
            "internalRegistryPullSecret": b64("{}"),
            "images": {},
        }
    }

    assert ControllerConfigContents.from_json(document) == ControllerConfigContents(
        kubelet_ca=b"kubelet",
        cloud_ca=b"cloud",
        registry_cas={"registry.example:5000": b"1", "other.example": b"2"},
        pull_secret=b"{}",
    )


def test_controllerconfig_with_null_or_missing_fields_is_empty():
    document = {"spec": {"cloudProviderCAData": None, "imageRegistryBundleData": None}}

    assert ControllerConfigContents.from_json(document) == ControllerConfigContents()


@pytest.mark.parametrize("name", ["../etc", "a/b", "", ".", "a..5..6", "-", "a..123456"])
def test_registry_with_invalid_name_is_rejected(name):
    with pytest.raises(ConfigError, match="imageRegistryBundleData"):
        ControllerConfigContents.from_json(
            {"spec": {"imageRegistryBundleData": [{"file": name, "data": ""}]}}
        )


def test_invalid_base64_is_rejected_without_its_value():
    with pytest.raises(ConfigError) as refused:
        ControllerConfigContents.from_json({"spec": {"internalRegistryPullSecret": "canary!"}})

    assert str(refused.value) == "ControllerConfig.spec.internalRegistryPullSecret: expected base64"
