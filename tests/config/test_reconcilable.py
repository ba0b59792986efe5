"""Tests that irreconcilable changes are rejected as the Machine Config Operator rejects them."""

import contextlib

import pytest
from hypothesis import given

from tests.api.configs import configs, ignition, with_files, with_users
from tests.api.fuzzing import damaged, fuzz
from tests.oracle import needs_oracle, records
from treenail.api.machineconfig import MachineConfig
from treenail.api.object_meta import ObjectMeta
from treenail.config.reconcilable import (
    ValidationOverride,
    check_reconcilable,
    find_irreconcilable_changes,
    find_read_only_paths,
)
from treenail.config.wanted_state import ParsedConfig
from treenail.errors import ConfigError, IgnitionError, UnreconcilableError


def config(document: object = None, **spec: object) -> ParsedConfig:
    return ParsedConfig(MachineConfig(config=document, **spec))


def read_config(document: object) -> ParsedConfig:
    return ParsedConfig(MachineConfig.from_json(document))


def reasons(old: object, new: object) -> list[tuple[str, str]]:
    found = find_irreconcilable_changes(config(old), config(new))
    return [(obstacle.place.removeprefix("spec.config."), obstacle.reason) for obstacle in found]


def storage(**lists: object) -> dict[str, object]:
    return ignition(storage=lists)


@needs_oracle
def test_decisions_and_reasons_equal_recorded_ones() -> None:
    for record in records("reconcilable"):
        old = read_config(record["old"])
        overrides = (record["overrides"] or {}).get("storage", [])
        allowed = frozenset(map(ValidationOverride, overrides))
        for document in record["new"]:
            new = read_config(document)
            if record["err"] is None:
                check_reconcilable(old, new, allowed=allowed)
            elif "parsing new Ignition config" in record["err"]:
                with pytest.raises(IgnitionError):
                    check_reconcilable(old, new, allowed=allowed)
            else:
                with pytest.raises(UnreconcilableError) as caught:
                    check_reconcilable(old, new, allowed=allowed)
                # The Machine Config Operator swaps the two names; the reason follows them.
                reason = record["err"].partition(": ")[2]
                assert reason in str(caught.value)


def test_error_names_both_configs_and_every_change() -> None:
    old = config(ignition(), metadata=ObjectMeta(name="rendered-a"))
    new = config(
        storage(disks=[{"device": "/dev/sda"}], directories=[{"path": "/d"}]),
        metadata=ObjectMeta(name="rendered-b"),
        fips=True,
    )
    with pytest.raises(UnreconcilableError) as caught:
        check_reconcilable(old, new)
    assert str(caught.value) == (
        'new machineconfig "rendered-b" is not reconcilable against "rendered-a": '
        "ignition disks section contains changes (spec.config.storage.disks); "
        "ignition directories section contains changes (spec.config.storage.directories); "
        "detected change to FIPS flag; refusing to modify FIPS on a running cluster (spec.fips)"
    )
    assert "allow Disks in irreconcilableValidationOverrides" in caught.value.remedy


def test_files_units_and_drop_ins_are_reconcilable() -> None:
    units = {"units": [{"name": "a.service", "contents": "x", "dropins": [{"name": "a.conf"}]}]}
    assert reasons(ignition(), ignition(storage={"files": [{"path": "/a"}]}, systemd=units)) == []


def test_append_and_force_file_are_irreconcilable() -> None:
    new = with_files(
        {"path": "/a", "append": [{"source": "data:,x"}]},
        {"path": "/run/machine-config-daemon-force"},
    )
    assert reasons(ignition(), new) == [
        ("storage.files[0].append", "ignition file /a includes append"),
        (
            "storage.files[1].path",
            "cannot create /run/machine-config-daemon-force via Ignition",
        ),
    ]


def test_append_of_the_first_boot_is_reconcilable() -> None:
    appended = {"path": "/a", "append": [{"source": "data:,x"}]}
    more = {"path": "/a", "append": [{"source": "data:,x"}, {"source": "data:,y"}]}
    assert reasons(with_files(appended), with_files({"path": "/b"}, appended)) == []
    assert reasons(with_files(appended), with_files({"path": "/a"})) == []
    assert reasons(with_files(appended), with_files(more)) == [
        ("storage.files[0].append", "ignition file /a includes append")
    ]


