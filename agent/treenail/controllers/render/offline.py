"""Renders pools from files, without a cluster, for checks in a repository."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from treenail.api import documents, machineconfig, machineconfigpool, machineosconfig
from treenail.api.decode import Fields, Json
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosconfig import MachineOSConfig
from treenail.config.validation import validate_config
from treenail.controllers.pools import policy
from treenail.controllers.pools.policy import ObservedPolicy
from treenail.controllers.render import render
from treenail.controllers.render.render import ControllerConfig, RenderedConfig
from treenail.errors import ConfigError, UsageError

_KINDS = (
    machineconfig.KIND,
    machineconfigpool.KIND,
    machineosconfig.KIND,
    policy.KIND,
    render.CONTROLLER_CONFIG_KIND,
)
_MACHINECONFIG_PREFIX = re.compile(r"MachineConfig (\S+): ")


@dataclass(frozen=True, slots=True)
class InputManifests:
    """Objects of the input files, by name."""

    pools: dict[str, MachineConfigPool] = field(default_factory=dict)
    configs: dict[str, MachineConfig] = field(default_factory=dict)
    controller_configs: dict[str, ControllerConfig] = field(default_factory=dict)
    policies: dict[str, ObservedPolicy] = field(default_factory=dict)
    image_configs: dict[str, MachineOSConfig] = field(default_factory=dict)
    locations: dict[tuple[str, str], str] = field(default_factory=dict)
    """File and document of each object, by kind and name."""
    warnings: list[str] = field(default_factory=list)
    """Fields that have no effect, such as misspelt ones, with their file and document."""


def read_manifests(texts: Iterable[tuple[str, str | bytes]]) -> InputManifests:
    """Read the objects in the texts; each text comes with its file name.

    Skips objects of other kinds and reads the items of lists. Checks every MachineConfig. Raises
    `ConfigError` with the file and the document.
    """
    found = InputManifests()
    for where, text in texts:
        for number, document in enumerate(documents.load_documents(text, where=where), start=1):
            _read_document(document, f"{where}, document {number}", found)
    return found


def render_pools(
    found: InputManifests, only: str | None = None
) -> tuple[list[RenderedConfig], list[ConfigError]]:
    """Render the pools in the order of names; return the configs and the errors of other pools.

    A pool whose current rendered config is in the input cannot change what nodes cannot apply.
    Raises `UsageError` when ``only`` is unknown. Raises `ConfigError` without a pool, and with more
    than one ControllerConfig.
    """
    if only is not None and only not in found.pools:
        known = ", ".join(sorted(found.pools))
        raise UsageError(
            f"cannot render MachineConfigPool {only}: the input contains "
            + (f"only: {known}" if known else "no MachineConfigPool")
        )
    if not found.pools:
        raise ConfigError("cannot render: the input contains no MachineConfigPool")
    if len(found.controller_configs) > 1:
        raise ConfigError(
            f"expected one ControllerConfig, found {', '.join(sorted(found.controller_configs))}"
        )
    controller_config = next(iter(found.controller_configs.values()), ControllerConfig())
    rendered, errors = [], []
    for name in sorted(found.pools) if only is None else [only]:
        pool = found.pools[name]
        current = found.configs.get(pool.configuration.name)
        try:
            rendered.append(
                render.render_pool(pool, found.configs.values(), controller_config, current=current)
            )
        except ConfigError as error:
            errors.append(_locate_error(error, name, found))
    return rendered, errors


def _read_document(document: Json, location: str, found: InputManifests) -> None:
    fields = Fields.from_json(document, location)
    kind = fields.get_text("kind")
    if kind.endswith("List") and "items" in document:
        for item in fields.iter_objects("items"):
            _read_document(item.values, item.path, found)
        return
    if kind not in _KINDS:
        return
    name = _get_name(fields, kind, location)
    if (kind, name) in found.locations:
        raise ConfigError(
            f"{location}: {kind} {name} is a duplicate of the one in {found.locations[kind, name]}"
        )
    found.locations[kind, name] = location
    try:
        if kind == machineconfigpool.KIND:
            machineconfigpool.reject_unknown_pool_fields(document)
            found.pools[name] = MachineConfigPool.from_json(document)
        elif kind == machineconfig.KIND:
            found.configs[name] = config = MachineConfig.from_json(document)
            if not render.is_rendered(config):
                found.warnings.extend(
                    f"{location}, {kind} {name}: {ignored}"
                    for ignored in validate_config(config).ignored
                )
        elif kind == machineosconfig.KIND:
            found.image_configs[name] = MachineOSConfig.from_json(document)
        elif kind == policy.KIND:
            policy.parse_policy(document, name)
            found.policies[name] = ObservedPolicy.from_json(document)
        else:
            found.controller_configs[name] = ControllerConfig.from_json(document)
    except ConfigError as error:
        message = str(error).removeprefix(f"{kind} {name}: ")
        raise ConfigError(f"{location}, {kind} {name}: {message}", remedy=error.remedy) from error


def _get_name(fields: Fields, kind: str, location: str) -> str:
    name = fields.get_object("metadata").get_text("name")
    if not name:
        raise ConfigError(f"{location}: the {kind} has no metadata.name")
    return name


def _locate_error(error: ConfigError, pool: str, found: InputManifests) -> ConfigError:
    """Prefix the error with the location of the object that caused it."""
    message = str(error)
    cause = _MACHINECONFIG_PREFIX.match(message)
    key = (machineconfig.KIND, cause[1]) if cause else (machineconfigpool.KIND, pool)
    location = found.locations.get(key, "")
    return ConfigError(f"{location}: {message}" if location else message, remedy=error.remedy)
