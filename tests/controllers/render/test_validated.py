"""MachineConfigs that did not change are validated once."""

import pytest

from tests.controllers.render.test_render import machine_config
from treenail.controllers.render.controller import ValidatedConfigs
from treenail.errors import ConfigError


def test_changed_config_is_validated_again() -> None:
    validated = ValidatedConfigs()
    validated.validate(machine_config("a", kernelType="realtime"))
    with pytest.raises(ConfigError, match=r"spec\.kernelType: expected one of"):
        validated.validate(machine_config("a", kernelType="fast"))


def test_unchanged_config_keeps_its_warnings() -> None:
    validated, config = ValidatedConfigs(), machine_config("a", kernelTyp="realtime")
    first = validated.validate(config)
    assert [str(each) for each in first.ignored] == [
        "spec.kernelTyp: ignored: unknown field; did you mean kernelType?"
    ]
    assert validated.validate(config) is first


def test_invalid_config_stays_invalid() -> None:
    validated, config = ValidatedConfigs(), machine_config("a", kernelType="fast")
    for _ in range(2):
        with pytest.raises(ConfigError):
            validated.validate(config)
