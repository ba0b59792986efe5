"""Ignition 2.2 is converted to version 3; features without an equivalent are rejected."""

import contextlib

import pytest
from hypothesis import given

from tests.api.configs import ignition, refusal, with_units, with_users
from tests.api.fuzzing import damaged, fuzz
from treenail.api.ignition.parser import parse_ignition
from treenail.errors import ConfigError


def old(**sections: object) -> dict[str, object]:
    return ignition("2.2.0", **sections)


def file(path: str, **values: object) -> dict[str, object]:
    return {"filesystem": "root", "path": path, **values}


def converted(document: object) -> dict[str, object]:
    return parse_ignition(document).to_json()


def test_last_file_of_a_path_wins_and_overwrites() -> None:
    files = [
        file("/etc/a", contents={"source": "data:,1"}),
        file("/etc/b", contents={"source": "data:,b", "verification": {}}, mode=0o600),
        file("/etc/a", contents={"source": "data:,2", "compression": ""}, overwrite=False),
    ]
    assert converted(old(storage={"files": files}))["storage"] == {
        "files": [
            {"path": "/etc/a", "contents": {"source": "data:,2"}, "overwrite": False},
            {"path": "/etc/b", "contents": {"source": "data:,b"}, "overwrite": True, "mode": 0o600},
        ]
    }


def test_file_without_contents_is_an_empty_one() -> None:
    assert converted(old(storage={"files": [file("/a", user={"name": ""})]}))["storage"] == {
        "files": [{"path": "/a", "contents": {"source": ""}, "overwrite": True}]
    }


def test_last_unit_of_a_name_wins_and_keeps_the_others_dropins() -> None:
    units = [
        {"name": "a.service", "contents": "1", "dropins": [{"name": "x.conf", "contents": "1"}]},
        {"name": "b.service", "enable": True, "mask": False},
        {
            "name": "a.service",
            "enable": True,
            "enabled": False,
            "dropins": [{"name": "y.conf", "contents": "2"}],
        },
    ]
    assert converted(with_units(*units, version="2.2.0"))["systemd"] == {
        "units": [
            {
                "name": "a.service",
                "enabled": False,
                "dropins": [
                    {"name": "y.conf", "contents": "2"},
                    {"name": "x.conf", "contents": "1"},
                ],
            },
            {"name": "b.service", "enabled": True},
        ]
    }


def test_ssh_keys_of_repeated_core_user_are_merged() -> None:
    users = [
        {"name": "core", "sshAuthorizedKeys": ["1", "2"]},
        {"name": "core", "sshAuthorizedKeys": ["3", "3", "1"], "passwordHash": "$6$x"},
    ]
    assert converted(with_users(*users, version="2.2.0"))["passwd"] == {
        "users": [{"name": "core", "sshAuthorizedKeys": ["3", "1", "2"], "passwordHash": "$6$x"}]
    }


def test_links_and_directories_are_read() -> None:
    document = old(
        storage={
            "directories": [{"filesystem": "root", "path": "/d/", "mode": 0o700}],
            "links": [{"filesystem": "root", "path": "/l", "target": "d", "hard": False}],
            "filesystems": [{"name": "root", "path": "/sysroot"}],
        }
    )
    assert converted(document)["storage"] == {
        "directories": [{"path": "/d", "mode": 0o700}],
        "links": [{"path": "/l", "target": "d"}],
    }


def test_sections_for_the_first_boot_are_converted() -> None:
    document = old(
        storage={
            "disks": [{"device": "/dev/sda", "wipeTable": False}],
            "raid": [{"name": "md0", "level": "raid1", "devices": ["/dev/sda"], "spares": 0}],
            "files": [file("/a", append=True, contents={"source": "data:,1"})],
        },
        passwd={
            "users": [{"name": "core", "uid": 0, "gecos": "", "shouldExist": False}],
            "groups": [{"name": "g", "gid": 0, "system": False, "passwordHash": ""}],
        },
    )
    document["ignition"] = {
        "version": "2.2.0",
        "config": {"replace": {}, "append": [{"source": "data:,1"}]},
        "timeouts": {"httpTotal": 3},
        "proxy": {"httpProxy": "http://a"},
    }
    found = converted(document)
    assert found["storage"] == {
        "disks": [{"device": "/dev/sda"}],
        "raid": [{"name": "md0", "level": "raid1", "devices": ["/dev/sda"]}],
        "files": [{"path": "/a", "append": [{"source": "data:,1"}], "overwrite": False}],
    }
    assert found["passwd"] == {
        "users": [{"name": "core", "uid": 0}],
        "groups": [{"name": "g", "gid": 0}],
    }
    assert found["ignition"] == {
        "version": "3.5.0",
        "config": {"replace": {"source": ""}, "merge": [{"source": "data:,1"}]},
        "timeouts": {"httpTotal": 3},
    }


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            old(storage={"files": [{"path": "/a"}]}),
            "storage.files[0].filesystem: expected root, found ''",
        ),
        (
            old(storage={"files": [file("a")]}),
            "storage.files[0].path: expected an absolute path, found 'a'",
        ),
        (
            old(storage={"disks": [{"device": "/dev/sda", "partitions": [{"number": 1}]}]}),
            "storage.disks[0].partitions: has no equivalent in Ignition 3",
        ),
        (
            old(
                storage={
                    "files": [file("/ab")],
                    "links": [{"filesystem": "root", "path": "/a", "target": "b"}],
                }
            ),
            "storage.files[0].path: begins with the path of a link, /a",
        ),
        (
            old(networkd={"units": [{"name": "a.network"}]}),
            "networkd.units: has no equivalent in Ignition 3",
        ),
        (
            with_users({"name": "root"}, version="2.2.0"),
            "passwd.users[0].name: expected core, found 'root'",
        ),
        (
            old(
                storage={
                    "files": [file("/a")],
                    "links": [{"filesystem": "root", "path": "/a", "target": "b"}],
                }
            ),
            "storage.links[0].path: duplicate of spec.config.storage.files[0]",
        ),
    ],
)
def test_feature_without_version_3_equivalent_is_rejected(document: object, message: str) -> None:
    assert refusal(document) == message


FULL = old(
    storage={
        "files": [file("/a", contents={"source": "data:,1"}, user={"name": "core"}), file("/a")],
        "directories": [{"filesystem": "root", "path": "/d"}],
        "links": [{"filesystem": "root", "path": "/l", "target": "d"}],
    },
    systemd={"units": [{"name": "a.service", "dropins": [{"name": "x.conf"}]}] * 2},
    passwd={"users": [{"name": "core", "sshAuthorizedKeys": ["1"]}]},
)


@fuzz
@given(damaged(FULL))
def test_any_version_2_config_is_converted_or_rejected(document: object) -> None:
    with contextlib.suppress(ConfigError):
        config = parse_ignition(document)
        assert parse_ignition(config.to_json()).to_json() == config.to_json()
