"""Tests of the merge of MachineConfigs: recorded merges, each rule, and the provenance."""

import random
from typing import Any

import pytest

from tests.oracle import needs_oracle, records, render_cases
from treenail.api.machineconfig import MachineConfig
from treenail.config.merge import (
    GENERATED_BY,
    ROLE,
    DefaultImages,
    MergedConfig,
    merge_machine_configs,
    sort_configs,
)
from treenail.config.provenance import Provenance
from treenail.config.rendered_name import rendered_name
from treenail.errors import ConfigError

EMPTY = {"ignition": {"version": "3.5.0"}}


def machine_config(name: str, role: str = "worker", **spec: Any) -> MachineConfig:
    """Return a MachineConfig from Ignition sections by name, with the version added."""
    sections = {
        key: spec.pop(key) for key in ("storage", "systemd", "passwd", "ignition") if key in spec
    }
    arguments = spec.pop("arguments", None)
    if arguments is not None:
        sections["kernelArguments"] = arguments
    if sections:
        header = {"version": "3.5.0", **sections.pop("ignition", {})}
        spec["config"] = {"ignition": header, **sections}
    annotations = spec.pop("annotations", {})
    return MachineConfig.from_json(
        {
            "metadata": {"name": name, "labels": {ROLE: role}, "annotations": annotations},
            "spec": spec,
        }
    )


def files(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"files": list(entries)}


def merged(*configs: MachineConfig) -> MergedConfig:
    return merge_machine_configs(configs, DefaultImages("base", "extensions"))


def config(*configs: MachineConfig) -> Any:
    return merged(*configs).spec["config"]


@needs_oracle
def test_recorded_configs_merge_as_recorded() -> None:
    found = records("merge")
    for record in found:
        stream = record["stream"]
        base = DefaultImages(
            record["baseOSContainerImage"], record["baseOSExtensionsContainerImage"]
        )
        if stream:
            base = DefaultImages(stream["osImage"], stream.get("osExtensionsImage", ""))
        configs = [MachineConfig.from_json(each) for each in record["configs"]]
        expected = record["out"]["spec"]
        assert merge_machine_configs(configs, base).spec == expected
        if len({each.name for each in configs}) == len(configs):
            random.Random(0).shuffle(configs)
            assert merge_machine_configs(configs, base).spec == expected
    assert len(found) == 18


@pytest.mark.parametrize("case", render_cases(), ids=lambda case: case["case"])
def test_rendered_configs_have_the_name_of_go(case: dict[str, Any]) -> None:
    images = case["controllerconfig"]["spec"]
    base = DefaultImages(images["baseOSContainerImage"], images["baseOSExtensionsContainerImage"])
    configs = [MachineConfig.from_json(each) for each in case["machineconfigs"]]
    if case["case"] == "kernelType invalid":
        return  # the validation before the merge rejects this one
    if "error" in case:
        with pytest.raises(ConfigError, match="MachineConfig 10: "):
            merge_machine_configs(configs, base)
        return
    found = merge_machine_configs(configs, base)
    assert found.spec == case["spec"]
    assert rendered_name(case["pool"]["metadata"]["name"], found.spec) == case["name"]
    overridden = "machineconfiguration.openshift.io/os-image-url-overridden" in case["annotations"]
    assert found.has_os_image_override is overridden


def test_worker_comes_first_and_names_sort_by_bytes() -> None:
    given = [
        machine_config("00-custom", "custom"),
        machine_config("é-worker"),
        machine_config("99-worker"),
        machine_config("Z-master", "master"),
        machine_config("a-worker"),
    ]
    names = [each.name for each in sort_configs(given)]
    assert names == ["99-worker", "a-worker", "é-worker", "00-custom", "Z-master"]
    assert merged(*given).sources == tuple(names)


def test_no_configs_give_the_empty_config_with_base_images() -> None:
    assert merged() == MergedConfig(
        spec={
            "osImageURL": "base",
            "baseOSExtensionsContainerImage": "extensions",
            "config": EMPTY,
            "kernelArguments": [],
            "kernelType": "default",
            "extensions": [],
            "fips": False,
        },
        sources=(),
        provenance=Provenance({}),
        has_os_image_override=False,
    )


def test_lists_are_concatenated_and_last_value_wins() -> None:
    found = merged(
        machine_config("1", kernelArguments=["a", "b"], extensions=["usbguard"], fips=True),
        machine_config("2", kernelArguments=["a"], kernelType="realtime"),
        machine_config("3", kernelType="default", osImageURL="mine", extensions=["usbguard"]),
    )
    assert found.spec["kernelArguments"] == ["a", "b", "a"]
    assert found.spec["extensions"] == ["usbguard", "usbguard"]
    assert found.spec["kernelType"] == "realtime"
    assert found.spec["fips"] is True
    assert (found.spec["osImageURL"], found.has_os_image_override) == ("mine", True)


