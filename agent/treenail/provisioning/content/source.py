"""Inputs of a served config: one code path for a cluster and for a directory of manifests."""

import hashlib
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from treenail import errors, sizes
from treenail.api import annotations as key
from treenail.api import (
    controllerconfig,
    decode,
    machineconfigpool,
    machineosbuild,
    machineosconfig,
    object_meta,
)
from treenail.api.ignition.model import IgnitionFile
from treenail.config.merge import GENERATED_BY
from treenail.controllers.pools import os_image
from treenail.provisioning.content.selection import RETRY_AFTER_S as RETRY_FIRST_IMAGE_S
from treenail.provisioning.content.selection import (
    FirstImageSettings,
    FirstImageWait,
    SelectedImage,
    decide_first_image,
    select_image,
    select_rendered,
)

CONFIG_LIMIT = 8 * sizes.MIB
"""Maximum size of a rendered config in bytes of JSON."""


class PoolMissingError(errors.ConfigError):
    """No pool has the requested name."""


class SourceError(errors.TreenailError):
    """The pool exists, and its inputs cannot be read."""


RETRY_AFTER_S = 1
"""Seconds until a client above a limit should try again. A response takes a fraction of that."""


class RenderedConfigMissingError(SourceError):
    """The rendered config that the pool names does not exist."""


