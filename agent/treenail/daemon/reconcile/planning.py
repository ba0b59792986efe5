"""What there is to do until a node is at its target, from its configs and its machine."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from treenail.api.disruptionpolicy import DEFAULT_POLICY, DisruptionPolicy
from treenail.api.machineconfig import MachineConfig
from treenail.config import reconcilable
from treenail.config.wanted import WantedState, read_wanted_state
from treenail.daemon.reconcile.interfaces import NodeInterfaces
from treenail.errors import ClusterError, ConfigError, UnreachableError, UnreconcilableError
from treenail.update.decision.facts import DeploymentState
from treenail.update.impact.disruption import ConfigDisruption, compute_disruption
from treenail.update.impact.explain import ConfigSources
from treenail.update.impact.impact import (
    UpdateImpact,
    apply_image_mode,
    compute_differences,
    compute_impact,
)
from treenail.update.impact.os_change import OSChange, compute_os_change
from treenail.update.impact.step_impact import plan_service_steps
from treenail.update.state.record import Target
from treenail.update.steps.steps import ConfigStep

log = logging.getLogger(__name__)

_IMAGE_SOURCE_NAME = "the image beside the config"


@dataclass(frozen=True, slots=True)
class PendingSteps:
    """What is to be written now, and what for."""

    wanted: WantedState
    impact: UpdateImpact
    steps: tuple[ConfigStep, ...]
    """Those that write, and then those that have what runs take notice."""


class UpdatePlanner:
    """Reads and works out; nothing is changed but the kept copies of configs."""

    def __init__(self, interfaces: NodeInterfaces, *, has_files_in_image: bool = True) -> None:
        """``has_files_in_image``: in image mode there are no files and units to write."""
        self._interfaces = interfaces
        self._has_files_in_image = has_files_in_image
        self._policy: DisruptionPolicy | None = None

    def plan_update(
        self, target: Target, origin: Target, deployed: DeploymentState
    ) -> UpdateImpact:
        """The work of an update, before anything is touched.

        Raises `ConfigError` for what a running node can't be made to be, `HostError` for what this
        machine can't have, and `ClusterError`.
        """
        new = self._interfaces.config_cache.fetch_config(target.config)
        old = self._interfaces.config_cache.find_config(origin.config)
        if old is not None:
            self._check_reconcilable(old, new)
        if new.fips != self._interfaces.kernel.is_fips_enabled():
            raise UnreconcilableError(
                f"{target.config} wants FIPS mode {'on' if new.fips else 'off'}, and this node "
                "runs with it the other way",
                remedy="FIPS mode is chosen when a node is installed: reinstall it, or change the "
                "MachineConfig back",
            )
        wish, before = (
            self._apply_image_mode(read_wanted_state(new), target),
            self._load_origin(old, origin),
        )
        change = compute_os_change(before.os, wish.os, deployed.running, image=target.image)
        steps = self._interfaces.configuration.plan_steps(wish, target.config).steps
        self._interfaces.configuration.check_steps(steps)
        work, _ = self._compute_impact(steps, change, (old, before), (new, wish), target)
        return work

    def plan_pending_steps(
        self, target: Target, origin: Target, impact: UpdateImpact
    ) -> PendingSteps:
        """What there is to write now; the work may be more than it was when it was weighed.

        Raises as `plan_update` does.
        """
        new = self._interfaces.config_cache.read_cached(
            target.config
        ) or self._interfaces.config_cache.fetch_config(target.config)
        wish = self._apply_image_mode(read_wanted_state(new), target)
        steps = self._interfaces.configuration.plan_steps(wish, target.config).steps
        if impact.needs_reboot:
            return PendingSteps(wish, impact, steps)
        old = self._interfaces.config_cache.find_config(origin.config)
        before = self._load_origin(old, origin)
        now, cost = self._compute_impact(steps, impact.os, (old, before), (new, wish), target)
        if cost.needs_reboot:
            return PendingSteps(wish, now, steps)
        noticing = plan_service_steps(steps, [each.action for each in cost.costs])
        return PendingSteps(wish, now, (*steps, *noticing))

    def _check_reconcilable(self, old: MachineConfig, new: MachineConfig) -> None:
        try:
            reconcilable.check_reconcilable(old, new)
        except UnreconcilableError:
            overrides = self._interfaces.cluster.fetch_disruption_policy().irreconcilable_overrides
            allowed = frozenset(
                each for each in reconcilable.ValidationOverride if each in overrides
            )
            if not allowed:
                raise
            reconcilable.check_reconcilable(old, new, allowed=allowed)

    def _compute_impact(
        self,
        steps: Sequence[ConfigStep],
        change: OSChange,
        old: tuple[MachineConfig | None, WantedState],
        new: tuple[MachineConfig, WantedState],
        target: Target,
    ) -> tuple[UpdateImpact, ConfigDisruption]:
        found = compute_differences(old[1], new[1], steps, change)
        # Whatever is asked of the operating system reboots, and so does all beside it.
        asks = change.is_empty and not found.is_empty
        cost = compute_disruption(found, self._fetch_policy() if asks else DEFAULT_POLICY)
        sources = ConfigSources(
            found,
            old[0] or MachineConfig(),
            new[0],
            image_source=_IMAGE_SOURCE_NAME if target.image else "",
        )
        return compute_impact(steps, change, cost, sources.find_cause), cost

    def _fetch_policy(self) -> DisruptionPolicy:
        try:
            found = self._interfaces.cluster.fetch_disruption_policy()
        except UnreachableError:
            if self._policy is None:
                raise
            return self._policy
        if not found.is_settled:
            raise ClusterError("the cluster's node disruption policy is being changed")
        self._policy = found.policy
        return found.policy

    def _load_origin(self, old: MachineConfig | None, origin: Target) -> WantedState:
        """What the node was to be; nothing if that can't be told."""
        if old is None:
            return WantedState()
        try:
            return self._apply_image_mode(read_wanted_state(old), origin)
        except ConfigError as error:
            log.warning("what %s wanted can't be told: %s", origin.config, error)
            return WantedState()

    def _apply_image_mode(self, found: WantedState, target: Target) -> WantedState:
        return apply_image_mode(found) if target.image and self._has_files_in_image else found
