"""OS image gate: which image the pool's nodes get, and whether they may get it now.

The image comes from the spec of the pool or from a build in the cluster, which a
MachineOSConfig requests and a MachineOSBuild runs. Order and messages of the build checks are those
of the Machine Config Operator (canLayeredContinue in node_controller.go).

Without either it comes from the rendered config. The OS image streams of the cluster decide what
that names by default: the MCO writes them to the status of OSImageStream ``cluster``, in other
clusters an administrator does. As in the MCO, a pool follows the stream that it names, a custom
pool otherwise that of pool worker, any other pool the default one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from treenail.api import (
    machineconfig,
    machineconfigpool,
    machineosbuild,
    machineosconfig,
    object_meta,
    pullspec,
)
from treenail.config.merge import DefaultImages
from treenail.controllers.pools import image_tags, node_facts
from treenail.encoding import codec
from treenail.errors import ConfigError

STREAM_KIND = "OSImageStream"
STREAM_NAME = "cluster"
_WORKER = "worker"
_STANDARD_POOLS = (_WORKER, "master", "arbiter")
_BUILD_FAILED_MESSAGE = "Build Failed"
"""What the MCO writes into each failed build; it adds nothing."""


@dataclass(frozen=True, slots=True)
class PoolBuild:
    """The MachineOSConfig of a pool and the build of the pool's target; None without one."""

    config: machineosconfig.MachineOSConfig | None = None
    build: machineosbuild.MachineOSBuild | None = None


NO_BUILD = PoolBuild()


@dataclass(frozen=True, slots=True)
class GateOpen:
    """Nodes may get the target."""

    target: node_facts.RolloutTarget
    reason: str


@dataclass(frozen=True, slots=True)
class GateWaiting:
    """Nodes must wait for an event that needs no user."""

    reason: str


@dataclass(frozen=True, slots=True)
class GateBlocked:
    """Nodes must wait until a user fixes a problem."""

    reason: str
    kind: str = "Blocked"
    """CamelCase reason for the pool's condition."""


@dataclass(frozen=True, slots=True)
class GatePending:
    """The gate was asked and has not answered yet."""


GateVerdict = GateOpen | GateWaiting | GateBlocked
GateAnswer = GateWaiting | GateBlocked | GatePending | None
"""Answer of an external gate; None means that it is open."""


def read_pool_target(pool: machineconfigpool.MachineConfigPool) -> GateVerdict:
    """Return the pool's config with the image that its spec names by digest or by tag.

    Raises `ConfigError` when the image is invalid.
    """
    tag, name = pool.os_image_tag, pool.configuration.name
    if tag is None:
        return read_pool_image(pool)
    if pool.os_image is not None:
        return GateBlocked(
            f"pool {pool.name} names an image in spec.osImage and a tag in spec.osImageTag; "
            "remove one of the two",
            "InvalidConfiguration",
        )
    image_tags.check_tag(pool)
    facts = image_tags.make_tag_facts(pool)
    if (record := facts.record) is not None and record.tag == tag.name:
        return GateOpen(
            node_facts.RolloutTarget(name, record.image),
            f"the pool names {tag.name}, which was {record.image} at {record.resolved_at}",
        )
    if (problem := facts.problem) is not None:
        return GateBlocked(problem.message, problem.reason)
    return GateWaiting(f"waiting: {tag.name} is being resolved")


def read_pool_image(pool: machineconfigpool.MachineConfigPool) -> GateOpen:
    """Return the pool's config with the image from ``spec.osImage``, if it names one.

    Raises `ConfigError` when ``spec.osImage`` is not a pull spec by digest.
    """
    image = pool.os_image
    if image is None:
        return GateOpen(
            node_facts.RolloutTarget(pool.configuration.name), "the config names the image"
        )
    pullspec.parse_pull_spec(image, where=f"spec.osImage of pool {pool.name}")
    return GateOpen(
        node_facts.RolloutTarget(pool.configuration.name, image),
        f"the pool names the image {image}",
    )


