"""How carefully a pool is rolled out: opt-in, by an annotation of the pool.

::

    treenail.io/rollout: |
      canary: {nodes: 1, soak: 30m, nodeSelector: {matchLabels: {canary: ""}}}
      waves: [10%, 50%]          # so much of the pool in all; the rest follows
      soak: 10m                  # between waves
      maxFailures: 0             # more nodes that fail halt the rollout
      rebootTimeout: 30m         # a node that is not ready for longer has failed
      order: spread              # over zones, or zones: one after the other
      staging: {maxParallel: 10} # all nodes pull the image before the first is drained
      windows:
      - {days: [Sat, Sun], start: "01:00", duration: 4h, timeZone: Europe/Berlin}
      fleetLock: {url: "http://locks.example.com", group: workers}
      alerts: {url: "http://prometheus.example.com", names: [ApiErrors]}

Every field may be left out. Without the annotation nothing but ``maxUnavailable`` limits a
rollout, as with the Machine Config Operator.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from treenail.api import documents
from treenail.api.decode import Fields
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.selector import LabelSelector, optional_selector
from treenail.controllers.rollout.gates import external
from treenail.controllers.rollout.gates.external import Alerts, LockServer
from treenail.controllers.rollout.gates.windows import Window, window
from treenail.errors import ConfigError

POLICY = "treenail.io/rollout"
RESUME = "treenail.io/rollout-resume"
"""Annotation of a pool: any value that it did not have before lets a halted rollout go on."""

FIELDS = frozenset({
    "canary", "waves", "soak", "maxFailures", "rebootTimeout", "order", "staging", "windows",
    "fleetLock", "alerts",
})  # fmt: skip

STAGED_AT_ONCE = 10
"""Enough to be quick, and few enough for a registry."""

_T = TypeVar("_T")

_DURATION = re.compile(r"(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?")
_PERCENTAGE = re.compile(r"(100|[1-9]?[0-9])%")


class Order(StrEnum):
    """In which order nodes are taken."""

    ZONES = "zones"
    SPREAD = "spread"


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a pool."""

    count: int = 0
    percent: int = 0

    def of(self, total: int) -> int:
        """So many nodes of ``total``, at least one."""
        return min(total, max(1, self.count, total * self.percent // 100))


@dataclass(frozen=True, slots=True)
class Wave:
    """Nodes that go first: so many in all, and how long they must run well before more follow."""

    share: Share
    soak_s: float = 0.0
    selector: LabelSelector | None = None
    """Which nodes may be in the wave; None means any."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What limits a rollout beside ``maxUnavailable``."""

    waves: tuple[Wave, ...] = ()
    max_failures: int | None = None
    """Nodes that may fail; None means any number."""
    reboot_timeout_s: float | None = None
    order: Order = Order.ZONES
    staged_at_once: int | None = None
    """How many nodes stage the image ahead at the same time; None means that none does."""
    windows: tuple[Window, ...] = ()
    lock: LockServer | None = None
    alerts: Alerts | None = None


def policy(pool: MachineConfigPool) -> Policy:
    """The policy of the pool; raises `ConfigError` that names the place in the annotation."""
    text = pool.metadata.annotations.get(POLICY)
    if text is None:
        return Policy()
    where = f"annotation {POLICY} of pool {pool.name}"
    if not text.strip():
        raise ConfigError(f"{where} is empty", remedy="remove it, or write {} for the defaults")
    try:
        return _read(Fields.of(documents.load(text, where=where), ""))
    except ConfigError as error:
        if where in str(error):
            raise
        raise ConfigError(f"{where}: {error}", remedy=error.remedy) from error


def duration_s(fields: Fields, name: str) -> float | None:
    """A duration such as ``1h30m`` or ``45s`` in seconds, None when absent."""
    text = fields.optional_text(name)
    if text is None:
        return None
    found = _DURATION.fullmatch(text)
    if not found or not text:
        raise fields.error(
            f"{fields.at(name)}: expected a duration such as 10m or 1h30m, found {text!r:.40}"
        )
    hours, minutes, rest = (int(part or 0) for part in found.groups())
    return hours * 3600.0 + minutes * 60.0 + rest


def _read(fields: Fields) -> Policy:
    # A field that is not obeyed would be a promise that is not kept.
    if unknown := sorted(fields.values.keys() - FIELDS):
        raise ConfigError(
            f"unknown field {unknown[0]!r:.40}", remedy=f"known are {', '.join(sorted(FIELDS))}"
        )
    return Policy(
        waves=_waves(fields),
        max_failures=_max_failures(fields),
        reboot_timeout_s=duration_s(fields, "rebootTimeout"),
        order=_order(fields),
        staged_at_once=_staged_at_once(fields),
        windows=fields.each("windows", lambda each: window(each, duration_s(each, "duration"))),
        lock=_asked(fields, "fleetLock", external.lock_server),
        alerts=_asked(fields, "alerts", external.alerts),
    )


def _asked(fields: Fields, name: str, read: Callable[[Fields], _T]) -> _T | None:
    return None if fields.values.get(name) is None else read(fields.nested(name))


def _waves(fields: Fields) -> tuple[Wave, ...]:
    found = []
    soak_s = duration_s(fields, "soak") or 0.0
    if fields.values.get("canary") is not None:
        canary = fields.nested("canary")
        share = (
            Share(1)
            if canary.values.get("nodes") is None
            else _share(canary.values["nodes"], canary.at("nodes"))
        )
        own_s = duration_s(canary, "soak")
        selector = optional_selector(canary, "nodeSelector")
        found.append(Wave(share, soak_s if own_s is None else own_s, selector))
    for index, value in enumerate(fields.list_of("waves")):
        share = _share(value, f"{fields.at('waves')}[{index}]")
        if found and not _grows(found[-1].share, share):
            raise ConfigError(
                f"{fields.at('waves')}[{index}]: expected more than the wave before, "
                f"found {value!r:.40}",
                remedy="write how much of the pool is updated in all at the end of each wave",
            )
        found.append(Wave(share, soak_s))
    return tuple(found)


def _grows(before: Share, after: Share) -> bool:
    if before.percent and after.percent:
        return after.percent > before.percent
    # A count and a percentage can only be compared once the pool is known.
    return not (before.count and after.count) or after.count > before.count


def _share(value: object, place: str) -> Share:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return Share(count=value)
    if isinstance(value, str) and (found := _PERCENTAGE.fullmatch(value)) and value != "0%":
        return Share(percent=int(found[1]))
    raise ConfigError(
        f"{place}: expected a count of nodes or a percentage from 1% to 100%, found {value!r:.40}"
    )


def _max_failures(fields: Fields) -> int:
    value = fields.optional_integer("maxFailures") or 0
    if value < 0:
        raise fields.refuse("maxFailures", "a count of nodes")
    return value


def _staged_at_once(fields: Fields) -> int | None:
    if fields.values.get("staging") is None:
        return None
    staging = fields.nested("staging")
    value = staging.optional_integer("maxParallel")
    if value is not None and value < 1:
        raise staging.refuse("maxParallel", "a count of nodes from 1 on")
    return value or STAGED_AT_ONCE


def _order(fields: Fields) -> Order:
    text = fields.optional_text("order") or Order.ZONES
    if text not in list(Order):
        raise fields.error(
            f"{fields.at('order')}: expected one of {', '.join(Order)}, found {text!r:.40}"
        )
    return Order(text)
