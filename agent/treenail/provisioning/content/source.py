"""Inputs of a served config: one code path for a cluster and for a directory of manifests.

A new machine gets the config and the OS image that the nodes of its pool have. The first machines
of a pool wait for its first image in an installation in image mode. No machine of the pool runs an
image yet, so that none can show that the image works. Without the wait these machines join with the
stock image, and reboot once more.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from treenail import clocks, errors, memory
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
from treenail.controllers.pools import os_image, pool_status


@dataclass(frozen=True, slots=True)
class SelectedImage:
    """The image of new machines."""

    image: str
    """Pull spec for the first boot; empty when the rendered config decides."""
    reason: str
    """Why new machines get this image, or none."""
    os_image_url: str = ""
    """``osImageURL`` of the encapsulated config: ``image``, or that of the rendered config, unless
    machines cannot pull it before they join."""
    is_later: bool = False
    """True when the machine gets the pool's image only after it joins."""


def select_rendered(pool: machineconfigpool.MachineConfigPool) -> str:
    """Return the name of the rendered config for new machines; empty when the pool has none.

    As in the Machine Config Operator (cluster_server.go) this is the pool's new config once one
    node has it. Until then it is the last one that all nodes had, so that a broken config does not
    reach new machines.
    """
    if _has_updated_node(pool) and pool.configuration.name:
        return pool.configuration.name
    return pool.status_configuration.name


def select_image(
    pool: machineconfigpool.MachineConfigPool,
    build: os_image.PoolBuild,
    *,
    rendered_image: str,
    needs_cluster: Collection[str] = (),
    is_image_running: Callable[[str], bool] = lambda _: True,
    first_image: str = "",
) -> SelectedImage:
    """Return the image for new machines of the pool.

    They get the pool's image when the image gate is open, a node has the pool's config, and a node
    runs the image. The pool's status alone does not show the latter: after a rebuild of the same
    config it counts the nodes with the image before, until the rollout controller writes it again.
    ``is_image_running`` returns whether a Node reports a pull spec as its current image.

    ``first_image`` is one that they get though no node runs it (`decide_first_image`).
    ``rendered_image`` is the osImageURL of the selected rendered config. Machines cannot reach the
    registries in ``needs_cluster`` (``HOST`` or ``HOST:PORT``) before they join.
    """
    base = "" if _find_registry(rendered_image) in needs_cluster else rendered_image
    if first_image:
        return SelectedImage(first_image, "the first image of the pool", first_image)
    image, reason = _find_pool_image(pool, build, is_image_running)
    host = _find_registry(image or rendered_image)
    if host in needs_cluster:
        reason = f"machines cannot reach registry {host} before they join"
        return SelectedImage("", reason, base, is_later=True)
    return SelectedImage(image, reason, image or base)


def _find_pool_image(
    pool: machineconfigpool.MachineConfigPool,
    build: os_image.PoolBuild,
    is_image_running: Callable[[str], bool],
) -> tuple[str, str]:
    """Return the pool's image, or an empty text, and the reason."""
    try:
        verdict = os_image.decide_pool_image(pool, build)
    except errors.ConfigError as error:
        return "", str(error)
    if not isinstance(verdict, os_image.GateOpen) or not verdict.target.image:
        return "", verdict.reason
    if not (_has_updated_node(pool) and is_image_running(verdict.target.image)):
        return "", f"no node of pool {pool.name} runs {verdict.target.image} yet"
    return verdict.target.image, verdict.reason


def _has_updated_node(pool: machineconfigpool.MachineConfigPool) -> bool:
    """Return whether a node has the target in the pool's spec.

    The counts in the status are those of an older spec while observedGeneration is lower. The MCO
    does not compare the two, so its server gives a new config to machines for a moment.
    """
    try:
        status = pool_status.read_reported_status(pool)
    except errors.ConfigError:
        return False
    return status.counts.updated > 0 and status.observed_generation >= pool.metadata.generation


def _find_registry(image: str) -> str:
    """Return host and port of a pull spec; empty for a text without a registry."""
    registry, slash, _ = image.partition("/")
    return registry.lower() if slash else ""


DEFAULT_DEADLINE_S = 3600.0
FIRST_IMAGE_RETRY_S = 15
"""A build takes minutes, and Ignition asks until it gets a config."""


@dataclass(frozen=True, slots=True)
class FirstImageSettings:
    """Settings of an installation for the first machines of its pools."""

    has_waiting_workers: Callable[[], bool]
    """Returns whether the installation lets workers wait for their image."""
    clock: clocks.Clock
    deadline_s: float = DEFAULT_DEADLINE_S
    """Seconds from the creation of the MachineOSConfig, after which machines no longer wait."""


@dataclass(frozen=True, slots=True)
class FirstImage:
    """The image that machines get though no node runs it."""

    image: str


@dataclass(frozen=True, slots=True)
class FirstImageWait:
    """Machines must ask again."""

    reason: str


def decide_first_image(
    pool: machineconfigpool.MachineConfigPool,
    build: os_image.PoolBuild,
    *,
    now: float,
    deadline_s: float,
    needs_cluster: Collection[str] = (),
) -> FirstImage | FirstImageWait | None:
    """Decide about a pool whose machines wait; None leaves the usual rules.

    A registry in ``needs_cluster`` serves no machine before it joins, so that none waits for it.
    """
    config = build.config
    if config is None or pool.name in machineconfigpool.CONTROL_PLANE_POOLS:
        return None
    if config.push_spec.partition("/")[0].lower() in needs_cluster:
        return None
    created = clocks.parse_rfc3339(config.created)
    is_late = created is not None and now - created > deadline_s
    if is_late and _has_machines(pool):
        return None
    try:
        verdict = os_image.decide_pool_image(pool, build)
    except errors.ConfigError as error:
        return None if is_late else FirstImageWait(str(error))
    if isinstance(verdict, os_image.GateOpen) and verdict.target.image:
        return FirstImage(verdict.target.image)
    if is_late:
        return None
    return FirstImageWait(verdict.reason)


def _has_machines(pool: machineconfigpool.MachineConfigPool) -> bool:
    try:
        return pool_status.read_reported_status(pool).counts.total > 0
    except errors.ConfigError:
        return False


CONFIG_LIMIT = 8 * memory.MIB
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
        metadata = fields.get_object("metadata").read(object_meta.ObjectMeta)
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
            retry_after_s=FIRST_IMAGE_RETRY_S,
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
