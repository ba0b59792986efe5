"""What a MachineConfig must keep to before anything is made from it."""

import json

from treenail.api import ignition
from treenail.api.decode import Json
from treenail.api.machineconfig import EXTENSIONS, KERNEL_TYPES, MachineConfig
from treenail.errors import ConfigError

SIZE_LIMIT = 1_572_864
"""Bytes of JSON that an object may have, which is what etcd takes."""

_MAX_MODE = 0o777


def validate_config(config: MachineConfig) -> None:
    """Raise `ConfigError`, which names the MachineConfig and the place, unless it can be used."""
    try:
        _validate_spec(config)
    except ConfigError as error:
        raise ConfigError(f"MachineConfig {config.name}: {error}", remedy=error.remedy) from error


def check_rendered_size(spec: Json, name: str) -> None:
    """Raise `ConfigError` when a rendered config is too large to be stored."""
    size = len(json.dumps(spec, ensure_ascii=False, separators=(",", ":")).encode())
    if size > SIZE_LIMIT:
        raise ConfigError(
            f"{name} has {size} bytes, more than the limit of {SIZE_LIMIT}",
            remedy="make the files of its MachineConfigs smaller, or put them into the OS image",
        )


def _validate_spec(config: MachineConfig) -> None:
    if config.kernel_type not in ("", *KERNEL_TYPES):
        raise ConfigError(
            f"spec.kernelType: expected one of {', '.join(KERNEL_TYPES)}, "
            f"found {config.kernel_type!r:.40}"
        )
    for index, name in enumerate(config.extensions):
        if name not in EXTENSIONS:
            raise ConfigError(
                f"spec.extensions[{index}]: expected one of {', '.join(EXTENSIONS)}, "
                f"found {name!r:.40}"
            )
    for file in ignition.parse_ignition(config.config).files:
        if file.mode is not None and file.mode > _MAX_MODE:
            raise ConfigError(
                f"{file.location}.mode: expected at most 511 (0777), found {file.mode} "
                f"({file.mode:#o})",
                remedy="a MachineConfig can't set the setuid, setgid and sticky bits",
            )
