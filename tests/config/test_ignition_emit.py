"""Configs are written in each version of Ignition, or refused with the field that it lacks."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from tests.api.configs import configs, ignition, with_files, with_users
from tests.api.fuzzing import EXAMPLES, fuzz
from tests.config.random_configs import make_case
from tests.oracle import needs_oracle, records, rendered
from treenail.api import documents
from treenail.api.ignition.model import IgnitionConfig, IgnitionFile
from treenail.api.ignition.parser import parse_ignition
from treenail.api.machineconfig import MachineConfig
from treenail.config.ignition.emit import (
    VERSIONS_SERVED,
    VersionTooOldError,
    detach_kernel_arguments,
    emit_ignition,
)
from treenail.errors import ConfigError, IgnitionError

Json = dict[str, Any]

OLD, *VERSIONS3 = VERSIONS_SERVED
NEWEST = VERSIONS_SERVED[-1]
SHA256 = "sha256-" + "0" * 64
URL = "https://example.com/a"
HEADERS = [{"name": "a", "value": "b"}]
ORDERED = {"groups", "options", "sshAuthorizedKeys", "devices"}
"""Lists whose order every version keeps."""


def storage(**parts: object) -> Json:
    return ignition(storage=parts)


def header(**parts: object) -> Json:
    return {"ignition": {"version": NEWEST, **parts}}


def luks(**fields: object) -> Json:
    return storage(luks=[{"name": "root", "device": "/dev/sda"} | fields])


def remote_file(**fields: object) -> Json:
    return with_files({"path": "/etc/a", "contents": {"source": URL} | fields})


def filesystem(**fields: object) -> Json:
    return storage(filesystems=[{"device": "/dev/sda", "format": "xfs"} | fields])


def partition(**fields: object) -> Json:
    return storage(disks=[{"device": "/dev/sda", "partitions": [{"number": 1} | fields]}])


def list_models() -> Iterator[IgnitionConfig]:
    """Yield random configs of all versions, some of them invalid as documents."""
    for seed in range(EXAMPLES or 300):
        for kind in ("random", "damaged"):
            for each in make_case(kind, seed)[0]:
                with contextlib.suppress(ConfigError):
                    yield parse_ignition(each["spec"].get("config"))


def strip_for_2_2(value: Any) -> Any:
    """Remove what 2.2 does not express: zero values, except numbers, and the order of entries."""
    if isinstance(value, list):
        found = [strip_for_2_2(each) for each in value]
        return sorted(found, key=lambda each: str(each.get("path") or each.get("name")))
    if not isinstance(value, dict):
        return value
    fields = {
        name: each if name in ORDERED and each and isinstance(each[0], str) else strip_for_2_2(each)
        for name, each in value.items()
    }
    return {
        name: each
        for name, each in fields.items()
        if each not in (None, "", {}, []) and each is not False and (name, each) != ("spares", 0)
    }


@needs_oracle
def test_recorded_conversions_agree() -> None:
    found = records("convert_version")
    for record in found:
        config = parse_ignition(json.loads(record["raw"]))
        assert emit_ignition(config, record["version"]) == json.loads(record["out"])
    assert len(found) == 6


@needs_oracle
def test_recorded_configs_are_written_in_the_newest_version_as_recorded() -> None:
    found = [each for each in records("parse_convert") if each["err"] is None]
    for record in found:
        config = parse_ignition(json.loads(record["raw"]))
        assert emit_ignition(config, NEWEST) == json.loads(record["out"])
    assert len(found) == 56


TANG, LUKS = "storage.luks[0].clevis.tang[0].advertisement", "storage.luks[0]"
REFUSED_RECORDS = {
    "2.2.0": {
        "kernelArguments": 1,
        LUKS: 1,
        "storage.files[0].contents.source": 5,
        "storage.filesystems[0]": 2,
    },
    "3.0.0": {"kernelArguments": 1, LUKS: 1},
    "3.1.0": {"kernelArguments": 1, LUKS: 1},
    "3.2.0": {"kernelArguments": 1, TANG: 1},
    "3.3.0": {TANG: 1},
    "3.4.0": {TANG: 1},
    "3.5.0": {},
}


@needs_oracle
@pytest.mark.parametrize("version", VERSIONS_SERVED)
def test_recorded_configs_are_written_in_every_version(version: str) -> None:
    refused: Counter[str] = Counter()
    found = [each for each in records("parse_convert") if each["err"] is None]
    for record in found:
        config = parse_ignition(json.loads(record["raw"]))
        try:
            assert_same_meaning(config, version)
        except VersionTooOldError as error:
            refused[error.field] += 1
    assert refused == REFUSED_RECORDS[version]


@needs_oracle
@pytest.mark.parametrize("version", VERSIONS_SERVED)
def test_real_rendered_configs_are_written_in_every_version(version: str) -> None:
    found = rendered()
    for path in found:
        document = documents.load_document(path.read_text(), where=path.name)
        assert_same_meaning(parse_ignition(MachineConfig.from_json(document).config), version)
    assert found


def assert_same_meaning(config: IgnitionConfig, version: str) -> None:
    document = emit_ignition(config, version)
    assert json.loads(json.dumps(document)) == document
    if version == OLD:
        assert_same_in_2_2(config, document)
        return
    found = parse_ignition(document)
    assert found == replace(config, version=version)
    assert found.to_json() == config.to_json()


def assert_same_in_2_2(config: IgnitionConfig, document: Json) -> None:
    try:
        found = parse_ignition(document)
    except IgnitionError as error:
        # Ignition reads them, and the MCO's conversion from 2.2 does not.
        if "expected core" in str(error) or "begins with the path of a link" in str(error):
            return
        raise
    expected = set_default_modes(config)
    assert strip_for_2_2(found.to_json()) == strip_for_2_2(expected.to_json())


def set_default_modes(config: IgnitionConfig) -> IgnitionConfig:
    """Return the config with the modes of version 3 where it sets none."""
    return replace(
        config,
        files=tuple(
            each if each.mode is not None else replace(each, mode=0o644) for each in config.files
        ),
        directories=tuple(
            each if each.mode is not None else replace(each, mode=0o755)
            for each in config.directories
        ),
    )


@pytest.mark.limit(EXAMPLES or 600.0)
@pytest.mark.parametrize("version", VERSIONS_SERVED)
def test_parsing_an_emitted_config_returns_the_model(version: str) -> None:
    same, too_old, invalid = 0, [], []
    for config in list_models():
        try:
            assert_same_meaning(config, version)
            same += 1
        except VersionTooOldError as error:
            too_old.append((config, error))
        except IgnitionError as error:
            invalid.append(str(error))
    assert all(error.first_version > version for _, error in too_old)
    assert all(has_field(config, error.field) for config, error in too_old)
    assert all(text.startswith("spec.config") for text in invalid)
    assert same > len(too_old) + len(invalid)
    assert invalid
    assert too_old or version == NEWEST


@fuzz
@given(configs())
def test_valid_config_is_the_same_in_every_version_from_3_0(document: Json) -> None:
    config = parse_ignition(document)
    for version in VERSIONS3:
        assert_same_meaning(config, version)


def has_field(config: IgnitionConfig, field: str) -> bool:
    """Return whether the location is that of a value, or of one that is missing in an object."""
    value: Any = config.to_json()
    for part in field.replace("]", "").replace("[", ".").split("."):
        if part in ("source", "contents") and part not in value:
            return True
        value = value[int(part)] if part.isdigit() else value[part]
    return True


@pytest.mark.parametrize(
    ("document", "field", "first"),
    [
        (luks(), "storage.luks[0]", "3.2.0"),
        (luks(cex={"enabled": True}), "storage.luks[0].cex", "3.5.0"),
        (luks(discard=True), "storage.luks[0].discard", "3.4.0"),
        (luks(openOptions=["--a"]), "storage.luks[0].openOptions[0]", "3.4.0"),
        (luks(keyFile={"source": "arn:aws:s3:::b/o"}), "storage.luks[0].keyFile.source", "3.4.0"),
        (
            luks(clevis={"custom": {"needsNetwork": False}}),
            "storage.luks[0].clevis.custom",
            "3.3.0",
        ),
        (
            luks(clevis={"tang": [{"url": "http://t", "thumbprint": "t", "advertisement": "{}"}]}),
            "storage.luks[0].clevis.tang[0].advertisement",
            "3.5.0",
        ),
        (ignition(kernelArguments={"shouldExist": ["a"]}), "kernelArguments", "3.3.0"),
        (ignition(kernelArguments={"shouldNotExist": ["a"]}), "kernelArguments", "3.3.0"),
        (
            with_users({"name": "core", "shouldExist": False}),
            "passwd.users[0].shouldExist",
            "3.2.0",
        ),
        (
            ignition(passwd={"groups": [{"name": "g", "shouldExist": True}]}),
            "passwd.groups[0].shouldExist",
            "3.2.0",
        ),
        (remote_file(httpHeaders=HEADERS), "storage.files[0].contents.httpHeaders[0]", "3.1.0"),
        (
            remote_file(verification={"hash": SHA256}),
            "storage.files[0].contents.verification.hash",
            "3.1.0",
        ),
        (remote_file(source="gs://b/o"), "storage.files[0].contents.source", "3.2.0"),
        (remote_file(source="arn:aws:s3:::b/o"), "storage.files[0].contents.source", "3.4.0"),
        (
            with_files({"path": "/a"}, {"path": "/b", "append": [{"source": "gs://b/o"}]}),
            "storage.files[1].append[0].source",
            "3.2.0",
        ),
        (with_files({"path": "/etc/a", "mode": 0o1755}), "storage.files[0].mode", "3.4.0"),
        (
            storage(directories=[{"path": "/etc/a", "mode": 0o2755}]),
            "storage.directories[0].mode",
            "3.4.0",
        ),
        (filesystem(mountOptions=["ro"]), "storage.filesystems[0].mountOptions[0]", "3.1.0"),
        (filesystem(format="none"), "storage.filesystems[0].format", "3.3.0"),
        (
            partition(resize=True, sizeMiB=1),
            "storage.disks[0].partitions[0].resize",
            "3.2.0",
        ),
        (header(proxy={"httpProxy": "http://p"}), "ignition.proxy", "3.1.0"),
        (
            header(
                config={"merge": [{"source": URL}, {"source": URL + "b", "httpHeaders": HEADERS}]}
            ),
            "ignition.config.merge[1].httpHeaders[0]",
            "3.1.0",
        ),
        (
            header(config={"replace": {"source": URL, "compression": "gzip"}}),
            "ignition.config.replace.compression",
            "3.1.0",
        ),
        (
            header(security={"tls": {"certificateAuthorities": [{"source": "gs://b/o"}]}}),
            "ignition.security.tls.certificateAuthorities[0].source",
            "3.2.0",
        ),
    ],
)
def test_newer_field_is_refused_below_its_first_version(
    document: Json, field: str, first: str
) -> None:
    config = parse_ignition(document)
    before = VERSIONS_SERVED[VERSIONS_SERVED.index(first) - 1]
    with pytest.raises(VersionTooOldError) as caught:
        emit_ignition(config, before)
    assert (caught.value.field, caught.value.first_version) == (field, first)
    assert str(caught.value) == (
        f"cannot write the config in Ignition {before}: {field} needs Ignition {first} or later"
    )
    for version in VERSIONS_SERVED[VERSIONS_SERVED.index(first) :]:
        assert_same_meaning(config, version)


@pytest.mark.parametrize(
    ("document", "field"),
    [
        (partition(), "storage.disks[0].partitions[0]"),
        (filesystem(), "storage.filesystems[0]"),
        (with_files({"path": "/etc/a"}), "storage.files[0].contents.source"),
        (
            with_files({"path": "/etc/a", "append": [{"source": URL}]}),
            "storage.files[0].append[0]",  # the mode of a file that exists
        ),
        (
            with_files({"path": "/etc/a", "append": [{"source": URL}, {"source": URL}]}),
            "storage.files[0].append[1]",
        ),
        (
            with_files(
                {"path": "/etc/a", "contents": {"source": URL}, "append": [{"source": URL}]}
            ),
            "storage.files[0].append[0]",
        ),
    ],
)
def test_field_of_version_3_is_refused_in_2_2(document: Json, field: str) -> None:
    config = parse_ignition(document)
    with pytest.raises(VersionTooOldError) as caught:
        emit_ignition(config, OLD)
    assert (caught.value.field, caught.value.first_version) == (field, "3.0.0")
    assert_same_meaning(config, "3.0.0")


def test_merged_config_without_source_is_refused_in_2_2() -> None:
    config = parse_ignition(header(config={"merge": [{"verification": {}}]}))
    with pytest.raises(VersionTooOldError) as caught:
        emit_ignition(config, OLD)
    assert caught.value.field == "ignition.config.merge[0].source"


def test_modes_of_2_2_are_the_defaults_of_version_3_where_none_is_set() -> None:
    """Ignition 0.35 gives mode 0000 to files and directories without one."""
    storage = {
        "files": [
            {"path": "/etc/a", "contents": {"source": "data:,a"}},
            {"path": "/etc/b", "contents": {"source": "data:,b"}, "mode": 0},
        ],
        "directories": [{"path": "/etc/c"}, {"path": "/etc/d", "mode": 0o700}],
    }
    document = {"ignition": {"version": "3.0.0"}, "storage": storage}
    found: Any = emit_ignition(parse_ignition(document), OLD)["storage"]
    assert [each["mode"] for each in found["files"]] == [0o644, 0]
    assert [each["mode"] for each in found["directories"]] == [0o755, 0o700]


def test_files_of_2_2_have_a_filesystem_and_overwrite_only_on_request() -> None:
    files = [
        {"path": "/etc/a", "contents": {"source": "data:,a"}, "mode": 0o644},
        {"path": "/etc/b", "contents": {"source": "data:,b"}, "overwrite": True},
        {"path": "/etc/c", "append": [{"source": "data:,c"}], "overwrite": False, "mode": 0},
    ]
    document = storage(
        files=files,
        directories=[{"path": "/etc/d"}],
        links=[{"path": "/etc/l", "target": "d", "user": {"name": "core"}}],
    )
    merge = {"config": {"merge": [{"source": URL}]}, "timeouts": {"httpTotal": 5}}
    document["ignition"] |= merge
    root = {"filesystem": "root"}
    assert emit_ignition(parse_ignition(document), OLD) == {
        "ignition": {
            "version": "2.2.0",
            "config": {"append": [{"source": URL}]},
            "timeouts": {"httpTotal": 5},
        },
        "storage": {
            "directories": [root | {"path": "/etc/d", "mode": 0o755}],
            "files": [
                root | files[0] | {"overwrite": False},
                root | files[1] | {"mode": 0o644},
                root
                | {"path": "/etc/c", "append": True, "contents": {"source": "data:,c"}, "mode": 0},
            ],
            "links": [root | {"path": "/etc/l", "target": "d", "user": {"name": "core"}}],
        },
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            IgnitionConfig(files=(IgnitionFile("/a", overwrite=True),)),
            r"spec\.config\.storage\.files\[0\]\.contents\.source: expected the contents",
        ),
        (
            IgnitionConfig(files=(IgnitionFile("/a"), IgnitionFile("/a"))),
            r"spec\.config\.storage\.files\[1\]: duplicate of spec\.config\.storage\.files\[0\]",
        ),
        (IgnitionConfig(disks=({"device": 1},)), r"spec\.config\.storage\.disks\[0\]\.device"),
        (
            parse_ignition(remote_file(httpHeaders=[{"name": "a", "value": []}])),
            r"files\[0\]\.contents\.httpHeaders\[0\]\.value: expected a string",
        ),
        (IgnitionConfig(disks=({"partitions": {}, "device": []},)), r"disks\[0\]\.device"),
        (IgnitionConfig(luks=({"name": "x", "device": "/a", "clevis": 1},)), r"luks\[0\]\.clevis"),
    ],
)
@pytest.mark.parametrize("version", ["3.2.0", NEWEST])
def test_value_that_ignition_rejects_is_refused_with_its_location(
    config: IgnitionConfig, message: str, version: str
) -> None:
    with pytest.raises(IgnitionError, match=message):
        emit_ignition(config, version)


def test_header_without_a_value_is_the_same_after_parsing() -> None:
    headers = [{"name": "a", "value": None}]
    assert_same_meaning(parse_ignition(remote_file(httpHeaders=headers)), "3.3.0")


def test_null_empty_and_unknown_fields_are_omitted() -> None:
    config = IgnitionConfig(
        groups=({"name": "g", "gid": None, "unknown": 1},),
        luks=({"name": "x", "device": "/a", "clevis": {"tang": [], "custom": {}}},),
        ignition_section={"config": {"merge": []}, "proxy": None, "unknown": {}},
    )
    assert emit_ignition(config, "3.2.0") == {
        "ignition": {"version": "3.2.0"},
        "passwd": {"groups": [{"name": "g"}]},
        "storage": {"luks": [{"name": "x", "device": "/a"}]},
    }


@pytest.mark.parametrize("version", ["2.0.0", "2.4.0", "3.6.0", "3.4", "", "x" * 500])
def test_unknown_version_is_refused(version: str) -> None:
    with pytest.raises(IgnitionError, match=r"expected one of 2\.2\.0") as caught:
        emit_ignition(IgnitionConfig(), version)
    assert len(str(caught.value)) < 200


def test_kernel_arguments_are_split_off_for_versions_below_3_3() -> None:
    config = parse_ignition(ignition(kernelArguments={"shouldExist": ["a", "b=1"]}))
    rest, arguments = detach_kernel_arguments(config)
    assert arguments == ("a", "b=1")
    assert emit_ignition(rest, "3.2.0") == {"ignition": {"version": "3.2.0"}}
    assert config.kernel_arguments == ("a", "b=1")


def test_removed_kernel_argument_is_refused_below_3_3() -> None:
    config = parse_ignition(ignition(kernelArguments={"shouldNotExist": ["quiet"]}))
    with pytest.raises(VersionTooOldError) as caught:
        detach_kernel_arguments(config)
    assert caught.value.field == "kernelArguments.shouldNotExist[0]"
    assert caught.value.first_version == "3.3.0"


def test_same_config_is_always_the_same_text() -> None:
    config = parse_ignition(
        ignition(systemd={"units": [{"name": "b.service"}, {"name": "a.service"}]}, passwd={})
    )
    texts = {json.dumps(emit_ignition(config, "3.3.0")["systemd"]) for _ in range(3)}
    assert texts == {'{"units": [{"name": "b.service"}, {"name": "a.service"}]}'}
