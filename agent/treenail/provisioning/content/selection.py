"""Choice of the rendered config and the OS image for a new machine of a pool. Pure.

The first machines of a pool wait for its first image in an installation in image mode. No machine
of the pool runs an image yet, so that none can show that the image works. Without the wait these
machines join with the stock image, and reboot once more.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from treenail import clocks, errors
from treenail.api import machineconfigpool
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

    ``first_image`` is one that they get though no node runs it (`first_image.decide_first_image`).
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
RETRY_AFTER_S = 15
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
