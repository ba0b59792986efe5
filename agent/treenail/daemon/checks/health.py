"""A boot on trial: the checks that are made, what each found, and since when."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from treenail.api.node import Node
from treenail.clock import Clock, rfc3339
from treenail.daemon.settings.settings import Trial as Limits
from treenail.errors import ClusterError, HostError
from treenail.host.container.cri import SOCKETS
from treenail.host.systemd.systemd import Unit
from treenail.update.checks.health import (
    API_SERVER,
    CONTAINER_RUNTIME,
    GREENBOOT,
    KUBELET,
    NODE_READY,
    OWN,
    Check,
    Trial,
)
from treenail.update.state import boot_id as boot_ids
from treenail.update.state.boot_trial import Probation

log = logging.getLogger(__name__)

KUBELET_UNIT = "kubelet.service"
GREENBOOT_UNIT = "greenboot-healthcheck.service"
_NOT_FOUND = "not-found"
# What no boot starts by itself.
_OFF = ("disabled", "masked", "masked-runtime")
_LEAST_S = 1.0


class Units(Protocol):
    """What systemd knows of units."""

    def units(self, *names: str) -> tuple[Unit, ...]: ...
    def unit_file_state(self, unit: str) -> str: ...
    def started_at(self) -> float: ...


class Runtime(Protocol):
    """Whether the container runtime answers."""

    def problem(self, unit: str) -> str: ...


class OwnChecks(Protocol):
    """The owner's checks."""

    def names(self) -> tuple[str, ...]: ...
    def run(self, name: str, *, limit_s: float) -> str: ...


class Cluster(Protocol):
    """The API server as this node sees it."""

    def node(self) -> Node | None: ...
    def refresh(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Probes:
    """Whom a trial asks."""

    systemd: Units
    runtime: Runtime
    checks: OwnChecks
    cluster: Cluster


class Health:
    """Makes the checks; remembers since when each has been as it is."""

    def __init__(
        self, probes: Probes, limits: Limits, clock: Clock, *, alive: Callable[[], None]
    ) -> None:
        """``alive`` is called between checks, each of which takes a while."""
        self._probes = probes
        self._limits = limits
        self._clock = clock
        self._alive = alive
        self._since: dict[str, tuple[bool | None, float]] = {}
        self._passed: set[str] = set()
        self._well_since: float | None = None
        self._marked: dict[str, str] = {}

    @property
    def again_s(self) -> float:
        """How long to wait between two looks."""
        return self._limits.again_s

    def mark(self, name: str, problem: str) -> None:
        """Count it as a check that failed from now on; without a problem, no longer."""
        if problem:
            self._marked[name] = problem
        else:
            self._marked.pop(name, None)

    def look(self, probation: Probation, boot_id: str) -> Trial:
        """Every check, made now; never raises for what it finds."""
        marked = (Check(name, well=False, text=text) for name, text in self._marked.items())
        found = [*marked, *self._units(), *self._of_cluster(boot_id)]
        if all(each.well is not False for each in found):
            # The owner's checks may well need what the others look at.
            left_s = probation.since + self._limits.deadline_s - self._clock.monotonic()
            found += self._own(min(self._limits.check_s, max(left_s, _LEAST_S)))
        now = self._clock.monotonic()
        checks = tuple(self._dated(each, now) for each in found)
        if any(each.well is False for each in checks):
            self._well_since = None
        elif self._well_since is None:
            self._well_since = now
        return Trial(
            elapsed_s=now - probation.since,
            deadline_s=self._limits.deadline_s,
            settle_s=self._limits.settle_s,
            checks=checks,
            api_answers=any(each.name == API_SERVER and each.well for each in checks),
            well_for_s=0.0 if self._well_since is None else now - self._well_since,
        )

    def _units(self) -> Iterator[Check]:
        names = (KUBELET_UNIT, GREENBOOT_UNIT, *SOCKETS)
        try:
            units = self._probes.systemd.units(*names)
            there = {each.name: each for each in units if each.load != _NOT_FOUND}
            greenboot = self._of_greenboot(there.get(GREENBOOT_UNIT))
        except HostError as error:
            yield Check(KUBELET, well=False, text=f"systemd can't be asked: {error}")
            return
        yield _of_unit(KUBELET, there.get(KUBELET_UNIT))
        yield self._of_runtime(tuple(there[each] for each in SOCKETS if each in there))
        yield greenboot

    def _of_runtime(self, units: tuple[Unit, ...]) -> Check:
        """Of the runtimes that are installed the one that is active is the node's."""
        found = {each.name: _of_unit(CONTAINER_RUNTIME, each) for each in units}
        active = next((name for name, check in found.items() if check.well), "")
        if not active:
            text = "; ".join(each.text for each in found.values())
            return Check(CONTAINER_RUNTIME, well=False if found else None, text=text)
        problem = self._probes.runtime.problem(active)
        return Check(CONTAINER_RUNTIME, well=not problem, text=problem)

    def _of_greenboot(self, unit: Unit | None) -> Check:
        idle = unit is not None and unit.active == "inactive"
        # One that is enabled has yet to begin.
        if idle and self._probes.systemd.unit_file_state(GREENBOOT_UNIT) in _OFF:
            return Check(GREENBOOT, well=None)
        return _of_unit(GREENBOOT, unit)

    def _of_cluster(self, boot_id: str) -> Iterator[Check]:
        try:
            self._probes.cluster.refresh()
        except ClusterError as error:
            yield Check(API_SERVER, well=False, text=str(error))
            yield Check(NODE_READY, well=None)
            return
        yield Check(API_SERVER, well=True)
        node = self._probes.cluster.node()
        if node is None:
            yield Check(NODE_READY, well=False, text="there is no such Node")
        elif not node.ready:
            yield Check(NODE_READY, well=False, text=node.not_ready or "the Node is not Ready")
        elif not self._reported(node, boot_id):
            text = "the kubelet has not reported since the boot"
            yield Check(NODE_READY, well=False, text=text)
        else:
            yield Check(NODE_READY, well=True)

    def _reported(self, node: Node, boot_id: str) -> bool:
        """Whether the kubelet has, since the boot."""
        if node.boot_id not in {boot_ids.of_kernel(boot_id), ""}:
            return False
        if not boot_ids.is_soft(boot_id):
            return True
        try:
            # A soft reboot keeps the boot id that the kubelet reports.
            return node.heard >= rfc3339(self._probes.systemd.started_at())
        except HostError:
            return False

    def _own(self, limit_s: float) -> Iterator[Check]:
        try:
            names = self._probes.checks.names()
        except HostError as error:
            yield Check(OWN, well=False, text=str(error))
            return
        for name in names:
            problem = ""
            if name not in self._passed:
                self._alive()
                problem = self._probes.checks.run(name, limit_s=limit_s)
            if not problem:
                self._passed.add(name)
            yield Check(OWN + name, well=not problem, text=problem)

    def _dated(self, found: Check, now: float) -> Check:
        well, since = self._since.get(found.name, (None, now))
        if well is not found.well:
            log.info(
                "%s is %s%s", found.name, _WORDS[found.well], f": {found.text}" * bool(found.text)
            )
            since = now
        self._since[found.name] = (found.well, since)
        return Check(found.name, found.well, found.text, now - since)


_WORDS = {True: "well", False: "not well", None: "unknown"}


def _of_unit(name: str, unit: Unit | None) -> Check:
    if unit is None:
        return Check(name, well=None)
    if unit.load == "masked":
        return Check(name, well=False, text=f"{unit.name} is masked")
    well = unit.active == "active"
    return Check(name, well=well, text="" if well else f"{unit.name} is {unit.active}")
