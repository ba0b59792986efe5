"""Tests that two configs differ exactly when their results on disk differ."""

import copy
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.configs import ENCODINGS, configs, ignition, with_files, with_units, with_users
from tests.api.fuzzing import fuzz
from treenail.api.ignition import parser as reader
from treenail.api.machineconfig import MachineConfig
from treenail.api.object_meta import ObjectMeta
from treenail.config.diff import ConfigDiff, EntryChange, OSAspect, compare_configs
from treenail.config.wanted_state import WantedState, WantedUnit, read_wanted_state


def of(document: object = None, **spec: object) -> WantedState:
    return read_wanted_state(MachineConfig(config=document, **spec))


def between(old: object, new: object) -> ConfigDiff:
    return compare_configs(of(old), of(new))


def file(path: str = "/etc/a", source: str = "data:,a", **values: object) -> dict[str, object]:
    return {"path": path, "contents": {"source": source}, **values}


def test_files_are_added_changed_and_removed() -> None:
    old = of(with_files(file("/same"), file("/changed"), file("/removed")))
    new = of(with_files(file("/added"), file("/changed", "data:,b"), file("/same")))
    found = compare_configs(old, new)
    assert found == ConfigDiff(
        files=(
            EntryChange("/changed", old.files["/changed"], new.files["/changed"]),
            EntryChange("/removed", old.files["/removed"], None),
            EntryChange("/added", None, new.files["/added"]),
        ),
        removed_paths=("/removed",),
    )
    assert not found.is_empty


@pytest.mark.parametrize(
    "values", [{"mode": 0o600}, {"user": {"id": 1}}, {"group": {"name": "wheel"}}]
)
def test_mode_and_owner_make_a_difference(values: dict[str, object]) -> None:
    assert [
        change.key for change in between(with_files(file()), with_files(file(**values))).files
    ] == ["/etc/a"]


@pytest.mark.parametrize(
    "values",
    [
        {"mode": 0o644},
        {"user": {"id": 0}},
        {"group": {"name": "root"}},
        {"overwrite": True},
        {"contents": {"source": "data:;base64,YQ=="}},
    ],
)
def test_equivalent_file_makes_no_difference(values: dict[str, object]) -> None:
    assert between(with_files(file()), with_files(file(**values))).is_empty


def test_encodings_of_the_same_bytes_make_no_difference() -> None:
    documents = [
        with_files({"path": "/a", "contents": encode(b"\x00%=\n")}) for encode in ENCODINGS
    ]
    for old in documents:
        for new in documents:
            assert between(old, new).is_empty


def test_file_that_becomes_drop_in_is_not_removed() -> None:
    path = "/etc/systemd/system/a.service.d/x.conf"
    old = with_files(file(path))
    new = with_units({"name": "a.service", "dropins": [{"name": "x.conf", "contents": "x"}]})
    found = between(old, new)
    assert [change.key for change in found.files] == [path]
    assert [change.key for change in found.units] == ["a.service"]
    assert found.removed_paths == ()
    assert between(new, old).removed_paths == ()


def test_removed_units_remove_their_files() -> None:
    old = with_units(
        {"name": "a.service", "contents": "x", "dropins": [{"name": "x.conf", "contents": "x"}]},
        {"name": "b.service", "mask": True},
        {"name": "c.service", "contents": "x"},
    )
    new = with_units({"name": "c.service", "mask": True})
    assert between(old, new).removed_paths == (
        "/etc/systemd/system/a.service",
        "/etc/systemd/system/a.service.d/x.conf",
        "/etc/systemd/system/b.service",
    )


def test_certificates_outlive_their_config() -> None:
    paths = [
        "/etc/pki/ca-trust/source/anchors/openshift-config-user-ca-bundle.crt",
        "/etc/docker/certs.d/registry.example.com/ca.crt",
    ]
    found = between(with_files(*map(file, paths)), ignition())
    assert [change.key for change in found.files] == paths
    assert found.removed_paths == ()


def test_unit_differs_by_contents_enablement_mask_and_drop_ins() -> None:
    unit = {"name": "a.service", "contents": "x", "dropins": [{"name": "a.conf", "contents": "x"}]}
    for values in (
        {"contents": "y"},
        {"enabled": True},
        {"mask": True},
        {"dropins": []},
        {"dropins": [{"name": "a.conf"}]},
    ):
        found = between(with_units(unit), with_units({**unit, **values}))
        assert [change.key for change in found.units] == ["a.service"]
    assert between(with_units(unit), with_units({**unit, "mask": False})).is_empty


