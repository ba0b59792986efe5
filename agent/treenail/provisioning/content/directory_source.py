"""Inputs of served configs from a directory of manifests, without a cluster."""

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from treenail.api import (
    decode,
    documents,
    kinds,
    machineconfig,
    machineconfigpool,
    machineosbuild,
    machineosconfig,
)
from treenail.controllers.render.render import CONTROLLER_CONFIG_KIND
from treenail.errors import ConfigError
from treenail.provisioning.content import source

T = TypeVar("T")

_SUFFIXES = (".json", ".yaml", ".yml")
_HASH = re.compile(r"[0-9a-f]{32}")

_Signature = tuple[tuple[str, int, int, int], ...]


class DirectorySource:
    """A `PoolSource` that reads the files of a directory.

    The directory contains MachineConfigPools, the output of ``treenail-controller render`` and
    optionally a ControllerConfig, MachineOSConfigs and MachineOSBuilds. Changed files are read
    again. A file that cannot be read affects only the pools that lack an object.
    """

    def __init__(self, directory: Path, settings: source.SourceSettings) -> None:
        self._directory = directory
        self._settings = settings
        self._lock = threading.Lock()
        self._signature: _Signature | None = None
        self._objects = _DirectoryObjects(str(directory))

    def read_inputs(self, pool: str) -> source.ServedInputs:
        """Read the inputs; raise `PoolMissingError` or `SourceError`."""
        return source.read_pool_inputs(self._read_objects(), pool, self._settings)

    def has_pool(self, name: str) -> bool:
        """Return whether a file contains a pool of this name."""
        try:
            return name in self._read_objects().pools
        except source.SourceError:
            return False

    def get_pools(self) -> Iterable[machineconfigpool.MachineConfigPool]:
        """Return all pools that can be read."""
        try:
            pools = self._read_objects().pools.values()
        except source.SourceError:
            return ()
        return [served.pool for served in pools if served.pool is not None]

    def describe_staleness(self) -> str:
        """Return an empty text: files are read again when they change."""
        return ""

    def describe_unready(self) -> str:
        """Return an empty text: files need no connection."""
        return ""

    def _read_objects(self) -> "_DirectoryObjects":
        try:
            files = sorted(path for path in self._directory.iterdir() if path.suffix in _SUFFIXES)
            signature = tuple(map(_sign_file, files))
        except OSError as error:
            raise source.SourceError(
                f"cannot read {self._directory}: {error.strerror or error}"
            ) from error
        with self._lock:
            if signature != self._signature:
                objects = _DirectoryObjects(str(self._directory))
                for file in files:
                    objects.read_file(file)
                self._objects, self._signature = objects, signature
            return self._objects


