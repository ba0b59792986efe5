"""Tests that an invalid MachineConfig is rejected before the merge."""

from typing import Any

import pytest

from tests.oracle import needs_oracle, records
from treenail.api.machineconfig import MachineConfig
from treenail.config.validation import (
    SIZE_LIMIT,
    check_rendered_size,
    find_ignored_fields,
    validate_config,
)
from treenail.errors import ConfigError


def machine_config(spec: dict[str, Any]) -> MachineConfig:
    return MachineConfig.from_json({"metadata": {"name": "50-mine"}, "spec": spec})


def with_file(**file: Any) -> dict[str, Any]:
    return {"config": {"ignition": {"version": "3.5.0"}, "storage": {"files": [file]}}}


@needs_oracle
def test_recorded_configs_are_accepted_and_rejected_as_recorded() -> None:
    found = records("validate_mc")
    for record in found:
        if record["err"]:
            with pytest.raises(ConfigError, match="ignition"):
                validate_config(machine_config(record["spec"]))
        else:
            validate_config(machine_config(record["spec"]))
    assert len(found) == 29


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"kernelType": "64k-pages"},
        {"kernelType": ""},
        {"extensions": ["usbguard", "kernel-devel"]},
        with_file(path="/etc/a", mode=0o777),
    ],
)
def test_valid_spec_is_accepted(spec: dict[str, Any]) -> None:
    validate_config(machine_config(spec))


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            {"kernelType": "rt"},
            "spec.kernelType: expected one of default, realtime, 64k-pages, found 'rt'",
        ),
        # The Machine Config Operator checks names only with an Ignition config.
        (
            {"extensions": ["usbguard", "usbgard"]},
            (
                "spec.extensions[1]: expected one of ipsec, kerberos, kernel-devel, "
                "sandboxed-containers, sysstat, two-node-ha, usbguard, found 'usbgard'"
            ),
        ),
        (
            with_file(path="/etc/a", mode=0o1777),
            "spec.config.storage.files[0].mode: expected at most 511 (0777), found 1023 (0o1777)",
        ),
        # Go reads names in any case.
        (
            {"config": {"ignition": {"version": "3.5.0"}, "Storage": {}}},
            "spec.config.Storage: unknown field",
        ),
        (
            with_file(path="/etc/a", user={"id": 0, "name": "root"}),
            "spec.config.storage.files[0].user: expected an id or a name, found both",
        ),
        # The second file replaces the first.
        (
            {
                "config": {
                    "ignition": {"version": "2.2.0"},
                    "storage": {
                        "files": [
                            {"filesystem": "root", "path": "/etc/a", "mode": 0o1777},
                            {"filesystem": "root", "path": "/etc/a"},
                        ]
                    },
                }
            },
            "spec.config.storage.files[0].mode: expected at most 511 (0777), found 1023 (0o1777)",
        ),
        (
            with_file(path="../etc"),
            "spec.config.storage.files[0].path: expected an absolute path, found '../etc'",
        ),
    ],
)
def test_invalid_spec_raises_error_with_its_place(spec: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        validate_config(machine_config(spec))
    assert str(raised.value) == f"MachineConfig 50-mine: {sentence}"


@pytest.mark.parametrize(
    ("mode", "remedy"),
    [
        (644, "the number is decimal: write 0644 in YAML, or 420"),
        (755, "the number is decimal: write 0755 in YAML, or 493"),
        (0o1777, "remove the setuid, setgid and sticky bits: a MachineConfig cannot set them"),
        (0o4755, "remove the setuid, setgid and sticky bits: a MachineConfig cannot set them"),
        (684, "remove the setuid, setgid and sticky bits: a MachineConfig cannot set them"),
    ],
)
def test_remedy_of_a_mode_names_octal_digits(mode: int, remedy: str) -> None:
    with pytest.raises(ConfigError) as raised:
        validate_config(machine_config(with_file(path="/etc/a", mode=mode)))
    assert raised.value.remedy == remedy


def test_misspelt_fields_are_ignored_and_found() -> None:
    spec = {**with_file(path="/etc/a", modee=1), "kernelTyp": "realtime"}
    config = MachineConfig.from_json({"metadata": {"name": "50-mine"}, "spec": spec, "sepc": {}})
    validate_config(config)
    assert [str(found) for found in find_ignored_fields(config)] == [
        "sepc: ignored: unknown field; did you mean spec?",
        "spec.kernelTyp: ignored: unknown field; did you mean kernelType?",
        "spec.config.storage.files[0].modee: ignored: unknown field; did you mean mode?",
    ]


def test_rendered_config_over_size_limit_raises_error() -> None:
    fits = {"a": "x" * (SIZE_LIMIT - len('{"a":""}'))}
    check_rendered_size(fits, "rendered-worker-1")
    with pytest.raises(ConfigError) as raised:
        check_rendered_size({"a": f"{fits['a']}x"}, "rendered-worker-1")
    assert str(raised.value) == (
        "cannot store rendered-worker-1: it has 1572865 bytes, and the limit is 1572864"
    )
