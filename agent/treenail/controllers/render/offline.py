"""Pools rendered from files, without a cluster: for the checks of a repository."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from treenail.api import documents, machineconfig, machineconfigpool
from treenail.api.decode import Fields, Json
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.config.validation import check
from treenail.controllers.render import render
from treenail.controllers.render.render import ControllerConfig, Rendered
from treenail.errors import ConfigError, UsageError

_BLAMED = re.compile(r"MachineConfig (\S+): ")


@dataclass(frozen=True, slots=True)
class Documents:
    """What was found in the files, each by name."""

    pools: dict[str, MachineConfigPool] = field(default_factory=dict)
    configs: dict[str, MachineConfig] = field(default_factory=dict)
    clusters: dict[str, ControllerConfig] = field(default_factory=dict)
    places: dict[tuple[str, str], str] = field(default_factory=dict)
    """Where an object of that kind and name stands."""


def read(texts: Iterable[tuple[str, str | bytes]]) -> Documents:
    """The objects in the texts, each of which comes with the name of its file.

    Objects of other kinds are passed over, lists are read entry by entry. Raises `ConfigError`
    that names the file and the document; every MachineConfig is checked, chosen or not.
    """
    found = Documents()
    for where, text in texts:
        for number, document in enumerate(documents.load_all(text, where=where), start=1):
            _read(document, f"{where}, document {number}", found)
    return found


def render_all(
    found: Documents, only: str | None = None
) -> tuple[list[Rendered], list[ConfigError]]:
    """The rendered configs of the pools, by name, and what is wrong with the other pools.

    Raises `UsageError` when there is no pool of the name, and `ConfigError` when there is none at
    all or more than one ControllerConfig.
    """
    if only is not None and only not in found.pools:
        known = ", ".join(sorted(found.pools)) or "none"
        raise UsageError(f"there is no MachineConfigPool {only}, found are: {known}")
    if not found.pools:
        raise ConfigError("there is no MachineConfigPool in the input")
    if len(found.clusters) > 1:
        raise ConfigError(
            f"expected one ControllerConfig, found {', '.join(sorted(found.clusters))}"
        )
    cluster = next(iter(found.clusters.values()), ControllerConfig())
    good, bad = [], []
    for name in sorted(found.pools) if only is None else [only]:
        try:
            good.append(render.render(found.pools[name], found.configs.values(), cluster))
        except ConfigError as error:
            bad.append(_placed(error, name, found))
    return good, bad


def _read(document: Json, place: str, found: Documents) -> None:
    fields = Fields.of(document, place)
    kind = fields.text("kind")
    if kind.endswith("List") and "items" in document:
        for item in fields.objects("items"):
            _read(item.values, item.path, found)
        return
    if kind not in (machineconfig.KIND, machineconfigpool.KIND, render.CONTROLLER_CONFIG):
        return
    name = _named(fields, kind, place)
    if (kind, name) in found.places:
        raise ConfigError(
            f"{place}: {kind} {name} is there twice, first in {found.places[kind, name]}"
        )
    found.places[kind, name] = place
    try:
        if kind == machineconfigpool.KIND:
            found.pools[name] = MachineConfigPool.from_json(document)
        elif kind == machineconfig.KIND:
            found.configs[name] = config = MachineConfig.from_json(document)
            if not render.is_rendered(config):
                check(config)
        else:
            found.clusters[name] = ControllerConfig.from_json(document)
    except ConfigError as error:
        said = str(error).removeprefix(f"{kind} {name}: ")
        raise ConfigError(f"{place}, {kind} {name}: {said}", remedy=error.remedy) from error


def _named(fields: Fields, kind: str, place: str) -> str:
    name = fields.nested("metadata").text("name")
    if not name:
        raise ConfigError(f"{place}: the {kind} has no metadata.name")
    return name


def _placed(error: ConfigError, pool: str, found: Documents) -> ConfigError:
    """The error with the place of the object to blame in front."""
    said = str(error)
    blamed = _BLAMED.match(said)
    key = (machineconfig.KIND, blamed[1]) if blamed else (machineconfigpool.KIND, pool)
    place = found.places.get(key, "")
    return ConfigError(f"{place}: {said}" if place else said, remedy=error.remedy)
