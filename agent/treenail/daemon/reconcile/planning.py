"""Plans the steps of an update from the configs and the machine."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from treenail.api.disruptionpolicy import DEFAULT_POLICY, DisruptionPolicy
from treenail.api.machineconfig import MachineConfig
from treenail.config import reconcilable
from treenail.config.wanted import WantedState, read_wanted_state
from treenail.daemon.reconcile.context import NodeInterfaces
from treenail.errors import ClusterError, ConfigError, UnreachableError, UnreconcilableError
from treenail.update.decision.facts import DeploymentState
from treenail.update.impact.disruption import ConfigDisruption, ConfigSources, compute_disruption
from treenail.update.impact.impact import (
    UpdateImpact,
    apply_image_mode,
    compute_differences,
    compute_impact,
    plan_service_steps,
)
from treenail.update.impact.os_change import OSChange, compute_os_change
from treenail.update.state.record import Target
from treenail.update.steps.steps import ConfigStep

log = logging.getLogger(__name__)

_IMAGE_SOURCE_NAME = "the image beside the config"


@dataclass(frozen=True, slots=True)
class PendingSteps:
    """The steps that are left to do for a wanted state."""

    wanted: WantedState
    impact: UpdateImpact
    steps: tuple[ConfigStep, ...]
    """Steps that write come first, then those that reload and restart services."""


class UpdatePlanner:
    """Plans updates. It changes nothing except the config cache."""

    def __init__(self, interfaces: NodeInterfaces, *, has_files_in_image: bool = True) -> None:
        """``has_files_in_image``: images contain files and units, and image mode writes none."""
        self._interfaces = interfaces
        self._has_files_in_image = has_files_in_image
        self._policy: DisruptionPolicy | None = None

    def plan_update(
        self, target: Target, origin: Target, deployments: DeploymentState
    ) -> UpdateImpact:
        """Plan an update and return its impact, before anything is changed.

        Raises `ConfigError` for a change that no running node can make, `HostError` for one that
        this machine cannot make, and `ClusterError`.
        """
        new = self._interfaces.config_cache.fetch_config(target.config)
        old = self._interfaces.config_cache.find_config(origin.config)
        if old is not None:
            self._check_reconcilable(old, new)
        if new.fips != self._interfaces.kernel.is_fips_enabled():
            raise UnreconcilableError(
                f"cannot apply {target.config}: it sets FIPS mode {'on' if new.fips else 'off'}, "
                f"and this node runs with FIPS mode {'off' if new.fips else 'on'}",
                remedy="FIPS mode is chosen at installation: reinstall the node, or revert the "
                "MachineConfig",
            )
        wanted, before = (
            self._apply_image_mode(read_wanted_state(new), target),
            self._load_origin(old, origin),
        )
        change = compute_os_change(before.os, wanted.os, deployments.running, image=target.image)
        steps = self._interfaces.configuration.plan_steps(wanted, target.config).steps
        self._interfaces.configuration.check_steps(steps)
        impact, _ = self._compute_impact(steps, change, (old, before), (new, wanted), target)
        return impact

    def plan_pending_steps(
        self, target: Target, origin: Target, impact: UpdateImpact
    ) -> PendingSteps:
        """Plan the steps that are left; their impact may have grown since `plan_update`.

        Raises the same errors as `plan_update`.
        """
        new = self._interfaces.config_cache.read_cached(
            target.config
        ) or self._interfaces.config_cache.fetch_config(target.config)
        wanted = self._apply_image_mode(read_wanted_state(new), target)
        steps = self._interfaces.configuration.plan_steps(wanted, target.config).steps
        if impact.needs_reboot:
            return PendingSteps(wanted, impact, steps)
        old = self._interfaces.config_cache.find_config(origin.config)
        before = self._load_origin(old, origin)
        current_impact, disruption = self._compute_impact(
            steps, impact.os, (old, before), (new, wanted), target
        )
        if disruption.needs_reboot:
            return PendingSteps(wanted, current_impact, steps)
        service_steps = plan_service_steps(steps, [each.action for each in disruption.costs])
        return PendingSteps(wanted, current_impact, (*steps, *service_steps))

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
        differences = compute_differences(old[1], new[1], steps, change)
        # A change of the operating system reboots in any case: the policy is not needed.
        needs_policy = change.is_empty and not differences.is_empty
        disruption = compute_disruption(
            differences, self._fetch_policy() if needs_policy else DEFAULT_POLICY
        )
        sources = ConfigSources(
            differences,
            old[0] or MachineConfig(),
            new[0],
            image_source=_IMAGE_SOURCE_NAME if target.image else "",
        )
        return compute_impact(steps, change, disruption, sources.find_cause), disruption

    def _fetch_policy(self) -> DisruptionPolicy:
        try:
            found = self._interfaces.cluster.fetch_disruption_policy()
        except UnreachableError:
            if self._policy is None:
                raise
            return self._policy
        if not found.is_settled:
            raise ClusterError(
                "cannot read the node disruption policy: MachineConfiguration/cluster is "
                "being updated"
            )
        self._policy = found.policy
        return found.policy

    def _load_origin(self, old: MachineConfig | None, origin: Target) -> WantedState:
        """Return the state that the previous config wanted; empty when it is unreadable."""
        if old is None:
            return WantedState()
        try:
            return self._apply_image_mode(read_wanted_state(old), origin)
        except ConfigError as error:
            log.warning("cannot read the previous config %s: %s", origin.config, error)
            return WantedState()

    def _apply_image_mode(self, wanted: WantedState, target: Target) -> WantedState:
        return apply_image_mode(wanted) if target.image and self._has_files_in_image else wanted