@pytest.mark.parametrize(("annotation", "image"), [("v1", "base"), ("", "mine")])
def test_image_of_generated_config_is_no_override(annotation: str, image: str) -> None:
    mine = machine_config("1", osImageURL="mine", annotations={GENERATED_BY: annotation})
    assert merged(mine).spec["osImageURL"] == image


def test_entries_merge_in_place_and_new_ones_follow() -> None:
    one = machine_config(
        "1", storage=files({"path": "/a", "mode": 1}, {"path": "/b"}, {"path": "/c", "mode": 2})
    )
    two = machine_config(
        "2", storage=files({"path": "/d"}, {"path": "/c"}, {"path": "/a", "mode": 3})
    )
    assert [(file["path"], file.get("mode")) for file in config(one, two)["storage"]["files"]] == [
        ("/a", 3), ("/b", None), ("/c", 2), ("/d", None),
    ]  # fmt: skip


def test_entry_of_another_type_replaces_the_path() -> None:
    one = machine_config("1", storage={**files({"path": "/a"}, {"path": "/b"})})
    two = machine_config(
        "2",
        storage={
            "links": [{"path": "/a", "target": "/x"}],
            "directories": [{"path": "/b"}],
        },
    )
    assert config(one, two)["storage"] == {
        "links": [{"path": "/a", "target": "/x"}],
        "directories": [{"path": "/b"}],
    }
    back = machine_config("3", storage=files({"path": "/a", "overwrite": False}))
    assert config(one, two, back)["storage"] == {
        "files": [{"path": "/a", "overwrite": False}],
        "directories": [{"path": "/b"}],
    }


def test_texts_are_kept_once_and_appended_lists_grow() -> None:
    user = {"name": "core", "sshAuthorizedKeys": ["1", "2"], "groups": ["a"]}
    more = {"name": "core", "sshAuthorizedKeys": ["3", "1"], "shell": "/bin/sh"}
    disk = {"device": "/dev/sda", "format": "xfs", "mountOptions": ["ro"], "options": ["x"]}
    one = machine_config(
        "1",
        passwd={"users": [user]},
        storage={
            "filesystems": [disk],
            **files({"path": "/a", "append": [{"source": "data:,1"}]}),
        },
    )
    two = machine_config(
        "2",
        passwd={"users": [more]},
        storage={
            "filesystems": [{"device": "/dev/sda", "mountOptions": ["ro"]}],
            **files({"path": "/a", "append": [{"source": "data:,1"}]}),
        },
    )
    found = config(one, two)
    assert found["passwd"]["users"] == [
        {"name": "core", "sshAuthorizedKeys": ["1", "2", "3"], "groups": ["a"], "shell": "/bin/sh"}
    ]
    assert found["storage"]["filesystems"] == [{**disk, "mountOptions": ["ro", "ro"]}]
    (file,) = found["storage"]["files"]
    assert file["append"] == [{"source": "data:,1"}, {"source": "data:,1"}]


def test_kernel_argument_moves_to_the_last_list_with_it() -> None:
    one = machine_config("1", arguments={"shouldExist": ["a", "b"], "shouldNotExist": ["c"]})
    two = machine_config("2", arguments={"shouldExist": ["c"], "shouldNotExist": ["a"]})
    assert config(one, two)["kernelArguments"] == {
        "shouldExist": ["b", "c"],
        "shouldNotExist": ["a"],
    }


def test_header_without_value_removes_the_earlier_one() -> None:
    def fetched(*headers: dict[str, Any]) -> dict[str, Any]:
        contents = {"source": "https://example.com/a", "httpHeaders": list(headers)}
        return files({"path": "/a", "contents": contents})

    one = machine_config(
        "1", storage=fetched({"name": "x", "value": "1"}, {"name": "y", "value": "2"})
    )
    two = machine_config("2", storage=fetched({"name": "x"}))
    (file,) = config(one, two)["storage"]["files"]
    assert file["contents"]["httpHeaders"] == [{"name": "y", "value": "2"}]


def test_partitions_are_identified_by_number_or_label() -> None:
    def disk(*partitions: dict[str, Any]) -> dict[str, Any]:
        return {"disks": [{"device": "/dev/sda", "partitions": list(partitions)}]}

    one = machine_config("1", storage=disk({"number": 1, "sizeMiB": 10}, {"label": "var"}))
    two = machine_config(
        "2", storage=disk({"label": "var", "sizeMiB": 5}, {"number": 1, "label": "x"})
    )
    (found,) = config(one, two)["storage"]["disks"]
    assert found["partitions"] == [
        {"number": 1, "sizeMiB": 10, "label": "x"},
        {"label": "var", "sizeMiB": 5},
    ]


