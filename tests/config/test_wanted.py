"""Tests of the state that a MachineConfig requires, and of configs that no node can have."""

import contextlib

import pytest
from hypothesis import given

from tests.api.configs import configs, ignition, with_files, with_units
from tests.api.fuzzing import damaged, fuzz
from tests.oracle import needs_oracle, records, rendered
from treenail.api import documents
from treenail.api.ignition.model import Contents
from treenail.api.machineconfig import EXTENSIONS, MachineConfig
from treenail.api.object_meta import ObjectMeta
from treenail.config.node_paths import FORCE_FILE
from treenail.config.wanted_state import (
    WantedDirectory,
    WantedFile,
    WantedLink,
    WantedOS,
    WantedState,
    WantedUnit,
    WantedUser,
    read_wanted_state,
)
from treenail.errors import ConfigError, IgnitionError


def of(document: object = None, **spec: object) -> WantedState:
    return read_wanted_state(MachineConfig(config=document, **spec))


def read_error(document: object = None, **spec: object) -> str:
    with pytest.raises(ConfigError) as caught:
        of(document, **spec)
    return str(caught.value)


def test_empty_config_requires_nothing() -> None:
    assert of() == WantedState()


def test_missing_fields_have_defaults() -> None:
    document = ignition(
        storage={
            "files": [
                {"path": "/etc/a"},
                {"path": "/etc/b", "mode": 0o600, "user": {"id": 7}, "group": {"name": "wheel"}},
                {"path": "/etc/c", "user": {"name": "root"}, "group": {}},
            ],
            "directories": [{"path": "/etc/d"}],
            "links": [{"path": "/etc/l", "target": "a"}],
        }
    )
    assert of(document) == WantedState(
        files={
            "/etc/a": WantedFile("/etc/a", Contents(), 0o644, 0, 0),
            "/etc/b": WantedFile("/etc/b", Contents(), 0o600, 7, "wheel"),
            "/etc/c": WantedFile("/etc/c", Contents(), 0o644, 0, 0),
        },
        directories={"/etc/d": WantedDirectory("/etc/d", 0o755, 0, 0)},
        links={"/etc/l": WantedLink("/etc/l", "a", is_hard=False)},
    )


def test_units_are_reduced_to_their_state_on_disk() -> None:
    found = of(
        with_units(
            {"name": "a.service", "contents": "x", "mask": False, "enabled": True},
            {"name": "b.service", "contents": "x", "mask": True, "enabled": True},
            {"name": "c.service", "contents": "", "mask": False},
            {
                "name": "d.service",
                "dropins": [{"name": "1.conf", "contents": "y"}, {"name": "2.conf"}],
            },
        )
    )
    assert found.units == {
        "a.service": WantedUnit("a.service", "x", enabled=True),
        "b.service": WantedUnit("b.service", mask=True),
        "c.service": WantedUnit("c.service", mask=False),
        "d.service": WantedUnit("d.service", dropins={"1.conf": "y", "2.conf": ""}),
    }
    assert found.list_unit_files() == {
        "/etc/systemd/system/a.service": "x",
        "/etc/systemd/system/d.service.d/1.conf": "y",
    }
    assert found.list_masks() == {"/etc/systemd/system/b.service"}


@pytest.mark.parametrize("target", ["a", "../etc/a", "/etc/../a", "/etc/a\0b"])
def test_hard_link_without_absolute_target_is_refused_with_its_field(target: str) -> None:
    links = [
        {"path": "/etc/soft", "target": "../a"},
        {"path": "/etc/l", "target": target, "hard": True},
    ]
    with pytest.raises(IgnitionError) as caught:
        of(ignition(storage={"links": links}))
    assert str(caught.value) == (
        "spec.config.storage.links[1].target: expected an absolute path without '..' for the "
        f"hard link /etc/l, found {target!r}"
    )
    assert "full path" in caught.value.remedy


def test_users_have_keys_and_password() -> None:
    users = [{"name": "core", "sshAuthorizedKeys": ["a", "b"], "passwordHash": "$6$x"}]
    assert of(ignition(passwd={"users": users})).users == {
        "core": WantedUser("core", ("a", "b"), "$6$x")
    }