def find_pool_build(
    pool: machineconfigpool.MachineConfigPool,
    configs: Iterable[machineosconfig.MachineOSConfig],
    builds: Iterable[machineosbuild.MachineOSBuild],
) -> PoolBuild:
    """Find the pool's MachineOSConfig and the build of the pool's rendered config.

    The build is the one that the annotation names, as long as it contains the rendered config.
    Otherwise it is the newest one that does: the build controller has not moved the annotation yet.
    """
    config = find_pool_owner(pool.name, configs)
    if config is None:
        return NO_BUILD
    target = pool.configuration.name
    own = [build for build in builds if (build.image_config, build.config) == (config.name, target)]
    named = next((build for build in own if build.name == config.current_build), None)
    newest = max(own, key=lambda build: (build.created, build.name), default=None)
    return PoolBuild(config, named or newest)


def find_pool_owner(
    pool: str, configs: Iterable[machineosconfig.MachineOSConfig]
) -> machineosconfig.MachineOSConfig | None:
    """Find the MachineOSConfig that builds for the pool: its namesake, otherwise the oldest.

    A new MachineOSConfig has the name of its pool; only older ones may have another.
    """
    own = (config for config in configs if config.pool == pool)
    return min(
        own, key=lambda config: (config.name != pool, config.created, config.name), default=None
    )


def decide_pool_image(
    pool: machineconfigpool.MachineConfigPool, pool_build: PoolBuild
) -> GateVerdict:
    """Return the target of the pool, from a build if a MachineOSConfig requests one.

    Raises `ConfigError` when the image in the spec of the pool is invalid.
    """
    if pool_build.config is None:
        return read_pool_target(pool)
    if pool.os_image is not None or pool.os_image_tag is not None:
        field = "osImageTag" if pool.os_image is None else "osImage"
        return GateBlocked(
            f"pool {pool.name} names an image in spec.{field}, and MachineOSConfig "
            f"{pool_build.config.name} builds one for it; remove one of the two: kubectl patch mcp "
            f'{pool.name} --type=json -p \'[{{"op": "remove", "path": "/spec/{field}"}}]\', '
            f"or kubectl delete machineosconfig {pool_build.config.name}",
            "InvalidConfiguration",
        )
    if pool_build.build is None and pool_build.config.problem:
        return GateBlocked(pool_build.config.problem, "ImageBuildDegraded")
    return decide_built_image(pool, pool_build.config, pool_build.build)


def decide_built_image(
    pool: machineconfigpool.MachineConfigPool,
    config: machineosconfig.MachineOSConfig | None,
    build: machineosbuild.MachineOSBuild | None,
) -> GateVerdict:
    """Return the pool's config with the image built for it, or why nodes must wait."""
    if config is None and build is not None:
        return GateBlocked(
            f'orphaned MachineOSBuild "{build.name}" found, but no MachineOSConfig for pool '
            f"{pool.name}"
        )
    if config is None or build is None:
        return GateWaiting("No MachineOSConfig or MachineOSBuild for this pool")
    if not config.pull_spec:
        return GateWaiting("Desired image not set in MachineOSConfig")
    match build.state:
        case machineosbuild.BuildState.SUCCEEDED:
            return _check_succeeded_build(pool, config, build)
        case machineosbuild.BuildState.PREPARED | machineosbuild.BuildState.BUILDING:
            return GateWaiting("Image build pending")
        case machineosbuild.BuildState.FAILED:
            cause = "" if build.message == _BUILD_FAILED_MESSAGE else build.message
            failed = f"image build {build.name} for MachineConfigPool {pool.name} failed"
            return GateBlocked(": ".join(filter(None, (failed, cause))), "ImageBuildDegraded")
        case machineosbuild.BuildState.INTERRUPTED | machineosbuild.BuildState.INITIAL:
            return GateWaiting("Image is not ready yet")