def test_file_without_contents_removes_compression_as_go_does() -> None:
    one = machine_config(
        "1", storage=files({"path": "/a", "contents": {"source": "data:,x", "compression": "gzip"}})
    )
    two = machine_config("2", storage=files({"path": "/a", "mode": 420}))
    (file,) = config(one, two)["storage"]["files"]
    assert file == {"path": "/a", "contents": {"source": "data:,x"}, "mode": 420, "overwrite": True}


def test_empty_compression_stays_only_without_merge() -> None:
    plain = files({"path": "/a", "contents": {"source": "data:,x", "compression": ""}})
    alone = config(machine_config("1", storage=plain))["storage"]["files"][0]["contents"]
    assert alone == {"source": "data:,x", "compression": ""}
    behind = config(machine_config("0"), machine_config("1", storage=plain))
    assert behind["storage"]["files"][0]["contents"] == {"source": "data:,x"}
    before = config(machine_config("1", storage=plain), machine_config("2", kernelType="realtime"))
    assert before["storage"]["files"][0]["contents"] == alone


def test_fields_unknown_to_ignition_are_dropped() -> None:
    found = config(
        machine_config(
            "1",
            storage={
                "disks": [{"device": "/dev/sda", "bogus": 1, "partitions": [{"x": 1, "number": 1}]}]
            },
            passwd={"users": [{"name": "core", "junk": {}}]},
        )
    )
    assert found == {
        **EMPTY,
        "storage": {"disks": [{"device": "/dev/sda", "partitions": [{"number": 1}]}]},
        "passwd": {"users": [{"name": "core"}]},
    }


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            {"storage": files({"path": "etc"})},
            "MachineConfig 1: spec.config.storage.files[0].path: expected an absolute path",
        ),
        (
            {"storage": {"disks": [{"device": "/dev/sda", "wipeTable": "yes"}]}},
            (
                "MachineConfig 1: spec.config.storage.disks[0].wipeTable: expected true or false, "
                "found a string"
            ),
        ),
        (
            {"storage": {"luks": [{"name": "r", "clevis": {"tang": "x"}}]}},
            "MachineConfig 1: spec.config.storage.luks[0].clevis.tang: expected a list",
        ),
        (
            {"storage": {"raid": [{"name": ["r"]}]}},
            "MachineConfig 1: spec.config.storage.raid[0].name: expected a string, found a list",
        ),
        (
            {"ignition": {"version": "3.9.0"}},
            "MachineConfig 1: spec.config.ignition.version: expected one of",
        ),
        (
            {"kernelType": "realtime", "extensions": ["kernel-devel"]},
            (
                "MachineConfig 1: the extension kernel-devel needs the default kernel, but "
                "MachineConfig 1 sets kernelType realtime"
            ),
        ),
    ],
)
def test_error_names_the_machine_config(spec: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        merged(machine_config("0"), machine_config("1", **spec))
    assert str(raised.value).startswith(sentence)


def test_provenance_lists_all_sources_of_each_entry() -> None:
    unit = {"name": "a.service", "contents": "x", "dropins": [{"name": "10.conf", "contents": "y"}]}
    provenance = merged(
        machine_config(
            "00-worker", storage=files({"path": "/a"}, {"path": "/b"}),
            systemd={"units": [unit]}, kernelArguments=["quiet"], osImageURL="other",
            annotations={GENERATED_BY: "v"},
        ),
        machine_config("50", storage={"links": [{"path": "/b", "target": "/a"}]}, fips=True),
        machine_config(
            "99", "infra", storage=files({"path": "/a", "mode": 1}),
            systemd={"units": [{"name": "a.service", "dropins": [{"name": "10.conf"}]}]},
            kernelArguments=["quiet"], kernelType="realtime", osImageURL="mine",
            extensions=["usbguard"], arguments={"shouldExist": ["x"]},
        ),
    ).provenance  # fmt: skip
    assert provenance.entries == {
        ("files", "/a"): ("00-worker", "99"),
        ("links", "/b"): ("50",),
        ("units", "a.service"): ("00-worker", "99"),
        ("dropins", "a.service/10.conf"): ("00-worker", "99"),
        ("kernelArguments.shouldExist", "x"): ("99",),
        ("kernelArguments", "quiet"): ("00-worker", "99"),
        ("fips", ""): ("50",),
        ("kernelType", ""): ("99",),
        ("osImageURL", ""): ("99",),
        ("extensions", "usbguard"): ("99",),
    }
    assert provenance.find_sources("files", "/a") == ("00-worker", "99")
    assert provenance.find_sources("files", "/none") == ()
    assert Provenance.from_json(provenance.to_json()) == provenance
    assert provenance.to_json()["sources"] == ["00-worker", "99", "50"]


@pytest.mark.parametrize(
    "document",
    [[], {"sources": [1]}, {"sources": [], "entries": {"files": {"/a": [0]}}}, {"entries": []}],
)
def test_invalid_provenance_raises_config_error(document: Any) -> None:
    with pytest.raises(ConfigError):
        Provenance.from_json(document)
