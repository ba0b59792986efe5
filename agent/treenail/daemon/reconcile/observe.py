"""Adapters to facts: the only place that turns what machines say into what decisions read."""

from dataclasses import replace

from treenail.api import annotations as key
from treenail.api.node import Node
from treenail.daemon.configuration.drift import BootedState
from treenail.daemon.reconcile.interfaces import NodeInterfaces
from treenail.host.ostree.deployments import DeploymentStatus
from treenail.update.decision import desired
from treenail.update.decision.decide import needs_deployments
from treenail.update.decision.facts import DeploymentState, DrainHandshake, Facts, ObservedNode
from treenail.update.state.record import LedgerRecord, Phase, Target

SINGLE_REPLICA = "SingleReplica"


class Observer:
    """Looks at everything a decision may depend on, and asks for nothing it does not need."""

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
        """The facts that cost no question to the machine's services."""
        node = self._interfaces.cluster.get_cached_node()
        now_seen = None if node is None else summarize_node(node)
        unasked = now_seen is not None and isinstance(now_seen.desired, desired.NoTarget)
        return Facts(
            record=record,
            boot_id=self._interfaces.kernel.read_boot_id(),
            now=self._interfaces.clock.now(),
            node=now_seen,
            deployments=None,
            initial_annotations=self._interfaces.mcd_state.read_annotations() if unasked else {},
            request=self._interfaces.requests.read_request(),
            has_files_in_image=self._has_files_in_image,
            should_drain=self._should_drain and not _is_single_replica(node),
            drain_limit_s=self._drain_limit_s,
            retention_s=self._retention_s,
            can_soft_reboot=self._can_soft_reboot
            and self._interfaces.kernel.count_soft_reboots() is not None,
        )

    def collect_facts(self, record: LedgerRecord) -> Facts:
        """The facts as of now; raises `HostError` when the machine can't be asked."""
        update = record.update
        unfinished = self._interfaces.configuration.find_unfinished(update.id if update else "")
        facts = replace(
            self.collect_cached_facts(record),
            has_interrupted_change=unfinished.is_interrupted,
            has_undo=unfinished.has_undo,
            is_forced=update is None and self._interfaces.drift.is_apply_forced(),
        )
        looks = needs_deployments(facts, is_first=not self._has_observed)
        if looks or update is not None:
            facts = replace(facts, is_shutting_down=self._interfaces.power.is_shutting_down())
        # rpm-ostreed may be stopped before the agent is, and nothing will be decided any more.
        if looks and not facts.is_shutting_down:
            found = summarize_deployments(
                self._interfaces.os.read_deployments(), self._interfaces.kernel.read_command_line()
            )
            facts = replace(facts, deployments=found)
            self._packages = frozenset(found.packages)
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
        # What an update leaves behind is looked at once more.
        self._has_observed = update is None and (self._has_observed or looks)
        return facts

    def _add_drift(self, facts: Facts) -> Facts:
        if not facts.record.current.config or facts.is_forced:
            return facts
        booted = BootedState(self._interfaces.kernel.read_command_line(), self._packages)
        return replace(facts, drift=self._interfaces.drift.find_drift(facts.record.current, booted))


def summarize_node(node: Node) -> ObservedNode:
    """The Node, reduced to what decisions read."""
    notes = node.annotations
    asked = desired.read_desired_target(notes)
    spellings = (
        asked.image_keys if isinstance(asked, desired.DesiredTarget) else tuple(key.IMAGE_SPELLINGS)
    )
    claims = (notes.get(key.IMAGE_SPELLINGS[each], "") for each in spellings)
    return ObservedNode(
        desired=asked,
        handshake=DrainHandshake(
            requested=notes.get(key.DESIRED_DRAIN, ""),
            applied=notes.get(key.LAST_APPLIED_DRAIN, ""),
            is_unschedulable=node.is_unschedulable,
        ),
        claimed=Target(notes.get(key.CURRENT_CONFIG, ""), next(filter(None, claims), "")),
        prestage=desired.read_prestage_target(notes),
    )


def summarize_deployments(
    deployments: DeploymentStatus, arguments: tuple[str, ...]
) -> DeploymentState:
    """The deployments, and the booted kernel arguments, reduced to what decisions read."""
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
    """A cluster of one node has nowhere to drain to; the reference skips the drain there too."""
    return node is not None and node.annotations.get(key.CONTROL_PLANE_TOPOLOGY) == SINGLE_REPLICA
