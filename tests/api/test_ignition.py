"""Ignition 3 is read into one model, strictly, and written as Go writes it."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given

from tests.api.configs import configs, ignition, refusal, with_files, with_units, with_users
from tests.api.fuzzing import damaged, fuzz, json_values
from tests.oracle import needs_oracle, records, render_cases, rendered
from treenail.api import documents
from treenail.api.ignition.model import (
    Contents,
    IgnitionConfig,
    IgnitionDirectory,
    IgnitionDropin,
    IgnitionFile,
    IgnitionLink,
    IgnitionOwner,
    IgnitionUnit,
    IgnitionUser,
)
from treenail.api.ignition.parser import VERSIONS, parse_ignition
from treenail.api.machineconfig import MachineConfig
from treenail.errors import ConfigError, IgnitionError

FULL = {
    "ignition": {
        "version": "3.4.0",
        "config": {"merge": [{"source": "https://example.com/more"}]},
        "security": {"tls": {}},
        "timeouts": {},
    },
    "kernelArguments": {"shouldExist": ["a=1"], "shouldNotExist": ["b"]},
    "passwd": {
        "users": [
            {
                "name": "core",
                "passwordHash": "$6$x",
                "sshAuthorizedKeys": ["k1", "k2"],
                "homeDir": "/home/core",
                "groups": [],
            }
        ],
        "groups": [{"name": "g", "gid": 7}],
    },
    "storage": {
        "files": [
            {
                "path": "/etc/a",
                "contents": {"source": "data:,a", "compression": ""},
                "append": [{"source": "data:,b"}],
                "mode": 0o600,
                "user": {"id": 7},
                "group": {"name": "wheel"},
                "overwrite": False,
            },
            {"path": "/etc/b"},
        ],
        "directories": [{"path": "/etc/d", "mode": 0o700, "user": {"name": "core"}}],
        "links": [{"path": "/etc/l", "target": "../b", "hard": False}],
        "disks": [{"device": "/dev/sda", "partitions": [], "wipeTable": False}],
        "filesystems": [{"device": "/dev/sda1", "format": "xfs", "path": None}],
        "raid": [{"name": "r", "devices": ["/dev/sda"]}],
        "luks": [{"name": "l"}],
    },
    "systemd": {
        "units": [
            {
                "name": "a.service",
                "contents": "[Unit]\n",
                "enabled": False,
                "mask": False,
                "dropins": [{"name": "10-a.conf", "contents": ""}, {"name": "20-b.conf"}],
            }
        ]
    },
    "junk": {"x": 1},
}


def file(**values: object) -> dict[str, object]:
    return with_files({"path": "/etc/a", **values})


def storage(**lists: object) -> dict[str, object]:
    return ignition(storage=lists)


def test_every_field_is_read() -> None:
    assert parse_ignition(FULL) == IgnitionConfig(
        version="3.4.0",
        files=(
            IgnitionFile(
                "/etc/a",
                Contents("data:,a", ""),
                append=(Contents("data:,b"),),
                mode=0o600,
                user=IgnitionOwner(7),
                group=IgnitionOwner(name="wheel"),
                overwrite=False,
            ),
            IgnitionFile("/etc/b"),
        ),
        directories=(IgnitionDirectory("/etc/d", 0o700, IgnitionOwner(name="core")),),
        links=(IgnitionLink("/etc/l", "../b", hard=False),),
        units=(
            IgnitionUnit(
                "a.service",
                "[Unit]\n",
                enabled=False,
                mask=False,
                dropins=(IgnitionDropin("10-a.conf", ""), IgnitionDropin("20-b.conf", None)),
            ),
        ),
        users=(IgnitionUser("core", ("k1", "k2"), "$6$x", {"homeDir": "/home/core"}),),
        groups=({"name": "g", "gid": 7},),
        disks=({"device": "/dev/sda", "wipeTable": False},),
        filesystems=({"device": "/dev/sda1", "format": "xfs"},),
        raid=({"name": "r", "devices": ["/dev/sda"]},),
        luks=({"name": "l"},),
        kernel_arguments=("a=1",),
        absent_kernel_arguments=("b",),
        ignition_section={"config": {"merge": [{"source": "https://example.com/more"}]}},
    )


def test_locations_point_into_the_document() -> None:
    config = parse_ignition(FULL, location="f.json")
    assert [entry.location for entry in config.files] == [
        "f.json.storage.files[0]",
        "f.json.storage.files[1]",
    ]
    assert config.files[0].append[0].location == "f.json.storage.files[0].append[0]"
    assert config.units[0].location == "f.json.systemd.units[0]"


def test_absent_document_is_an_empty_config() -> None:
    assert parse_ignition(None) == IgnitionConfig()


@pytest.mark.parametrize("version", VERSIONS)
def test_supported_version_is_written_as_the_newest(version: str) -> None:
    assert parse_ignition(ignition(version)).to_json() == {"ignition": {"version": "3.5.0"}}


@pytest.mark.parametrize(
    "version", ["", "3.6.0", "2.3.0", "2.2.1", "4.0.0", "21.0.0", "3.5.0-experimental", "x", None]
)
def test_unsupported_version_is_rejected(version: object) -> None:
    assert refusal({"ignition": {"version": version}}) == (
        "ignition.version: expected one of 2.2.0, 3.0.0, 3.1.0, 3.2.0, 3.3.0, 3.4.0, 3.5.0, "
        f"found {version or ''!r}"
    )
    with pytest.raises(IgnitionError, match=r"config\.ignition\.version: expected"):
        parse_ignition({})


UNIT = "expected the name of a systemd unit, with its type at the end"


def with_dropins(*names: str) -> dict[str, object]:
    dropins = [{"name": name, "contents": "x"} for name in names]
    return with_units({"name": "a.service", "dropins": dropins})


@pytest.mark.parametrize(
    ("document", "place", "complaint"),
    [
        (file(path="etc/a"), "storage.files[0].path", "expected an absolute path, found 'etc/a'"),
        (file(path=""), "storage.files[0].path", "expected a string, found an empty string"),
        (
            file(mode=0o10000),
            "storage.files[0].mode",
            "expected a mode from 0 to 4095 (07777), found 4096",
        ),
        (
            file(mode=-1),
            "storage.files[0].mode",
            "expected a mode from 0 to 4095 (07777), found -1",
        ),
        (file(mode="0644"), "storage.files[0].mode", "expected an integer, found a string"),
        (file(mode=420.0), "storage.files[0].mode", "expected an integer, found 420.0"),
        (
            file(contents={"source": 7}),
            "storage.files[0].contents.source",
            "expected a string, found 7",
        ),
        (file(contents="x"), "storage.files[0].contents", "expected an object, found a string"),
        (
            file(user={"id": -1}),
            "storage.files[0].user.id",
            "expected the number of a user or group, found -1",
        ),
        (storage(files=[None]), "storage.files[0]", "expected an object, found null"),
        (
            storage(files=[{"path": "/a"}], directories=[{"path": "/a"}]),
            "storage.directories[0].path",
            "duplicate of spec.config.storage.files[0]",
        ),
        (
            storage(files=[{"path": "/a/b/c"}], links=[{"path": "/a", "target": "b"}]),
            "storage.files[0].path",
            "/a is a link of this config",
        ),
        (
            storage(links=[{"path": "/a", "target": "b"}, {"path": "/a/b", "target": "b"}]),
            "storage.links[1].path",
            "/a is a link of this config",
        ),
        (
            storage(
                directories=[{"path": "/d"}], links=[{"path": "/a", "target": "/d", "hard": True}]
            ),
            "storage.links[0].target",
            "a hard link cannot point to a directory",
        ),
        (
            storage(links=[{"path": "/a"}]),
            "storage.links[0].target",
            "expected a string, found nothing",
        ),
        (
            storage(files=[{"path": "/etc/" + 128 * "ä"}]),
            "storage.files[0].path",
            f"expected names of up to 255 bytes in the path, found {'/etc/' + 128 * 'ä'!r}",
        ),
        (
            storage(files=[{"path": 2048 * "/d"}]),
            "storage.files[0].path",
            f"expected a path of up to 4095 bytes, found {2048 * '/d'!r:.200}",
        ),
        (
            with_units({"name": 248 * "u" + ".service"}),
            "systemd.units[0].name",
            f"expected a shorter name, found {200 * 'u'!r:.200}",
        ),
        (
            with_units({"name": 246 * "u" + ".service", "dropins": [{"name": "x.conf"}]}),
            "systemd.units[0].name",
            f"expected a shorter name, found {200 * 'u'!r:.200}",
        ),
        (
            with_dropins(251 * "d" + ".conf"),
            "systemd.units[0].dropins[0].name",
            f"expected a name of up to 255 bytes, found {200 * 'd'!r:.200}",
        ),
        (
            with_units({"name": "a.conf"}),
            "systemd.units[0].name",
            f"{UNIT}, found 'a.conf'",
        ),
        (
            with_units({"name": "../a.service"}),
            "systemd.units[0].name",
            f"{UNIT}, found '../a.service'",
        ),
        (
            with_dropins("../../x.conf"),
            "systemd.units[0].dropins[0].name",
            "expected a file name that ends in .conf, found '../../x.conf'",
        ),
        (
            with_units({"name": "a.service"}, {"name": "a.service"}),
            "systemd.units[1].name",
            "duplicate of spec.config.systemd.units[0]",
        ),
        (
            with_dropins("x.conf", "x.conf"),
            "systemd.units[0].dropins[1].name",
            "duplicate of spec.config.systemd.units[0].dropins[0]",
        ),
        (
            with_users({"name": "core"}, {"name": "core"}),
            "passwd.users[1].name",
            "duplicate of spec.config.passwd.users[0]",
        ),
        (
            with_users({"name": "core", "sshAuthorizedKeys": ["a", "a"]}),
            "passwd.users[0].sshAuthorizedKeys[1]",
            "duplicate of spec.config.passwd.users[0].sshAuthorizedKeys[0]",
        ),
        (
            with_users({"name": "core", "passwordHash": 12345}),
            "passwd.users[0].passwordHash",
            "expected a string, found a number or a boolean",
        ),
        (
            with_users({"name": "core", "passwordHash": "$6$canary:"}),
            "passwd.users[0].passwordHash",
            "expected a hash without colons, line ends and null characters",
        ),
        (
            with_users({"name": "core", "passwordHash": "$6$canary\n"}),
            "passwd.users[0].passwordHash",
            "expected a hash without colons, line ends and null characters",
        ),
        (
            ignition(
                storage={"files": [{"path": "/etc/systemd/system/a.service.d/x.conf"}]},
                systemd=with_dropins("x.conf")["systemd"],
            ),
            "storage.files[0].path",
            "a unit of this config has the same path",
        ),
    ],
)
def test_invalid_config_is_rejected_with_its_location(
    document: object, place: str, complaint: str
) -> None:
    assert refusal(document) == f"{place}: {complaint}"


def test_merged_config_may_have_what_no_document_has() -> None:
    document = file(user={"id": 1, "name": "a"}, overwrite=True)
    assert parse_ignition(document).files[0].user == IgnitionOwner(1, "a")
    assert parse_ignition(document).files[0].contents.source is None


@pytest.mark.parametrize(
    ("version", "document"),
    [
        ("3.2.0", {"kernelArguments": {"shouldExist": ["a"]}}),
        ("3.1.0", {"storage": {"luks": [{"name": "a"}]}}),
        ("3.0.0", {"ignition": {"version": "3.0.0", "proxy": {"httpProxy": "http://a"}}}),
    ],
)
def test_section_newer_than_its_version_is_ignored(version: str, document: Any) -> None:
    found = parse_ignition({"ignition": {"version": version}, **document})
    assert found == IgnitionConfig(version=version)


def test_field_newer_than_its_version_is_ignored() -> None:
    tang = {"url": "http://a", "thumbprint": "t", "advertisement": "{}"}
    document = ignition("3.4.0", storage={"luks": [{"name": "a", "clevis": {"tang": [tang]}}]})
    (found,) = parse_ignition(document).luks
    assert found == {"name": "a", "clevis": {"tang": [{"url": "http://a", "thumbprint": "t"}]}}


def test_pin_of_version_3_2_keeps_its_empty_texts() -> None:
    document = ignition("3.2.0", storage={"luks": [{"name": "a", "clevis": {"custom": {}}}]})
    (found,) = parse_ignition(document).luks
    assert found == {"name": "a", "clevis": {"custom": {"config": "", "pin": ""}}}


@pytest.mark.parametrize(
    "path", ["/", "//a", "/a/", "/a//b", "/a/./b", "/a/../b", "/..", "/a/..", "/a\0b"]
)
def test_unclean_path_is_rejected(path: str) -> None:
    assert "expected a path without" in refusal(file(path=path))


@pytest.mark.parametrize("path", ["/a", "/..a", "/a..", "/.a/...", "/a b", "/é"])
def test_unusual_clean_path_is_accepted(path: str) -> None:
    assert parse_ignition(file(path=path)).files[0].path == path


def test_deeply_nested_raw_section_is_rejected() -> None:
    deep: object = 1
    for _ in range(300):
        deep = [{"a": deep}]
    assert refusal(storage(disks=[{"device": deep}])) == (
        "storage.disks[0]: nested more than 100 deep"
    )


def test_secrets_are_absent_from_repr() -> None:
    dropins = [{"name": "a.conf", "contents": "canary"}]
    unit = {"name": "a.service", "contents": "canary", "dropins": dropins}
    user = {"name": "core", "passwordHash": "canary", "sshAuthorizedKeys": ["canary"]}
    document = ignition(
        storage={"files": [{"path": "/a", "contents": {"source": "data:,canary"}}]},
        systemd={"units": [unit]},
        passwd={"users": [user], "groups": [{"name": "g", "passwordHash": "canary"}]},
    )
    assert "canary" not in repr(parse_ignition(document))


@needs_oracle
def test_configs_are_converted_like_go() -> None:
    for record in records("parse_convert"):
        document = json.loads(str(record["raw"]))
        if record["err"] is None:
            assert parse_ignition(document).to_json() == json.loads(str(record["out"]))
        else:
            refusal(document)


@needs_oracle
def test_config_converted_to_older_version_keeps_its_meaning() -> None:
    for record in records("convert_version"):
        assert parse_ignition(json.loads(str(record["out"]))) == IgnitionConfig(
            version=str(record["version"])
        )


@needs_oracle
def test_configs_are_accepted_exactly_when_go_accepts_them() -> None:
    for record in records("validate_mc"):
        spec = record["spec"]
        assert isinstance(spec, dict)
        if record["err"] is None:
            parse_ignition(spec["config"])
        else:
            assert "ignition.version" in refusal(spec["config"])


@needs_oracle
def test_config_rendered_by_go_round_trips_without_loss() -> None:
    for case in render_cases():
        spec = case.get("spec")
        if isinstance(spec, dict) and spec["config"] is not None:
            assert parse_ignition(spec["config"]).to_json() == spec["config"]
    for path in rendered():
        document = documents.load_document(path.read_text(), where=path.name)
        config = MachineConfig.from_json(document).config
        found = parse_ignition(config)
        assert found.to_json() == config
        assert all(len(entry.contents.decode_bytes()) >= 0 for entry in found.files)


@fuzz
@given(configs())
def test_valid_config_round_trips_without_loss(document: dict[str, object]) -> None:
    config = parse_ignition(document)
    assert parse_ignition(config.to_json()) == config
    assert parse_ignition(config.to_json()).to_json() == config.to_json()


@fuzz
@given(damaged(FULL) | json_values)
def test_any_config_is_read_stably_or_rejected(document: object) -> None:
    with contextlib.suppress(ConfigError):
        config = parse_ignition(document)
        for entry in config.files:
            with contextlib.suppress(IgnitionError):
                entry.contents.decode_bytes()
        json.dumps(config.to_json())
