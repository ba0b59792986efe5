"""Pools rendered from files, without a cluster: for the checks of a repository."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from treenail.api import documents, machineconfig, machineconfigpool
from treenail.api.decode import Fields, Json
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.config.validation import validate_config
from treenail.controllers.render import render
from treenail.controllers.render.render import ControllerConfig, RenderedConfig
from treenail.errors import ConfigError, UsageError

_MACHINECONFIG_PREFIX = re.compile(r"MachineConfig (\S+): ")


@dataclass(frozen=True, slots=True)
class InputManifests:
    """What was found in the files, each by name."""

    pools: dict[str, MachineConfigPool] = field(default_factory=dict)
    configs: dict[str, MachineConfig] = field(default_factory=dict)
    controller_configs: dict[str, ControllerConfig] = field(default_factory=dict)
    locations: dict[tuple[str, str], str] = field(default_factory=dict)
    """Where an object of that kind and name stands."""


def read_manifests(texts: Iterable[tuple[str, str | bytes]]) -> InputManifests:
    """The objects in the texts, each of which comes with the name of its file.

    Objects of other kinds are passed over, lists are read entry by entry. Raises `ConfigError`
    that names the file and the document; every MachineConfig is checked, chosen or not.
    """
    found = InputManifests()
    for where, text in texts:
        for number, document in enumerate(documents.load_documents(text, where=where), start=1):
            _read_document(document, f"{where}, document {number}", found)
    return found


def render_pools(
    found: InputManifests, only: str | None = None
) -> tuple[list[RenderedConfig], list[ConfigError]]:
    """The rendered configs of the pools, by name, and what is wrong with the other pools.

    Raises `UsageError` when there is no pool of the name, and `ConfigError` when there is none at
    all or more than one ControllerConfig.
    """
    if only is not None and only not in found.pools:
        known = ", ".join(sorted(found.pools)) or "none"
        raise UsageError(f"there is no MachineConfigPool {only}, found are: {known}")
    if not found.pools:
        raise ConfigError("there is no MachineConfigPool in the input")
    if len(found.controller_configs) > 1:
        raise ConfigError(
            f"expected one ControllerConfig, found {', '.join(sorted(found.controller_configs))}"
        )
    cluster = next(iter(found.controller_configs.values()), ControllerConfig())
    good, bad = [], []
    for name in sorted(found.pools) if only is None else [only]:
        try:
            good.append(render.render_pool(found.pools[name], found.configs.values(), cluster))
        except ConfigError as error:
            bad.append(_locate_error(error, name, found))
    return good, bad


def _read_document(document: Json, place: str, found: InputManifests) -> None:
    fields = Fields.from_json(document, place)
    kind = fields.get_text("kind")
    if kind.endswith("List") and "items" in document:
        for item in fields.iter_objects("items"):
            _read_document(item.values, item.path, found)
        return
    if kind not in (machineconfig.KIND, machineconfigpool.KIND, render.CONTROLLER_CONFIG_KIND):
        return
    name = _get_name(fields, kind, place)
    if (kind, name) in found.locations:
        raise ConfigError(
            f"{place}: {kind} {name} is there twice, first in {found.locations[kind, name]}"
        )
    found.locations[kind, name] = place
    try:
        if kind == machineconfigpool.KIND:
            found.pools[name] = MachineConfigPool.from_json(document)
        elif kind == machineconfig.KIND:
            found.configs[name] = config = MachineConfig.from_json(document)
            if not render.is_rendered(config):
                validate_config(config)
        else:
            found.controller_configs[name] = ControllerConfig.from_json(document)
    except ConfigError as error:
        said = str(error).removeprefix(f"{kind} {name}: ")
        raise ConfigError(f"{place}, {kind} {name}: {said}", remedy=error.remedy) from error


def _get_name(fields: Fields, kind: str, place: str) -> str:
    name = fields.get_object("metadata").get_text("name")
    if not name:
        raise ConfigError(f"{place}: the {kind} has no metadata.name")
    return name


def _locate_error(error: ConfigError, pool: str, found: InputManifests) -> ConfigError:
    """The error with the place of the object to blame in front."""
    said = str(error)
    blamed = _MACHINECONFIG_PREFIX.match(said)
    key = (machineconfig.KIND, blamed[1]) if blamed else (machineconfigpool.KIND, pool)
    place = found.locations.get(key, "")
    return ConfigError(f"{place}: {said}" if place else said, remedy=error.remedy)