def compute_build_target(
    pool: machineconfigpool.MachineConfigPool,
    config: machineosconfig.MachineOSConfig | None,
    build: machineosbuild.MachineOSBuild | None,
) -> node_facts.RolloutTarget:
    """Compute the pool's target, whether or not the gate is open, for counts and messages."""
    name = pool.configuration.name
    if config is None and build is None:
        return node_facts.RolloutTarget(name)
    if config is None or build is None or build.config != name:
        return node_facts.RolloutTarget(name, "")
    return node_facts.RolloutTarget(name, config.pull_spec)


def check_control_plane(
    pool: str,
    masters: Iterable[node_facts.NodeFacts],
    arbiters: Iterable[node_facts.NodeFacts],
    masters_target: node_facts.RolloutTarget,
) -> GateWaiting | None:
    """Return why the master or arbiter pool must wait for the other one, or None.

    In a cluster with an arbiter, two masters and the arbiter are all members of etcd. Masters wait
    while an arbiter is unavailable. Arbiters wait until every master is updated.
    """
    if pool == machineconfigpool.MASTER:
        unavailable = [node.name for node in arbiters if node.is_unavailable]
        if unavailable:
            return GateWaiting(f"waiting: arbiter {unavailable[0]} is unavailable")
    if pool == machineconfigpool.ARBITER:
        outdated = [
            node.name
            for node in masters
            if node.is_unavailable or not node.is_updated_to(masters_target)
        ]
        if outdated:
            return GateWaiting(f"waiting: master {outdated[0]} updates first")
    return None


def _check_succeeded_build(
    pool: machineconfigpool.MachineConfigPool,
    config: machineosconfig.MachineOSConfig,
    build: machineosbuild.MachineOSBuild,
) -> GateVerdict:
    done = f"Image built successfully, pullspec: {config.pull_spec}"
    if build.pull_spec != config.pull_spec:
        return GateWaiting(f'{done}, but MachineOSConfig "{config.name}" has not updated yet')
    return GateOpen(node_facts.RolloutTarget(pool.configuration.name, config.pull_spec), done)


@dataclass(frozen=True, slots=True)
class StreamImages:
    """The images of one stream."""

    name: str
    os_image: Annotated[str, codec.Key("osImage")]
    extensions_image: Annotated[str, codec.Key("osExtensionsImage")] = ""
    """The MCO requires it; other operating systems than its own have none."""


@dataclass(frozen=True, slots=True)
class OSImageStream(codec.JsonObject, kind=STREAM_KIND, api_version=machineconfig.API_VERSION):
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
        if self.metadata.name != STREAM_NAME:
            raise ConfigError(f"metadata.name: expected {STREAM_NAME}, found {self.metadata.name}")
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
    if stream is None and not name:
        return images
    streams = {known.name: known for known in (stream.streams if stream else ())}
    name = name or (stream.default if stream else "")
    if (chosen := streams.get(name)) is not None:
        return DefaultImages(chosen.os_image, chosen.extensions_image)
    found = ", ".join([*streams][:10]) or "no status.availableStreams"
    raise ConfigError(
        f"cannot find the OS image stream {name or '(default)'} of pool {pool.name}: "
        "OSImageStream cluster " + ("does not exist" if stream is None else f"has {found}"),
        remedy="correct spec.osImageStream of the pool, or write the stream: kubectl patch "
        "osimagestream cluster --subresource=status --type=merge --patch-file=FILE",
    )


def describe_stream(
    pool: machineconfigpool.MachineConfigPool,
    pools: Mapping[str, machineconfigpool.MachineConfigPool],
    stream: OSImageStream | None,
) -> str:
    """Describe all that decides the images for a hash; empty in a cluster without streams."""
    name = _find_stream_name(pool, pools)
    return f"{name} {stream.default} {stream.streams}" if stream else name


def _find_stream_name(
    pool: machineconfigpool.MachineConfigPool,
    pools: Mapping[str, machineconfigpool.MachineConfigPool],
) -> str:
    """Return the stream that the pool or, for a custom pool, pool worker names."""
    if pool.os_image_stream or pool.name in _STANDARD_POOLS:
        return pool.os_image_stream
    worker = pools.get(_WORKER)
    return "" if worker is None else worker.os_image_stream
