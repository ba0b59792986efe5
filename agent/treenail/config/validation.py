"""Validation of MachineConfigs before the merge, and of the size of rendered ones."""

import json

from treenail.api import ignition
from treenail.api.decode import Json
from treenail.api.machineconfig import EXTENSIONS, KERNEL_TYPES, MachineConfig
from treenail.errors import ConfigError

SIZE_LIMIT = 1_572_864
"""Maximum size of an object as JSON, in bytes: the request limit of etcd."""

_MAX_MODE = 0o777


def validate_config(config: MachineConfig) -> None:
    """Raise `ConfigError` with the MachineConfig and the place when the config is invalid."""
    try:
        _validate_spec(config)
    except ConfigError as error:
        raise ConfigError(f"MachineConfig {config.name}: {error}", remedy=error.remedy) from error


def check_rendered_size(spec: Json, name: str) -> None:
    """Raise `ConfigError` when a rendered config is too large for the API server."""
    size = len(json.dumps(spec, ensure_ascii=False, separators=(",", ":")).encode())
    if size > SIZE_LIMIT:
        raise ConfigError(
            f"cannot store {name}: it has {size} bytes, and the limit is {SIZE_LIMIT}",
            remedy="shrink the files of its MachineConfigs, or move them into the OS image",
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
                remedy="remove the setuid, setgid and sticky bits: a MachineConfig cannot set them",
            )