def test_contents_of_masked_unit_make_no_difference() -> None:
    masked = {"name": "a.service", "mask": True}
    assert between(with_units(masked), with_units({**masked, "contents": "x"})).is_empty
    assert between(with_units(masked), ignition()).units == (
        EntryChange("a.service", WantedUnit("a.service", mask=True), None),
    )


def test_ssh_keys_differ_by_content_and_not_by_order() -> None:
    core = {"name": "core", "sshAuthorizedKeys": ["a", "b"]}
    assert between(with_users(core), with_users({**core, "sshAuthorizedKeys": ["b", "a"]})).is_empty
    assert between(with_users(core), with_users({**core, "sshAuthorizedKeys": ["a"]})).users
    assert between(with_users(core), with_users({**core, "passwordHash": "x"})).users
    assert between(with_users(core), ignition()).users


@pytest.mark.parametrize(
    ("spec", "aspects"),
    [
        ({"kernel_type": "default"}, ()),
        ({"kernel_type": "realtime"}, (OSAspect.KERNEL_TYPE,)),
        ({"kernel_arguments": ("a",)}, (OSAspect.KERNEL_ARGUMENTS,)),
        ({"extensions": ("ipsec",)}, (OSAspect.EXTENSIONS,)),
        ({"extensions_image": "r/e@sha256:2"}, (OSAspect.EXTENSIONS_IMAGE,)),
        ({"fips": True}, (OSAspect.FIPS,)),
        ({"os_image_url": "r/o@sha256:2"}, (OSAspect.IMAGE,)),
        ({"metadata": ObjectMeta(name="other")}, ()),
    ],
)
def test_os_differs_by_each_aspect(spec: dict[str, object], aspects: tuple[OSAspect, ...]) -> None:
    assert compare_configs(of(), of(**spec)) == ConfigDiff(os=aspects)


@pytest.mark.parametrize("field", ["kernelArguments", "extensions", "kernelType", "osImageURL"])
def test_null_and_empty_fields_equal_absent_ones(field: str) -> None:
    empty = "" if field in {"kernelType", "osImageURL"} else []
    absent, null, nothing = (
        read_wanted_state(MachineConfig.from_json({"metadata": {"name": "a"}, "spec": spec}))
        for spec in ({}, {field: None}, {field: empty})
    )
    assert compare_configs(absent, null).is_empty
    assert compare_configs(null, nothing).is_empty
    assert compare_configs(nothing, absent).is_empty


def test_kernel_arguments_differ_by_order_and_number_and_not_by_grouping() -> None:
    def differ(old: tuple[str, ...], new: tuple[str, ...]) -> bool:
        return not compare_configs(of(kernel_arguments=old), of(kernel_arguments=new)).is_empty

    assert differ(("a", "b"), ("b", "a"))
    assert differ(("a",), ("a", "a"))
    assert not differ(("a b",), ("a", "b"))


def test_extensions_ignore_order_and_repetition() -> None:
    assert compare_configs(
        of(extensions=("ipsec", "usbguard")), of(extensions=("usbguard", "ipsec", "ipsec"))
    ).is_empty


def shuffled(document: dict[str, object], chance: random.Random) -> dict[str, object]:
    """Return the config with every list shuffled and every file in a random encoding."""
    found = copy.deepcopy(document)
    raw = {file.path: file.contents for file in reader.parse_ignition(document).files}
    for section, name in (
        ("storage", "files"),
        ("storage", "directories"),
        ("systemd", "units"),
        ("passwd", "users"),
    ):
        entries = found[section].get(name, [])
        chance.shuffle(entries)
        for entry in entries:
            chance.shuffle(entry.get("dropins") or [])
            chance.shuffle(entry.get("sshAuthorizedKeys") or [])
            if section == "storage" and name == "files":
                entry["contents"] = chance.choice(ENCODINGS)(raw[entry["path"]].decode_bytes())
    return found


@fuzz
@given(configs(), st.randoms(use_true_random=False))
def test_order_and_encoding_never_make_a_difference(
    document: dict[str, object], chance: random.Random
) -> None:
    assert between(document, shuffled(document, chance)).is_empty


@fuzz
@given(configs(), configs())
def test_diff_is_symmetric_and_empty_for_equal_configs(
    old: dict[str, object], new: dict[str, object]
) -> None:
    there, back = between(old, new), between(new, old)
    assert there.is_empty == back.is_empty
    assert {change.key for change in there.files} == {change.key for change in back.files}
    assert between(old, old).is_empty
