"""OS image streams: which OS image and extensions image a pool follows.

The Machine Config Operator (MCO) writes the streams of its release to the status of OSImageStream
``cluster``. In other clusters an administrator does. As in the MCO, a pool follows the stream that
it names, a custom pool otherwise that of pool worker, any other pool the default one. Unlike the
MCO, treenail has no release, so that it compares no release versions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from treenail.api import machineconfig, machineconfigpool, object_meta, pullspec
from treenail.config.merge import DefaultImages
from treenail.encoding import codec
from treenail.errors import ConfigError

KIND = "OSImageStream"
NAME = "cluster"
_WORKER = "worker"
_STANDARD_POOLS = (_WORKER, "master", "arbiter")
_STATUS_REMEDY = (
    "write both to the status: kubectl patch osimagestream cluster --subresource=status "
    "--type=merge --patch-file=FILE"
)


@dataclass(frozen=True, slots=True)
class StreamImages:
    """The images of one stream."""

    name: str
    os_image: Annotated[str, codec.Key("osImage")]
    extensions_image: Annotated[str, codec.Key("osExtensionsImage")] = ""
    """The MCO requires it; other operating systems than its own have none."""


@dataclass(frozen=True, slots=True)
class OSImageStream(codec.JsonObject, kind=KIND, api_version=machineconfig.API_VERSION):
    """The only OSImageStream of a cluster."""

    metadata: object_meta.ObjectMeta
    requested_default: Annotated[str, codec.Key("spec.defaultStream")] = ""
    streams: Annotated[tuple[StreamImages, ...], codec.Key("status.availableStreams")] = ()
    reported_default: Annotated[str, codec.Key("status.defaultStream")] = ""

    @property
    def default(self) -> str:
        """The default stream: the MCO copies that of the spec to the status."""
        is_known = any(stream.name == self.requested_default for stream in self.streams)
        return self.requested_default if is_known else self.reported_default

    def check_images(self) -> None:
        """Raise `ConfigError` for what an API server refuses in the object of a file."""
        if self.metadata.name != NAME:
            raise ConfigError(f"metadata.name: expected {NAME}, found {self.metadata.name}")
        for index, stream in enumerate(self.streams):
            where = f"status.availableStreams[{index}]"
            pullspec.parse_pull_spec(stream.os_image, where=f"{where}.osImage")
            if image := stream.extensions_image:
                pullspec.parse_pull_spec(image, where=f"{where}.osExtensionsImage")

    def find_by_image(self, os_image: str) -> str:
        """Return the name of the first stream with this OS image; empty without one."""
        return next((stream.name for stream in self.streams if stream.os_image == os_image), "")


def select_base_images(
    pool: machineconfigpool.MachineConfigPool,
    pools: Mapping[str, machineconfigpool.MachineConfigPool],
    stream: OSImageStream | None,
    images: DefaultImages,
) -> DefaultImages:
    """Return the images of the pool's stream; ``images`` in a cluster without streams.

    Raises `ConfigError` when the pool's stream does not exist.
    """
    name = _find_stream_name(pool, pools)
    if stream is None:
        if not name:
            return images
        raise ConfigError(
            f"pool {pool.name} follows the OS image stream {name}, but the cluster has no "
            f"{KIND} {NAME}",
            remedy="create it, or remove spec.osImageStream of the pool",
        )
    name = name or stream.default
    for known in stream.streams:
        if known.name == name:
            return DefaultImages(known.os_image, known.extensions_image)
    if not stream.streams:
        raise ConfigError(
            f"cannot find the OS image stream of pool {pool.name}: {KIND} {NAME} has no "
            "status.availableStreams",
            remedy=f"{_STATUS_REMEDY}, with status.availableStreams and status.defaultStream",
        )
    available = ", ".join(known.name for known in stream.streams[:10])
    raise ConfigError(
        f"cannot find the OS image stream of pool {pool.name}: expected one of {available}, found "
        f"{name or 'nothing'}",
        remedy=f"correct spec.osImageStream.name of the pool, or spec.defaultStream of {KIND} "
        f"{NAME}",
    )


def describe_choice(
    pool: machineconfigpool.MachineConfigPool,
    pools: Mapping[str, machineconfigpool.MachineConfigPool],
    stream: OSImageStream | None,
) -> str:
    """Describe the pool's stream and its images for a hash; empty in a cluster without streams."""
    name = _find_stream_name(pool, pools)
    if stream is None and not name:
        return ""
    try:
        return f"{name} {select_base_images(pool, pools, stream, DefaultImages())}"
    except ConfigError as error:
        return f"{name} {error}"


def _find_stream_name(
    pool: machineconfigpool.MachineConfigPool,
    pools: Mapping[str, machineconfigpool.MachineConfigPool],
) -> str:
    """Return the stream that the pool or, for a custom pool, pool worker names."""
    if pool.os_image_stream or pool.name in _STANDARD_POOLS:
        return pool.os_image_stream
    worker = pools.get(_WORKER)
    return "" if worker is None else worker.os_image_stream
