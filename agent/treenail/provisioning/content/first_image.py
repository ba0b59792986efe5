"""The first machines of a pool, which wait for its first image in an installation in image mode.

No machine of the pool runs an image yet, so that none can show that the image works. Without the
wait these machines join with the stock image, and reboot once more.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from treenail.api.machineconfigpool import ARBITER, MASTER, MachineConfigPool
from treenail.clock import Clock, parse_rfc3339
from treenail.controllers.pools.os_image import GateOpen, PoolBuild, decide_pool_image
from treenail.controllers.pools.pool_status import read_reported_status
from treenail.errors import ConfigError

DEFAULT_DEADLINE_S = 3600.0
RETRY_AFTER_S = 15
"""A build takes minutes, and Ignition asks until it gets a config."""


@dataclass(frozen=True, slots=True)
class FirstImageSettings:
    """Settings of an installation for the first machines of its pools."""

    has_waiting_workers: Callable[[], bool]
    """Returns whether the installation lets workers wait for their image."""
    clock: Clock
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
    pool: MachineConfigPool,
    found: PoolBuild,
    *,
    now: float,
    deadline_s: float,
    needs_cluster: Collection[str] = (),
) -> FirstImage | FirstImageWait | None:
    """Decide about a pool whose machines wait; None leaves the usual rules.

    A registry in ``needs_cluster`` serves no machine before it joins, so that none waits for it.
    """
    config = found.config
    if config is None or pool.name in (MASTER, ARBITER):
        return None
    if config.push_spec.partition("/")[0].lower() in needs_cluster:
        return None
    created = parse_rfc3339(config.created)
    is_late = created is not None and now - created > deadline_s
    if is_late and _has_machines(pool):
        return None
    try:
        verdict = decide_pool_image(pool, found)
    except ConfigError as error:
        return None if is_late else FirstImageWait(str(error))
    if isinstance(verdict, GateOpen) and verdict.target.image:
        return FirstImage(verdict.target.image)
    if is_late:
        return None
    return FirstImageWait(verdict.reason)


def _has_machines(pool: MachineConfigPool) -> bool:
    try:
        return read_reported_status(pool).counts.total > 0
    except ConfigError:
        return False
