"""The impact of an update, and the steps that are left to do, from configs and machine.

Both are computed again each time: no plan is stored.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from treenail import errors
from treenail.api import disruptionpolicy, machineconfig
from treenail.api.hosted import annotations as hosted_key
from treenail.config import image_content, reconcilable, wanted_state
from treenail.daemon.reconcile.context import NodeInterfaces
from treenail.update.impact import os_change
from treenail.update.impact.impact import (
    IMAGE_SOURCE,
    ConfigDisruption,
    ConfigSources,
    UpdateImpact,
    compute_differences,
    compute_disruption,
    compute_impact,
    plan_service_steps,
)
from treenail.update.state.ledger_record import Target
from treenail.update.steps.plan import StepPlan
from treenail.update.steps.step_types import ConfigStep

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingSteps:
    """The steps that are left to do for a config."""

    split: image_content.ImageSplit
    impact: UpdateImpact
    steps: tuple[ConfigStep, ...]
    """Steps that write come first, then those that reload and restart services."""


class UpdatePlanner:
    """Plans updates. It changes nothing except the config cache.

    All methods raise `ConfigError` for a change that no running node can make, and for an image
    that lacks content of the config; `HostError` for a change that this machine cannot make; and
    `ClusterError`.
    """

    def __init__(self, interfaces: NodeInterfaces) -> None:
        self._interfaces = interfaces
        self._policy: disruptionpolicy.DisruptionPolicy | None = None
        self._splits = WeakKeyDictionary[
            wanted_state.ParsedConfig, tuple[str, image_content.ImageSplit]
        ]()
        """The last staged deployment that was read, and its comparison with the config; they go
        when the config cache drops the config."""

    def plan_update(
        self,
        target: Target,
        origin: Target,
        deployments: os_change.DeploymentState,
        *,
        writes_image_files: bool = False,
    ) -> UpdateImpact:
        """Plan an update and return its impact, before anything is changed.

        ``writes_image_files``: in image mode the agent writes what the image lacks. The image to
        stage is assumed to lack nothing: `plan_staged_update` compares it.
        """
        new = self._interfaces.config_cache.fetch_config(target.config)
        old = self._interfaces.config_cache.find_config(origin.config)
        self._check_reconcilable(old or new, new)
        if (fips := new.config.fips) != self._interfaces.kernel.is_fips_enabled():
            raise errors.UnreconcilableError(
                f"cannot apply {target.config}: it sets FIPS mode {'on' if fips else 'off'}, "
                f"and this node runs with FIPS mode {'off' if fips else 'on'}",
                remedy="FIPS mode is chosen at installation: reinstall the node, or revert the "
                "MachineConfig",
            )
        wanted = reconcilable.read_appliable_state(new, image=target.image)
        if not target.image:
            os_change.check_kernel_type(wanted.os, self._interfaces.kernel.find_architecture())
        before = self._load_origin(old, origin, is_written=writes_image_files)
        change = os_change.compute_os_change(before.os, wanted.os, deployments, image=target.image)
        for note in os_change.describe_kept_arguments(before.os, wanted.os, deployments):
            log.info("%s", note)
        counts = os_change.count_machine_arguments(before.os, wanted.os, deployments)
        checked_id = ""
        if not target.image:
            split = image_content.ImageSplit(wanted)
        elif change.image:
            split = image_content.assume_provided(wanted)
        else:
            checked_id = deployments.booted_id
            split = image_content.compare_with_image(
                wanted, self._interfaces.images.read_booted(wanted)
            )
            _refuse_missing(split, target, writes_image_files=writes_image_files)
        return self._plan_impact(
            split,
            UpdateImpact(
                change,
                checked_id=checked_id,
                writes_image_files=writes_image_files,
                machine_arguments=counts,
            ),
            (old, before),
            new,
            target,
        )

    def plan_staged_update(
        self, target: Target, origin: Target, impact: UpdateImpact, staged_id: str
    ) -> UpdateImpact:
        """Compare the staged image with the config, and return the impact with what it lacks."""
        new = self._load_config(target)
        old = self._interfaces.config_cache.find_config(origin.config)
        split = self._read_staged(new, staged_id)
        _refuse_missing(split, target, writes_image_files=impact.writes_image_files)
        checked = replace(impact, checked_id=staged_id)
        before = self._load_origin(old, origin, is_written=impact.writes_image_files)
        return self._plan_impact(split, checked, (old, before), new, target)

    def plan_pending_steps(
        self, target: Target, origin: Target, impact: UpdateImpact, *, staged_id: str = ""
    ) -> PendingSteps:
        """Plan the steps that are left; their impact may have grown since `plan_update`.

        ``staged_id`` is the deployment that the next boot starts; empty for the booted one.
        """
        new = self._load_config(target)
        wanted = new.wanted
        if not target.image:
            split = image_content.ImageSplit(wanted)
        elif staged_id:
            split = self._read_staged(new, staged_id)
        else:
            split = image_content.compare_with_image(
                wanted, self._interfaces.images.read_booted(wanted)
            )
        if impact.checked_id:
            # An agent before this comparison may have begun the update: it must not fail then.
            _refuse_missing(split, target, writes_image_files=impact.writes_image_files)
        elif target.image:
            split = image_content.assume_provided(split.wanted)
        steps = self._plan_steps(split, target).steps
        if impact.needs_reboot:
            return PendingSteps(split, impact, steps)
        old = self._interfaces.config_cache.find_config(origin.config)
        before = self._load_origin(old, origin, is_written=impact.writes_image_files)
        current_impact, disruption = self._compute_impact(
            steps, impact, (old, before), new, split, target
        )
        if disruption.needs_reboot:
            return PendingSteps(split, current_impact, steps)
        service_steps = plan_service_steps(steps, [cost.action for cost in disruption.costs])
        return PendingSteps(split, current_impact, (*steps, *service_steps))

    def _load_config(self, target: Target) -> wanted_state.ParsedConfig:
        configs = self._interfaces.config_cache
        return configs.read_cached(target.config) or configs.fetch_config(target.config)

    def _read_staged(
        self, config: wanted_state.ParsedConfig, staged_id: str
    ) -> image_content.ImageSplit:
        """Compare the config with the staged image, once for each deployment and config."""
        known = self._splits.get(config)
        if known is None or known[0] != staged_id:
            content = self._interfaces.images.read_staged(staged_id, config.wanted)
            known = staged_id, image_content.compare_with_image(config.wanted, content)
            self._splits[config] = known
        return known[1]

    def _plan_steps(self, split: image_content.ImageSplit, target: Target) -> StepPlan:
        configuration = self._interfaces.configuration
        return configuration.plan_steps(split.wanted, target.config, split.provided)

    def _plan_impact(
        self,
        split: image_content.ImageSplit,
        impact: UpdateImpact,
        old: tuple[wanted_state.ParsedConfig | None, wanted_state.WantedState],
        new: wanted_state.ParsedConfig,
        target: Target,
    ) -> UpdateImpact:
        """Return the impact of the steps that are needed, if this machine can make them."""
        planned = self._plan_steps(split, target)
        self._interfaces.configuration.check_steps(planned)
        return self._compute_impact(planned.steps, impact, old, new, split, target)[0]

    def _check_reconcilable(
        self, old: wanted_state.ParsedConfig, new: wanted_state.ParsedConfig
    ) -> None:
        try:
            reconcilable.check_reconcilable(old, new)
        except errors.UnreconcilableError:
            overrides = self._interfaces.cluster.fetch_disruption_policy().irreconcilable_overrides
            allowed = frozenset(
                override for override in reconcilable.ValidationOverride if override in overrides
            )
            if not allowed:
                raise
            reconcilable.check_reconcilable(old, new, allowed=allowed)

    def _compute_impact(
        self,
        steps: Sequence[ConfigStep],
        impact: UpdateImpact,
        old: tuple[wanted_state.ParsedConfig | None, wanted_state.WantedState],
        new: wanted_state.ParsedConfig,
        split: image_content.ImageSplit,
        target: Target,
    ) -> tuple[UpdateImpact, ConfigDisruption]:
        change, provided = impact.os, split.provided
        differences = compute_differences(
            image_content.drop_provided(old[1], provided),
            image_content.drop_provided(split.wanted, provided),
            steps,
            change,
        )
        # A change of the operating system reboots in any case: the policy is not needed.
        needs_policy = change.is_empty and not differences.is_empty
        disruption = compute_disruption(
            differences, self._fetch_policy() if needs_policy else disruptionpolicy.DEFAULT_POLICY
        )
        sources = ConfigSources(
            differences,
            old[0].config if old[0] else machineconfig.MachineConfig(),
            new.config,
            image_source=IMAGE_SOURCE if target.image else "",
        )
        computed = compute_impact(steps, impact, disruption, sources.find_cause)
        _refuse_disruptive_refresh(new.config, computed)
        return computed, disruption

    def _fetch_policy(self) -> disruptionpolicy.DisruptionPolicy:
        try:
            policy = self._interfaces.cluster.fetch_disruption_policy()
        except errors.UnreachableError:
            if self._policy is None:
                raise
            return self._policy
        if not policy.is_settled:
            raise errors.ClusterError(
                "cannot read the node disruption policy: MachineConfiguration/cluster has no "
                "status of its latest generation yet",
                remedy="wait for the controller that writes the status; if it does not run, start "
                "it: kubectl get machineconfiguration cluster -o yaml",
            )
        self._policy = policy.policy
        return policy.policy

    def _load_origin(
        self, old: wanted_state.ParsedConfig | None, origin: Target, *, is_written: bool
    ) -> wanted_state.WantedState:
        """Return the state that the agent wrote of the previous config; empty if unreadable.

        ``is_written``: in image mode too, it wrote what an image can carry.
        """
        if old is None:
            return wanted_state.WantedState()
        try:
            before = old.wanted
        except errors.ConfigError as error:
            log.warning("cannot read the previous config %s: %s", origin.config, error)
            return wanted_state.WantedState()
        if not origin.image or is_written:
            return before
        return image_content.drop_provided(before, image_content.assume_provided(before).provided)


def _refuse_disruptive_refresh(config: machineconfig.MachineConfig, impact: UpdateImpact) -> None:
    if hosted_key.REFRESH not in config.metadata.annotations or not impact.needs_drain:
        return
    cause = f", because of {impact.reasons[0]}" if impact.reasons else ""
    raise errors.ConfigError(
        f"cannot refresh to {config.name}: expected a change without drain and reboot, found "
        f"{impact.level_name}{cause}",
        remedy="revert the change, or let a rollout make it: remove mode from the ConfigMap",
    )


def _refuse_missing(
    split: image_content.ImageSplit, target: Target, *, writes_image_files: bool
) -> None:
    if split.missing and not writes_image_files:
        raise image_content.make_missing_error(target.config, target.image, split.missing)
