"""Collect the facts that a decision reads from the node and the API server."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from treenail import deployment_change
from treenail.api import annotations as key
from treenail.api.node import Node
from treenail.daemon.configuration.drift import BootedState
from treenail.daemon.reconcile.context import NodeInterfaces
from treenail.host.ostree.deployments import DeploymentStatus
from treenail.host.system.kernel import HostKernel
from treenail.update.decision import decide, decide_idle, node_state
from treenail.update.decision.node_identity import NodeIdentity
from treenail.update.impact import os_change
from treenail.update.state import boot_trial, ledger_record
from treenail.update.status import NodeEvent

log = logging.getLogger(__name__)

_BAKED = "baked"
_IMAGE_FILES = (_BAKED, "write")


class Observer:
    """Collects facts, and reads from the machine only what the next decision needs."""

    def __init__(
        self,
        interfaces: NodeInterfaces,
        *,
        should_drain: bool,
        drain_limit_s: float,
        has_files_in_image: bool = True,
        can_soft_reboot: bool = False,
        retention_s: float = 86_400.0,
        health_mode: boot_trial.HealthCheckMode = boot_trial.HealthCheckMode.ENFORCE,
        identity: NodeIdentity | None = None,
    ) -> None:
        self._interfaces = interfaces
        self._identity = identity
        self._retention_s = retention_s
        self._health_mode = health_mode
        self._invalid_mode = ""
        self._invalid_files = ""
        self._can_soft_reboot = can_soft_reboot
        self._has_files_in_image = has_files_in_image
        self._should_drain = should_drain
        self._drain_limit_s = drain_limit_s
        self._has_observed = False
        self._packages: frozenset[str] | None = None
        self._digests = frozenset[str]()

    def collect_cached_facts(self, record: ledger_record.LedgerRecord) -> node_state.Facts:
        """Collect the facts that need no call to a system service."""
        node = self._interfaces.cluster.get_cached_node()
        observed = None if node is None else node_state.summarize_node(node)
        has_no_target = observed is not None and isinstance(observed.desired, node_state.NoTarget)
        return node_state.Facts(
            record=record,
            boot_id=self._interfaces.kernel.read_boot_id(),
            now=self._interfaces.clock.now(),
            monotonic=self._interfaces.clock.monotonic(),
            node=observed,
            identity=self._identity,
            deployments=None,
            initial_annotations=self._interfaces.mcd_state.read_annotations()
            if has_no_target
            else {},
            request=self._interfaces.requests.read_request(),
            is_hosted=self._interfaces.is_hosted,
            has_files_in_image=self._must_have_files(observed),
            should_drain=self._should_drain and not _is_single_replica(node),
            drain_limit_s=self._drain_limit_s,
            retention_s=self._retention_s,
            bootstrap_registry=self._interfaces.bootstrap_registry.registry,
            health_mode=self._choose_health_mode(record, observed),
            can_soft_reboot=self._can_soft_reboot
            and self._interfaces.kernel.count_soft_reboots() is not None,
        )

    def collect_facts(self, record: ledger_record.LedgerRecord) -> node_state.Facts:
        """Collect all facts. Raises `HostError` when the machine cannot be read."""
        update = record.update
        unfinished = self._interfaces.configuration.find_unfinished(update.id if update else "")
        facts = replace(
            self.collect_cached_facts(record),
            has_interrupted_change=unfinished.is_interrupted,
            has_undo=unfinished.has_undo,
            is_forced=update is None and self._interfaces.drift.is_apply_forced(),
        )
        needs_reading = decide.needs_deployments(facts, is_first=not self._has_observed)
        if needs_reading or update is not None:
            facts = replace(facts, is_shutting_down=self._interfaces.power.is_shutting_down())
        # During a shutdown systemd may stop rpm-ostreed before the agent. A D-Bus call would start
        # it again, and no decision follows.
        if needs_reading and not facts.is_shutting_down:
            facts = self._add_deployments(facts)
        if decide_idle.needs_origin_check(record):
            facts = self._add_origin_check(facts)
        if update is None and not facts.has_interrupted_change:
            facts = self._add_drift(facts)
            if facts.deployments is None and decide_idle.needs_reapply(facts):
                facts = self._add_deployments(facts)
        if decide_idle.is_first_contact(facts):
            facts = self._add_adoption_change(facts)
        if (
            update is not None
            and update.phase is ledger_record.Phase.VERIFYING
            and update.boot_id == facts.boot_id
        ):
            facts = replace(
                facts,
                trial_status=self._interfaces.health.run_checks(update.boot_trial, facts.boot_id),
            )
        # Read the deployments once more after an update, to find what it left staged.
        self._has_observed = update is None and (self._has_observed or needs_reading)
        return facts

    def _choose_health_mode(
        self, record: ledger_record.LedgerRecord, node: node_state.ObservedNode | None
    ) -> boot_trial.HealthCheckMode:
        """Return the mode: by the Node, before it is known by the ledger, else by the settings."""
        if node is not None:
            self._report_invalid_mode(node)
            return node.health_mode or self._health_mode
        return record.update.boot_trial.mode if record.update else self._health_mode

    def _report_invalid_mode(self, node: node_state.ObservedNode) -> None:
        """Report an annotation that names no health mode, once for each value."""
        invalid = node.invalid_health_mode
        if invalid and invalid != self._invalid_mode:
            message = (
                f"cannot use {key.HEALTH_MODE}: {invalid!r:.100} is not a health mode; the mode of "
                f"agent.toml holds, {self._health_mode}; set the annotation to enforce, report "
                "or off"
            )
            self._report_annotation("InvalidHealthMode", message)
        self._invalid_mode = invalid

    def _add_origin_check(self, facts: node_state.Facts) -> node_state.Facts:
        if facts.record.quarantined is None:
            return facts
        check = facts.record.quarantined.check
        origin_check = self._interfaces.health.check_origin(check, facts.boot_id)
        return replace(facts, origin_check=origin_check)

    def _must_have_files(self, node: node_state.ObservedNode | None) -> bool:
        """Return whether images must contain files: by the Node, or by the settings without it."""
        if self._interfaces.is_hosted:
            return False
        chosen = "" if node is None else node.image_files
        if chosen in _IMAGE_FILES:
            self._invalid_files = ""
            return chosen == _BAKED
        if chosen and chosen != self._invalid_files:
            self._report_annotation(
                "InvalidImageFiles",
                f"cannot use {key.IMAGE_FILES}: {chosen!r:.100} is not baked or write; image_files "
                "of agent.toml holds; set the annotation to baked or write",
            )
        self._invalid_files = chosen
        return self._has_files_in_image

    def _report_annotation(self, reason: str, message: str) -> None:
        log.warning("%s", message)
        self._interfaces.cluster.record_event(NodeEvent("Warning", reason, message))

    def _add_deployments(self, facts: node_state.Facts) -> node_state.Facts:
        state = summarize_deployments(
            self._interfaces.os.read_deployments(),
            self._interfaces.kernel,
            facts.record.machine_arguments,
        )
        self._packages = frozenset(state.packages)
        self._digests = frozenset((state.booted_digest, state.booted_list_digest))
        facts = replace(facts, deployments=state)
        update = facts.record.update
        if (
            update is None
            or update.impact is None
            or update.phase is not ledger_record.Phase.REBOOTING
            or update.boot_id == facts.boot_id
            or os_change.is_in_effect(update.impact.os, state)
        ):
            return facts
        failure = self._interfaces.os.read_finalization_error()
        if failure:
            log.warning("the reboot did not boot %s: %s", update.target, failure)
        return replace(facts, finalization_error=failure)

    def _add_adoption_change(self, facts: node_state.Facts) -> node_state.Facts:
        """Compare the booted OS with that of a target that the node may have."""
        if facts.node is None or facts.deployments is None:
            return facts
        if not isinstance(facts.node.desired, node_state.DesiredTarget):
            return facts
        target = facts.node.desired.target
        config = self._interfaces.config_cache.fetch_first_config(target.config)
        wanted = config.wanted.os
        change = os_change.compute_os_change(wanted, wanted, facts.deployments, image=target.image)
        return replace(facts, adoption_change=change)

    def _add_drift(self, facts: node_state.Facts) -> node_state.Facts:
        if not facts.record.current.config or facts.is_forced:
            return facts
        booted = BootedState(
            self._interfaces.kernel.read_command_line(), self._packages, self._digests
        )
        return replace(facts, drift=self._interfaces.drift.find_drift(facts.record.current, booted))


def summarize_deployments(
    deployments: DeploymentStatus, kernel: HostKernel, recorded: Mapping[str, int]
) -> os_change.DeploymentState:
    """Return what decisions read of the deployments and the booted kernel arguments.

    ``recorded`` are the counts of the machine's own arguments in the ledger.
    """
    arguments = kernel.read_command_line()
    booted, staged, pending = deployments.booted, deployments.staged, deployments.pending
    return os_change.DeploymentState(
        booted_digest=booted.digest if booted else "",
        booted_id=booted.id if booted else "",
        is_booted_pinned=booted.is_pinned if booted else False,
        staged_digest=staged.digest if staged else "",
        booted_list_digest=booted.list_digest if booted else "",
        staged_list_digest=staged.list_digest if staged else "",
        staged_id=staged.id if staged else "",
        is_locked=staged.is_locked if staged else False,
        kernel_arguments=arguments,
        machine_arguments=deployment_change.merge_counts(
            kernel.read_first_command_line(), arguments, recorded
        ),
        packages=booted.requested_packages if booted else (),
        removed_packages=booted.requested_base_removals if booted else (),
        other_ids=tuple(
            deployment.id
            for deployment in deployments.in_boot_order
            if not (deployment.is_booted or deployment.is_staged)
        ),
        pending_id=pending.id if pending else "",
    )


def _is_single_replica(node: Node | None) -> bool:
    """Return whether the cluster has a single node, and pods nowhere to go.

    The Machine Config Daemon skips the drain in this topology, too.
    """
    return (
        node is not None and node.annotations.get(key.CONTROL_PLANE_TOPOLOGY) == key.SINGLE_REPLICA
    )
