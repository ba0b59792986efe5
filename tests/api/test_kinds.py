"""Objects of a user's files that have no effect are named; those of other programs are not."""

import pytest

from treenail.api import kinds
from treenail.api.decode import Fields

OWN = "machineconfiguration.openshift.io/v1"
CASES = [
    # Read, or of other programs: nothing to say.
    ("MachineConfig", OWN, ""),
    ("RolloutPolicy", "treenail.io/v1alpha1", ""),
    ("OSImageStream", OWN, ""),
    *((kind, version, "") for kind, version in kinds.GENERATOR_KINDS.items()),
    ("MachineConfigNode", OWN, ""),
    ("MachineOSBuild", OWN, ""),
    ("Secret", "v1", ""),
    ("Deployment", "apps/v1", ""),
    ("MachineSet", "machine.openshift.io/v1beta1", ""),
    ("MachineConfig", "talos.dev/v1alpha1", ""),
    ("ControllerConfig", "pkg.crossplane.io/v1alpha1", ""),
    ("Infrastructure", "config.openshift.io/v1", ""),
    ("ImageRegistry", "config.openshift.io/v1", ""),
    ("Image", "image.openshift.io/v1", ""),
    ("KubeletConfig", "kubelet.config.k8s.io/v1beta1", ""),
    ("PinnedImageSet", OWN, ""),
    ("", "", ""),
    # An API server accepts them, and treenail does not read them.
    *(
        (kind, f"{group}/v1", f"ignored: treenail reads no {kind}; ")
        for kind, group in (("InternalReleaseImage", kinds.GROUP),)
    ),
    # An API server refuses them.
    ("MachineConfg", OWN, "unknown kind 'MachineConfg'; did you mean MachineConfig?"),
    ("machineconfig", OWN, "unknown kind 'machineconfig'; did you mean MachineConfig?"),
    ("MachineConfigs", OWN, "unknown kind 'MachineConfigs'; did you mean MachineConfig?"),
    ("MachineconfigPool", OWN, "unknown kind 'MachineconfigPool'; did you mean MachineConfigPool?"),
    ("KubeletConfg", OWN, "unknown kind 'KubeletConfg'; did you mean KubeletConfig?"),
    ("RolloutPolicie", "treenail.io/v1alpha1", "unknown kind 'RolloutPolicie'; did you mean Roll"),
    ("MachineConfg", "v1", "unknown kind 'MachineConfg'; did you mean MachineConfig?"),
    ("MachineConfg", "", "unknown kind 'MachineConfg'; did you mean MachineConfig?"),
    ("Frobnicate", OWN, "unknown kind 'Frobnicate'; use one of: MachineConfig, "),
    ("", OWN, "unknown kind ''; use one of: MachineConfig, "),
    ("MachineConfig", "v1", f"expected apiVersion {OWN}, found v1; set apiVersion: {OWN}"),
    ("MachineConfig", "", f"expected apiVersion {OWN}, found nothing; set apiVersion: {OWN}"),
    ("MachineConfig", f"{OWN}beta1", f"expected apiVersion {OWN}, found {OWN}beta1; set "),
    ("MachineConfig", "machineconfig.openshift.io/v1", f"expected apiVersion {OWN}, found machine"),
    ("RolloutPolicy", OWN, f"expected apiVersion treenail.io/v1alpha1, found {OWN}; set "),
    ("RolloutPolicy", "treenail.io/v1", "expected apiVersion treenail.io/v1alpha1, found treenail"),
]


@pytest.mark.parametrize(("kind", "api_version", "message"), CASES)
def test_object_that_is_not_read_is_named(kind: str, api_version: str, message: str) -> None:
    unread = kinds.find_unread_object(kind, api_version)
    assert str(unread or "").startswith(message)
    assert bool(unread) == bool(message)
    assert unread is None or unread.is_mistake != message.startswith("ignored")


@pytest.mark.parametrize(
    ("document", "items"),
    [
        ({"kind": "List", "apiVersion": "v1", "items": [{"kind": "A"}]}, [("A", "")]),
        ({"kind": "List", "apiVersion": "v1", "items": [{}]}, [("", "")]),
        ({"kind": "MachineConfigList", "apiVersion": OWN, "items": [{}]}, [("MachineConfig", OWN)]),
        ({"kind": "AList", "apiVersion": "a/v1", "items": [{"kind": "B"}]}, [("B", "a/v1")]),
        ({"kind": "AList"}, None),
        ({"kind": "A", "items": []}, None),
    ],
)
def test_item_of_a_list_has_its_kind(
    document: dict[str, object], items: list[tuple[str, str]] | None
) -> None:
    listed = kinds.list_items(Fields(document, ""))
    assert items == (
        None
        if listed is None
        else [(item.get_text("kind"), item.get_text("apiVersion")) for item in listed]
    )