def _sign_file(path: Path) -> tuple[str, int, int, int]:
    status = path.stat()
    return path.name, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class _DirectoryObjects:
    """The objects of a directory, by name."""

    directory: str
    pools: dict[str, source.ServedPool] = field(default_factory=dict)
    configs: dict[str, source.PackedConfig] = field(default_factory=dict)
    controller_configs: dict[str, source.ObservedControllerConfig] = field(default_factory=dict)
    image_configs: dict[str, machineosconfig.MachineOSConfig] = field(default_factory=dict)
    image_builds: dict[str, machineosbuild.MachineOSBuild] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def read_file(self, path: Path) -> None:
        """Add the objects of a file, or a problem."""
        try:
            for document in documents.load_documents(path.read_bytes(), where=path.name):
                self._add_document(document, path.name)
        except ConfigError as error:
            self.problems.append(str(error))
        except OSError as error:
            self.problems.append(f"{path.name}: {error.strerror or error}")

    def find_pool(self, name: str) -> source.ServedPool | None:
        """Return the pool of this name, with the rendered config of the directory."""
        served = self.pools.get(name)
        if served is None:
            self._raise_problem(f"cannot find MachineConfigPool {name}")
            return None
        pool = served.pool
        if pool is None or source.select_rendered(pool):
            return served
        rendered = pool.configuration.name or self._find_rendered_name(name)
        return replace(
            served,
            pool=replace(pool, status_configuration=machineconfigpool.PoolConfiguration(rendered)),
        )

    def load_config(self, config: source.PackedConfig) -> source.PackedConfig:
        """Return the config: all of them have their contents."""
        return config

    def find_config(self, name: str) -> source.PackedConfig | None:
        """Return the MachineConfig of this name."""
        config = self.configs.get(name)
        if config is None:
            self._raise_problem(f"cannot find MachineConfig {name}")
        return config

    def get_controller_configs(self) -> Mapping[str, source.ObservedControllerConfig]:
        """Return all ControllerConfigs by name."""
        return self.controller_configs

    def get_image_configs(self) -> Iterable[machineosconfig.MachineOSConfig]:
        """Return all MachineOSConfigs."""
        return self.image_configs.values()

    def get_image_builds(self) -> Iterable[machineosbuild.MachineOSBuild]:
        """Return all MachineOSBuilds."""
        return self.image_builds.values()

    def is_image_running(self, image: str) -> bool:  # noqa: ARG002  # interface
        """Return True: a directory has no Nodes, and the status of its pools decides."""
        return True

    def _add_document(self, document: decode.Json, where: str) -> None:
        fields = decode.Fields.from_json(document, where)
        kind = fields.get_text("kind")
        if (items := kinds.list_items(fields)) is not None:
            for item in items:
                self._add_document(item.values, item.path)
        elif kind == machineconfigpool.KIND:
            _add_object(self.pools, document, where, source.ServedPool.from_json)
        elif kind == machineconfig.KIND:
            _add_object(self.configs, document, where, source.PackedConfig.from_json)
        elif kind == CONTROLLER_CONFIG_KIND:
            from_json = source.ObservedControllerConfig.from_json
            _add_object(self.controller_configs, document, where, from_json)
        elif kind == machineosconfig.KIND:
            _add_object(
                self.image_configs, document, where, machineosconfig.MachineOSConfig.from_json
            )
        elif kind == machineosbuild.KIND:
            _add_object(self.image_builds, document, where, machineosbuild.MachineOSBuild.from_json)

    def _raise_problem(self, message: str) -> None:
        """Raise if a file could not be read: it may contain the object."""
        if self.problems:
            raise source.SourceError(f"{message} in {self.directory}: {self.problems[0]}")

    def _find_rendered_name(self, pool: str) -> str:
        """Return the only rendered config of a pool whose manifest names none."""
        prefix = f"rendered-{pool}-"
        names = [
            name
            for name in self.configs
            if name.startswith(prefix) and _HASH.fullmatch(name.removeprefix(prefix))
        ]
        if len(names) != 1:
            self._raise_problem(f"cannot find the rendered config of MachineConfigPool {pool}")
            count = f"{len(names)} rendered configs" if names else "no rendered config"
            raise source.SourceError(
                f"{self.directory} contains {count} of MachineConfigPool {pool}, and the pool "
                "names none",
                remedy="write one: treenail-controller render -f SOURCES --pool "
                f"{pool} > {self.directory}/rendered-{pool}.yaml",
            )
        return names[0]


def _add_object(
    objects: dict[str, T], document: decode.Json, where: str, parse: Callable[[decode.Json], T]
) -> None:
    fields = decode.Fields.from_json(document, where)
    kind, name = fields.get_text("kind"), fields.get_object("metadata").get_text("name")
    if not name:
        raise ConfigError(f"{where}: the {kind} has no metadata.name")
    if name in objects:
        raise ConfigError(f"{where}: {kind} {name} is a duplicate")
    try:
        objects[name] = parse(document)
    except ConfigError as error:
        raise ConfigError(f"{where}: cannot read {kind} {name}: {error}") from error