def test_links_can_be_removed_but_not_changed() -> None:
    one = storage(links=[{"path": "/l", "target": "a"}])
    other = storage(links=[{"path": "/l", "target": "b"}])
    assert reasons(one, ignition()) == []
    assert reasons(one, other) == [("storage.links", "ignition links section contains changes")]


def test_equivalent_config_is_reconcilable() -> None:
    old = ignition(
        storage={
            "directories": [{"path": "/a"}, {"path": "/b", "user": {"name": "root"}}],
            "disks": [{"device": "/dev/a"}, {"device": "/dev/b", "partitions": []}],
        },
        kernelArguments={"shouldExist": ["a", "b"]},
    )
    new = ignition(
        storage={
            "directories": [{"path": "/b"}, {"path": "/a", "mode": 0o755}],
            "disks": [{"device": "/dev/b"}, {"device": "/dev/a"}],
        },
        kernelArguments={"shouldExist": ["b", "a"]},
    )
    assert reasons(old, new) == []


def test_only_keys_and_password_of_core_are_reconcilable() -> None:
    old = with_users({"name": "core", "sshAuthorizedKeys": ["1"]})
    assert reasons(old, with_users({"name": "core", "passwordHash": "x"})) == []
    found = reasons(old, with_users({"name": "core", "shell": "/bin/sh", "uid": 7}))
    assert [place for place, _ in found] == ["passwd.users[0]"]
    assert found[0][1].endswith("hash are not reconcilable with shell, uid beside them")
    groups = ignition(passwd={"users": [], "groups": [{"name": "g"}]})
    assert reasons(ignition(), groups) == [
        (
            "passwd.groups",
            "invalid passwd change(s): ignition Passwd Groups section contains changes",
        )
    ]


def test_luks_is_not_compared() -> None:
    assert reasons(storage(luks=[{"name": "a"}]), ignition()) == []


@fuzz
@given(configs(), configs().flatmap(damaged))
def test_any_two_configs_raise_only_config_errors(old: object, new: object) -> None:
    with contextlib.suppress(ConfigError):
        check_reconcilable(config(old), read_config({"spec": {"config": new}}))


@fuzz
@given(configs())
def test_config_is_reconcilable_with_itself(
    document: dict[str, object],
) -> None:
    assert reasons(document, document) == []


@pytest.mark.parametrize(
    "path",
    [
        "/etc/treenail/agent.toml",
        "/var/lib/treenail/ledger.json",
        "/run/treenail",
        "/run/treenail/x",
    ],
)
def test_paths_of_the_agent_are_refused(path: str) -> None:
    new = with_files({"path": path, "contents": {"source": "data:,x"}})
    found = [(place, reason) for place, reason in reasons(new, new)]
    assert found == [
        ("storage.files[0].path", f"cannot write {path}: it belongs to the node agent")
    ]
    beside = with_files({"path": "/etc/treenail/health.d/x", "contents": {"source": "data:,x"}})
    assert reasons(beside, beside) == []


@pytest.mark.parametrize("path", ["/proc/cmdline", "/sys/x", "/dev/x", "/sysroot/x", "/ostree/x"])
def test_paths_of_kernel_and_ostree_are_refused(path: str) -> None:
    new = with_files({"path": path, "contents": {"source": "data:,x"}})
    (place, reason), *others = reasons(new, new)
    assert (place, others) == ("storage.files[0].path", [])
    assert reason == f"cannot write {path}: the kernel or OSTree provides this directory"
    beside = with_files({"path": f"/etc{path}", "contents": {"source": "data:,x"}})
    assert reasons(beside, beside) == []


def test_files_below_usr_need_an_image() -> None:
    paths = ("/usr/bin/tool", "/usr/local/bin/tool", "/etc/usr/file")
    new = with_files(*({"path": path, "contents": {"source": "data:,x"}} for path in paths))
    (found,) = find_read_only_paths(config(new))
    assert found.reason == "cannot write /usr/bin/tool: /usr is read-only on a node"