class SourceUnreadyError(SourceError):
    """The inputs do not exist yet; clients must try again after ``retry_after_s``."""

    def __init__(
        self, message: str, *, remedy: str = "", retry_after_s: int = RETRY_AFTER_S
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """A MachineConfig in compressed form: a cluster has many, and few of them are served."""

    name: str
    version: str
    """Changes with the contents."""
    os_image_url: str
    size: int
    """Bytes of JSON."""
    generated_by: str = ""
    """Controller that rendered it; empty for a MachineConfig that a user wrote."""
    content: bytes = field(default=b"", repr=False)
    """Compressed JSON; empty for a config above `CONFIG_LIMIT`."""

    @classmethod
    def from_json(cls, document: decode.Json) -> "PackedConfig":
        """Pack an API object or a file; raise `ConfigError`."""
        fields = decode.Fields.from_json(document, "")
        metadata = fields.get_object("metadata")
        own = {**document, "metadata": metadata.get_other_fields("managedFields")}
        text = json.dumps(own, separators=(",", ":")).encode()
        return cls(
            metadata.get_text("name"),
            hashlib.sha256(text).hexdigest(),
            fields.get_object("spec").get_text("osImageURL"),
            len(text),
            metadata.get_text_map("annotations").get(GENERATED_BY, ""),
            zlib.compress(text, 1) if len(text) <= CONFIG_LIMIT else b"",
        )

    def read_text(self) -> bytes:
        """Return the JSON, without spaces; raise `SourceError` above the size limit."""
        if not self.content:
            raise SourceError(
                f"cannot serve MachineConfig {self.name}: it has {self.size} bytes, and the limit "
                f"is {CONFIG_LIMIT}"
            )
        return zlib.decompress(self.content, bufsize=self.size)


@dataclass(frozen=True, slots=True)
class ObservedControllerConfig:
    """The CAs of a ControllerConfig, or why they cannot be read."""

    metadata: object_meta.ObjectMeta
    contents: controllerconfig.ControllerConfigContents | None
    version: str
    """Changes with the contents."""
    problem: str = ""

    @classmethod
    def from_json(cls, document: decode.Json) -> "ObservedControllerConfig":
        """Read an API object or a file; raise `ConfigError` for malformed metadata."""
        fields = decode.Fields.from_json(document, "")
        metadata = object_meta.ObjectMeta.from_fields(fields.get_object("metadata"))
        text = json.dumps(document.get("spec"), sort_keys=True).encode()
        version = hashlib.sha256(text).hexdigest()
        try:
            contents = controllerconfig.ControllerConfigContents.from_json(document)
        except errors.ConfigError as error:
            return cls(metadata, None, version, str(error))
        return cls(metadata, contents, version)


@dataclass(frozen=True, slots=True)
class ServedPool:
    """A pool, or why it cannot be read."""

    pool: machineconfigpool.MachineConfigPool | None
    problem: str = ""

    @classmethod
    def from_json(cls, document: decode.Json) -> "ServedPool":
        """Read an API object or a file."""
        try:
            return cls(machineconfigpool.MachineConfigPool.from_json(document))
        except errors.ConfigError as error:
            return cls(None, str(error))


class SourceObjects(Protocol):
    """The objects that inputs are selected from. Thread-safe."""

    def find_pool(self, name: str) -> ServedPool | None:
        """Return the pool of this name."""

    def find_config(self, name: str) -> PackedConfig | None:
        """Return the MachineConfig of this name, perhaps without its contents."""

    def load_config(self, config: PackedConfig) -> PackedConfig:
        """Return a config of `find_config` with its contents; raise `TreenailError`."""

    def get_controller_configs(self) -> Mapping[str, ObservedControllerConfig]:
        """Return all ControllerConfigs by name."""

    def get_image_configs(self) -> Iterable[machineosconfig.MachineOSConfig]:
        """Return all MachineOSConfigs."""

    def get_image_builds(self) -> Iterable[machineosbuild.MachineOSBuild]:
        """Return all MachineOSBuilds."""

    def is_image_running(self, image: str) -> bool:
        """Return whether a Node reports the image; True where no Nodes can be read."""


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """Settings of the server that the inputs depend on."""

    image_annotation: str = key.DESIRED_OS_IMAGE
    """Annotation in which the cluster's controllers assign images."""
    needs_cluster: Collection[str] = ()
    """Registries that machines cannot reach before they join."""
    first_images: FirstImageSettings | None = None
    """Of an installation in image mode; None outside of a cluster."""


@dataclass(frozen=True, slots=True)
class ServedInputs:
    """Everything that the config of a new machine is built from."""

    pool: machineconfigpool.MachineConfigPool
    config: PackedConfig
    """The selected rendered config, perhaps without its contents."""
    controller_config: controllerconfig.ControllerConfigContents | None
    """None when the cluster has none."""
    image: SelectedImage
    versions: tuple[str, ...]
    """Versions of the inputs: equal ones mean equal served configs."""
    image_annotation: str = key.DESIRED_OS_IMAGE
    """Annotation in which the cluster's controllers assign images."""
    appended: tuple[IgnitionFile, ...] = field(default=(), repr=False)
    """Files for the machine that are no part of the rendered config; may contain a login."""
    load_config: Callable[[PackedConfig], PackedConfig] = field(
        default=lambda config: config, repr=False, compare=False
    )
    """Returns ``config`` with its contents; raises `TreenailError`."""

    def read_rendered(self) -> bytes:
        """Return the JSON of the selected rendered config, without spaces.

        It may request it from the API server. Raises `TreenailError`; `SourceError` above the size
        limit.
        """
        return self.load_config(self.config).read_text()


class PoolSource(Protocol):
    """Reads the inputs of a pool. Thread-safe."""

    def read_inputs(self, pool: str) -> ServedInputs:
        """Read the inputs; raise `PoolMissingError`, `SourceError` or `SourceUnreadyError`."""

    def has_pool(self, name: str) -> bool:
        """Return whether a pool of this name is known; False while none can be read."""

    def get_pools(self) -> Iterable[machineconfigpool.MachineConfigPool]:
        """Return all pools that can be read; none while none can."""

    def describe_staleness(self) -> str:
        """Say why and since when the inputs may be outdated; empty when they are current."""

    def describe_unready(self) -> str:
        """Say why no inputs can be read yet; empty when they can."""


def read_pool_inputs(objects: SourceObjects, name: str, settings: SourceSettings) -> ServedInputs:
    """Select the inputs of a pool; raise `PoolMissingError` or `SourceError`.

    Raises `SourceUnreadyError` while machines must wait for the first image of the pool.
    """
    observed = objects.find_pool(name)
    if observed is None:
        raise PoolMissingError(f"no MachineConfigPool has the name {name}")
    if observed.pool is None:
        raise SourceError(f"cannot read MachineConfigPool {name}: {observed.problem}")
    pool = observed.pool
    build = os_image.find_pool_build(pool, objects.get_image_configs(), objects.get_image_builds())
    first = _find_first_image(pool, build, settings)
    config = _find_rendered(objects, pool, is_first=bool(first))
    controller_config = _find_controller_config(objects.get_controller_configs())
    if controller_config is not None and controller_config.contents is None:
        raise SourceError(
            f"cannot read ControllerConfig {controller_config.metadata.name}: "
            f"{controller_config.problem}"
        )
    image = select_image(
        pool,
        build,
        rendered_image=config.os_image_url,
        needs_cluster=settings.needs_cluster,
        is_image_running=objects.is_image_running,
        first_image=first,
    )
    versions = (
        config.name,
        config.version,
        "" if controller_config is None else controller_config.version,
        image.image,
        image.os_image_url,
        "later" if image.is_later else "",
        settings.image_annotation,
        pool.image_files or "",
    )
    contents = None if controller_config is None else controller_config.contents
    return ServedInputs(
        pool,
        config,
        contents,
        image,
        versions,
        settings.image_annotation,
        load_config=objects.load_config,
    )


def _find_first_image(
    pool: machineconfigpool.MachineConfigPool, build: os_image.PoolBuild, settings: SourceSettings
) -> str:
    """Return the image that machines get though no node runs it; empty for none.

    Raises `SourceUnreadyError` while they must wait for it.
    """
    rule = settings.first_images
    if rule is None or build.config is None:
        return ""
    # A user vouches for a pre-built image, as in installations of the Machine Config Operator.
    if not (build.config.pre_built_image or rule.has_waiting_workers()):
        return ""
    first_image = decide_first_image(
        pool,
        build,
        now=rule.clock.now(),
        deadline_s=rule.deadline_s,
        needs_cluster=settings.needs_cluster,
    )
    if isinstance(first_image, FirstImageWait):
        raise SourceUnreadyError(
            f"machines of pool {pool.name} wait for its first image: {first_image.reason}",
            remedy=f"see: kubectl describe machineosconfig {build.config.name}",
            retry_after_s=RETRY_FIRST_IMAGE_S,
        )
    return "" if first_image is None else first_image.image


def _find_rendered(
    objects: SourceObjects, pool: machineconfigpool.MachineConfigPool, *, is_first: bool
) -> PackedConfig:
    # The first image contains the pool's config, which no node has yet.
    name = pool.configuration.name if is_first else select_rendered(pool)
    if not name:
        raise SourceError(
            f"MachineConfigPool {pool.name} has no rendered config for new machines yet",
            remedy=f"see its conditions: kubectl describe mcp {pool.name}",
        )
    config = objects.find_config(name)
    if config is None:
        raise RenderedConfigMissingError(
            f"cannot find MachineConfig {name}, which MachineConfigPool {pool.name} names"
        )
    return config


def _find_controller_config(
    configs: Mapping[str, ObservedControllerConfig],
) -> ObservedControllerConfig | None:
    """Return the ControllerConfig that agents read, or the only one; raise `SourceError`."""
    if controllerconfig.NAME in configs or not configs:
        return configs.get(controllerconfig.NAME)
    if len(configs) > 1:
        raise SourceError(
            f"expected one ControllerConfig, found {', '.join(sorted(configs))}",
            remedy=f"give the right one the name {controllerconfig.NAME}",
        )
    return next(iter(configs.values()))
