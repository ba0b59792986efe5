"""Collects the facts that a decision reads from the node and the API server."""

from dataclasses import replace

from treenail.api import annotations as key
from treenail.api.node import Node
from treenail.daemon.cluster.node_summary import summarize_node
from treenail.daemon.configuration.drift import BootedState
from treenail.daemon.reconcile.context import NodeInterfaces
from treenail.host.ostree.deployments import DeploymentStatus
from treenail.update.decision import desired
from treenail.update.decision.decide import needs_deployments
from treenail.update.decision.facts import DeploymentState, Facts
from treenail.update.state.phases import Phase
from treenail.update.state.record import LedgerRecord

SINGLE_REPLICA = "SingleReplica"


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
    ) -> None:
        self._interfaces = interfaces
        self._retention_s = retention_s
        self._can_soft_reboot = can_soft_reboot
        self._has_files_in_image = has_files_in_image
        self._should_drain = should_drain
        self._drain_limit_s = drain_limit_s
        self._has_observed = False
        self._packages: frozenset[str] | None = None

    def collect_cached_facts(self, record: LedgerRecord) -> Facts:
        """Collect the facts that need no call to a system service."""
        node = self._interfaces.cluster.get_cached_node()
        observed = None if node is None else summarize_node(node)
        has_no_target = observed is not None and isinstance(observed.desired, desired.NoTarget)
        return Facts(
            record=record,
            boot_id=self._interfaces.kernel.read_boot_id(),
            now=self._interfaces.clock.now(),
            node=observed,
            deployments=None,
            initial_annotations=self._interfaces.mcd_state.read_annotations()
            if has_no_target
            else {},
            request=self._interfaces.requests.read_request(),
            has_files_in_image=self._has_files_in_image,
            should_drain=self._should_drain and not _is_single_replica(node),
            drain_limit_s=self._drain_limit_s,
            retention_s=self._retention_s,
            can_soft_reboot=self._can_soft_reboot
            and self._interfaces.kernel.count_soft_reboots() is not None,
        )

    def collect_facts(self, record: LedgerRecord) -> Facts:
        """Collect all facts. Raises `HostError` when the machine cannot be read."""
        update = record.update
        unfinished = self._interfaces.configuration.find_unfinished(update.id if update else "")
        facts = replace(
            self.collect_cached_facts(record),
            has_interrupted_change=unfinished.is_interrupted,
            has_undo=unfinished.has_undo,
            is_forced=update is None and self._interfaces.drift.is_apply_forced(),
        )
        needs_reading = needs_deployments(facts, is_first=not self._has_observed)
        if needs_reading or update is not None:
            facts = replace(facts, is_shutting_down=self._interfaces.power.is_shutting_down())
        # During a shutdown systemd may stop rpm-ostreed before the agent. A D-Bus call would start
        # it again, and no decision follows.
        if needs_reading and not facts.is_shutting_down:
            state = summarize_deployments(
                self._interfaces.os.read_deployments(), self._interfaces.kernel.read_command_line()
            )
            facts = replace(facts, deployments=state)
            self._packages = frozenset(state.packages)
        if update is None and not facts.has_interrupted_change:
            facts = self._add_drift(facts)
        if (
            update is not None
            and update.phase is Phase.VERIFYING
            and update.boot_id == facts.boot_id
        ):
            facts = replace(
                facts,
                trial_status=self._interfaces.health.run_checks(update.boot_trial, facts.boot_id),
            )
        # Read the deployments once more after an update, to find what it left staged.
        self._has_observed = update is None and (self._has_observed or needs_reading)
        return facts

    def _add_drift(self, facts: Facts) -> Facts:
        if not facts.record.current.config or facts.is_forced:
            return facts
        booted = BootedState(self._interfaces.kernel.read_command_line(), self._packages)
        return replace(facts, drift=self._interfaces.drift.find_drift(facts.record.current, booted))


def summarize_deployments(
    deployments: DeploymentStatus, arguments: tuple[str, ...]
) -> DeploymentState:
    """Return what decisions read of the deployments and the booted kernel arguments."""
    booted, staged, pending = deployments.booted, deployments.staged, deployments.pending
    return DeploymentState(
        booted_digest=booted.digest if booted else "",
        booted_id=booted.id if booted else "",
        is_booted_pinned=booted.is_pinned if booted else False,
        staged_digest=staged.digest if staged else "",
        staged_id=staged.id if staged else "",
        is_locked=staged.is_locked if staged else False,
        kernel_arguments=arguments,
        packages=booted.requested_packages if booted else (),
        removed_packages=booted.requested_base_removals if booted else (),
        booted_config=booted.labels.get(key.BAKED_CONFIG_LABEL, "") if booted else "",
        staged_config=staged.labels.get(key.BAKED_CONFIG_LABEL, "") if staged else "",
        other_ids=tuple(
            each.id for each in deployments.in_boot_order if not (each.is_booted or each.is_staged)
        ),
        pending_id=pending.id if pending else "",
    )


def _is_single_replica(node: Node | None) -> bool:
    """Return whether the cluster has a single node, and pods nowhere to go.

    The Machine Config Daemon skips the drain in this topology, too.
    """
    return node is not None and node.annotations.get(key.CONTROL_PLANE_TOPOLOGY) == SINGLE_REPLICA
