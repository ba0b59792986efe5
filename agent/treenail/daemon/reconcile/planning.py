"""What there is to do until a node is at its target, from its configs and its machine."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from treenail.api.disruptionpolicy import DEFAULTS, DisruptionPolicy
from treenail.api.machineconfig import MachineConfig
from treenail.config import reconcilable
from treenail.config.wanted import Wanted, wanted
from treenail.daemon.reconcile.interfaces import Ports
from treenail.errors import ClusterError, ConfigError, Unreachable, UnreconcilableError
from treenail.update.decision.facts import Deployed
from treenail.update.impact.disruption import Disruption, disruption
from treenail.update.impact.explain import Sources
from treenail.update.impact.impact import Work, differences, in_image_mode, weigh
from treenail.update.impact.os_change import OSChange, os_change
from treenail.update.impact.step_impact import serving
from treenail.update.state.record import Target
from treenail.update.steps.steps import Step

log = logging.getLogger(__name__)

_IMAGE_SOURCE = "the image beside the config"


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be written now, and what for."""

    wish: Wanted
    work: Work
    steps: tuple[Step, ...]
    """Those that write, and then those that have what runs take notice."""


class Weighing:
    """Reads and works out; nothing is changed but the kept copies of configs."""

    def __init__(self, ports: Ports, *, images_bake: bool = True) -> None:
        """``images_bake``: in image mode there are no files and units to write."""
        self._ports = ports
        self._images_bake = images_bake
        self._policy: DisruptionPolicy | None = None

    def weigh(self, target: Target, origin: Target, deployed: Deployed) -> Work:
        """The work of an update, before anything is touched.

        Raises `ConfigError` for what a running node can't be made to be, `HostError` for what this
        machine can't have, and `ClusterError`.
        """
        new = self._ports.configs.fetch(target.config)
        old = self._ports.configs.known(origin.config)
        if old is not None:
            self._check(old, new)
        if new.fips != self._ports.kernel.fips_enabled():
            raise UnreconcilableError(
                f"{target.config} wants FIPS mode {'on' if new.fips else 'off'}, and this node "
                "runs with it the other way",
                remedy="FIPS mode is chosen when a node is installed: reinstall it, or change the "
                "MachineConfig back",
            )
        wish, before = self._in_mode(wanted(new), target), self._before(old, origin)
        change = os_change(before.os, wish.os, deployed.running, image=target.image)
        steps = self._ports.configuration.plan(wish, target.config).steps
        self._ports.configuration.check(steps)
        work, _ = self._weighed(steps, change, (old, before), (new, wish), target)
        return work

    def due(self, target: Target, origin: Target, work: Work) -> Due:
        """What there is to write now; the work may be more than it was when it was weighed.

        Raises as `weigh` does.
        """
        new = self._ports.configs.kept(target.config) or self._ports.configs.fetch(target.config)
        wish = self._in_mode(wanted(new), target)
        steps = self._ports.configuration.plan(wish, target.config).steps
        if work.reboots:
            return Due(wish, work, steps)
        old = self._ports.configs.known(origin.config)
        before = self._before(old, origin)
        now, cost = self._weighed(steps, work.os, (old, before), (new, wish), target)
        if cost.reboots:
            return Due(wish, now, steps)
        noticing = serving(steps, [each.action for each in cost.costs])
        return Due(wish, now, (*steps, *noticing))

    def _check(self, old: MachineConfig, new: MachineConfig) -> None:
        try:
            reconcilable.check(old, new)
        except UnreconcilableError:
            overrides = self._ports.cluster.policy().overrides
            allowed = frozenset(each for each in reconcilable.Override if each in overrides)
            if not allowed:
                raise
            reconcilable.check(old, new, allowed=allowed)

    def _weighed(
        self,
        steps: Sequence[Step],
        change: OSChange,
        old: tuple[MachineConfig | None, Wanted],
        new: tuple[MachineConfig, Wanted],
        target: Target,
    ) -> tuple[Work, Disruption]:
        found = differences(old[1], new[1], steps, change)
        # Whatever is asked of the operating system reboots, and so does all beside it.
        asks = change.empty and not found.empty
        cost = disruption(found, self._asked_policy() if asks else DEFAULTS)
        sources = Sources(
            found,
            old[0] or MachineConfig(),
            new[0],
            image_source=_IMAGE_SOURCE if target.image else "",
        )
        return weigh(steps, change, cost, sources.because), cost

    def _asked_policy(self) -> DisruptionPolicy:
        try:
            found = self._ports.cluster.policy()
        except Unreachable:
            if self._policy is None:
                raise
            return self._policy
        if not found.settled:
            raise ClusterError("the cluster's node disruption policy is being changed")
        self._policy = found.policy
        return found.policy

    def _before(self, old: MachineConfig | None, origin: Target) -> Wanted:
        """What the node was to be; nothing if that can't be told."""
        if old is None:
            return Wanted()
        try:
            return self._in_mode(wanted(old), origin)
        except ConfigError as error:
            log.warning("what %s wanted can't be told: %s", origin.config, error)
            return Wanted()

    def _in_mode(self, found: Wanted, target: Target) -> Wanted:
        return in_image_mode(found) if target.image and self._images_bake else found