def test_operating_system_is_read() -> None:
    found = of(
        os_image_url="r/os@sha256:1",
        extensions_image="r/ext@sha256:2",
        kernel_type="realtime",
        kernel_arguments=("a=1 b", "a=1"),
        extensions=("usbguard", "ipsec", "usbguard"),
        fips=True,
    )
    assert found.os == WantedOS(
        image="r/os@sha256:1",
        extensions_image="r/ext@sha256:2",
        kernel_type="realtime",
        kernel_arguments=("a=1", "b", "a=1"),
        extensions=frozenset({"usbguard", "ipsec"}),
        fips=True,
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": 0o1777}, "mode: expected at most 511 (0777), found 1023 (0o1777)"),
        (
            {"contents": {"source": "data:,a b"}},
            "contents.source: invalid URL character 1 after the comma",
        ),
        ({"path": FORCE_FILE}, f"path: cannot write {FORCE_FILE}: only a user may create it"),
    ],
)
def test_unsupported_file_raises_error_with_its_place(
    values: dict[str, object], message: str
) -> None:
    assert read_error(with_files({"path": "/etc/a", **values})) == (
        f"spec.config.storage.files[0].{message}"
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"kernel_type": "rt"},
            "kernelType: expected one of default, realtime, 64k-pages, found 'rt'",
        ),
        (
            {"extensions": ("usbguard", "vim")},
            f"extensions[1]: expected one of {', '.join(EXTENSIONS)}, found 'vim'",
        ),
        (
            {"extensions": ("kernel-devel",), "kernel_type": "realtime"},
            "extensions: kernel-devel needs the default kernel, not realtime",
        ),
        ({"kernel_arguments": ("a", "b\0")}, "kernelArguments[1]: expected no control character"),
    ],
)
def test_unsupported_os_raises_error_with_its_place(spec: dict[str, object], message: str) -> None:
    assert read_error(**spec) == f"spec.{message}"


def test_error_names_the_config() -> None:
    metadata = ObjectMeta(name="rendered-worker-b")
    assert read_error({}, metadata=metadata).startswith(
        "MachineConfig rendered-worker-b: spec.config.ignition.version: "
    )


@needs_oracle
def test_rendered_configs_of_real_cluster_are_read() -> None:
    for path in rendered():
        config = MachineConfig.from_json(documents.load_document(path.read_text(), where=path.name))
        found = read_wanted_state(config)
        storage = config.config["storage"]
        assert isinstance(storage, dict)
        assert list(found.files) == [entry["path"] for entry in storage["files"]]


@needs_oracle
def test_configs_valid_for_go_are_read() -> None:
    for record in records("validate_mc"):
        config = MachineConfig.from_json({"spec": record["spec"]})
        if record["err"] is None:
            read_wanted_state(config)
        else:
            with pytest.raises(ConfigError):
                read_wanted_state(config)


SECRETS = ignition(
    storage={"files": [{"path": "/a", "contents": {"source": "data:,canary"}}]},
    systemd={
        "units": [
            {
                "name": "a.service",
                "contents": "canary",
                "dropins": [{"name": "a.conf", "contents": "canary"}],
            }
        ]
    },
    passwd={
        "users": [{"name": "core", "passwordHash": "canary", "sshAuthorizedKeys": ["canary"]}],
        "groups": [{"name": "g", "passwordHash": "canary"}],
    },
)


def test_repr_withholds_secrets() -> None:
    assert "canary" not in repr(of(SECRETS))


@fuzz
@given(damaged(SECRETS))
def test_secrets_are_absent_from_every_error(document: object) -> None:
    try:
        config = MachineConfig.from_json({"spec": {"config": document}})
        shown = repr(config) + repr(read_wanted_state(config))
    except ConfigError as error:
        shown = f"{error} {error.remedy}"
    assert "canary" not in shown


@fuzz
@given(configs().flatmap(damaged))
def test_any_config_raises_only_config_errors(document: object) -> None:
    with contextlib.suppress(ConfigError):
        read_wanted_state(MachineConfig.from_json({"spec": {"config": document}}))
