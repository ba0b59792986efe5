"""Decide the next action of a node without an update: stay idle, or begin something.

It may begin an update, try a failed target again when its delay is over, or pre-stage an image: the
image is deployed before its update begins. Pre-staging needs neither a drain nor an update; the
node stays idle at its current target. An update takes the deployment over if it needs the same
image. The agent drops it once the Node no longer requests it.
"""

from collections.abc import Iterable, Mapping
from itertools import takewhile

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.config import drift_comparison, image_content
from treenail.update.checks import health, preflight
from treenail.update.decision import actions, node_state, user_requests
from treenail.update.drift import drift_policy
from treenail.update.impact import os_change
from treenail.update.impact.impact import UpdateImpact
from treenail.update.state import ledger_record


def decide_prestage(
    facts: node_state.Facts, decision: actions.Decision, target: ledger_record.Target
) -> actions.Decision:
    """Return the decision about the target, or the pre-stage action that comes before it."""
    prestaged, requested = facts.record.prestaged, _find_requested_target(facts)
    if prestaged is not None and prestaged.target.image != target.image:
        is_requested = requested is not None and prestaged.target.image == requested.image
        is_idle = isinstance(
            decision,
            actions.IdleAction | actions.WaitAction | actions.UncordonAction | actions.AdoptAction,
        )
        if not (is_requested and is_idle):
            return actions.DropPrestagedAction(_find_staged_id(facts, prestaged))
    deployments = facts.deployments
    is_settled = isinstance(decision, actions.IdleAction) and decision.is_settled
    if requested is None or deployments is None or not is_settled:
        return decision
    if _is_prestaged(facts, requested):
        return decision
    is_ours = deployments.has_staged(requested.digest) and deployments.is_locked
    return actions.PrestageAction(requested, "" if is_ours else deployments.staged_id)


def needs_deployments_for_prestage(facts: node_state.Facts) -> bool:
    """Return whether the decision about pre-staging on an idle node needs the deployments."""
    prestaged, requested = facts.record.prestaged, _find_requested_target(facts)
    if prestaged is not None and (requested is None or prestaged.target.image != requested.image):
        return True
    return requested is not None and not _is_prestaged(facts, requested)


def is_prestage_requested(
    node: node_state.ObservedNode,
    prestaged: ledger_record.PrestagedTarget,
    current: ledger_record.Target,
) -> bool:
    """Return whether to go on: the Node still requests to pre-stage the image, or to move to it."""
    desired = node.desired
    if not isinstance(desired, node_state.DesiredTarget):
        return False
    is_idle = desired.target == current and node.prestage == prestaged.target
    return is_idle or desired.target.image == prestaged.target.image


def _find_requested_target(facts: node_state.Facts) -> ledger_record.Target | None:
    return None if facts.node is None else facts.node.prestage


def _is_prestaged(facts: node_state.Facts, requested: ledger_record.Target) -> bool:
    # A staged deployment is in /run/ostree until ostree-finalize-staged writes it at shutdown. That
    # skips a locked one, so the next boot has lost it.
    prestaged = facts.record.prestaged
    if prestaged is None or not prestaged.is_done:
        return False
    return prestaged.target == requested and prestaged.boot_id == facts.boot_id


def _find_staged_id(facts: node_state.Facts, prestaged: ledger_record.PrestagedTarget) -> str:
    """Return the deployment to drop, also if the agent crashed before it recorded the ID."""
    deployments = facts.deployments
    if prestaged.staged_id or deployments is None:
        return prestaged.staged_id
    is_ours = deployments.has_staged(prestaged.target.digest) and deployments.is_locked
    return deployments.staged_id if is_ours else ""


FIRST_DELAY_S = 120.0
FIRST_DRAIN_DELAY_S = 600.0
"""The first delay if each try drains the node."""
LAST_DELAY_S = 6 * 3600.0
_ROUNDING_S = 1.0
"""The time of the next try is a whole second."""


def compute_retry_delay(
    record: ledger_record.LedgerRecord, target: ledger_record.Target, *, needs_drain: bool
) -> float:
    """Return the seconds until the next try: each failure of the target in a row doubles them."""
    failures = takewhile(
        lambda past: past.target == target and past.outcome is ledger_record.UpdateOutcome.FAILED,
        record.history,
    )
    doublings = min(sum(1 for _ in failures), 16)
    first_s = FIRST_DRAIN_DELAY_S if needs_drain else FIRST_DELAY_S
    return min(first_s * 2.0**doublings, LAST_DELAY_S)


def is_retry_due(record: ledger_record.LedgerRecord, now: float) -> bool:
    """Return whether the quarantined target failed in a step whose delay is over.

    A time that no delay explains comes from a clock that has been set back since.
    """
    quarantined = record.quarantined
    if quarantined is None or quarantined.retry_at <= 0:
        return False
    left_s = quarantined.retry_at - now
    return left_s <= 0 or left_s > LAST_DELAY_S + _ROUNDING_S


def format_retry_remedy(remedy: str, retry_at: float) -> str:
    """Return the remedy of the failed step, with the time of the next try."""
    again = (
        f"the agent tries again at {clocks.format_rfc3339(retry_at)}; "
        "to try at once, run on this node: treenail retry"
    )
    return f"{remedy}; {again}" if remedy else again


DRAIN_REMEDY = (
    "read what blocks it in the annotation treenail.io/drain-blocked of the Node, and check that "
    "the drain controller runs: treenail-controller status"
)
_NAMED_DEPLOYMENTS = 5
WAIT_FOR_DEPLOYMENTS = actions.WaitAction("waiting for the list of deployments")


def decide_without_update(facts: node_state.Facts) -> actions.Decision:
    """Return the next action of a node that has no update in progress."""
    excuse = decide_excuse(facts)
    if excuse is not None:
        return excuse
    if facts.node is None:
        if facts.identity is not None and facts.identity.problem:
            return actions.WaitAction(facts.identity.wait, remedy=facts.identity.remedy)
        return actions.WaitAction("waiting for the API server to return this Node")
    desired = facts.node.desired
    if isinstance(desired, node_state.InvalidTarget):
        return actions.RefuseAction(desired.error)
    if not isinstance(desired, node_state.DesiredTarget):
        return _decide_without_request(facts, facts.node)
    target = desired.target
    if _is_request_from_backup(facts.record, facts.node, target):
        current = facts.record.current
        warning = (
            f"The Node requested {target} and showed {facts.node.shown_config}, but it had shown "
            f"{current} before: etcd or this machine was restored from a backup. The request is "
            f"now {current}; request another target to leave it"
        )
        annotations = _make_current_annotations(current, desired.image_keys)
        return actions.AnnotateNodeAction(
            annotations, f"the target of this machine, {current}", warning
        )
    if facts.node.retry not in {"", facts.record.retry}:
        return actions.RetryAction(
            f"the Node's annotation {key.RETRY} requests it", facts.node.retry
        )
    if facts.is_forced:
        return WAIT_FOR_DEPLOYMENTS if facts.deployments is None else actions.PlanAction(target)
    quarantined = facts.record.quarantined
    if quarantined is not None:
        return _decide_quarantined(facts, target, quarantined)
    drift = _decide_drift(facts, target)
    return drift or decide_prestage(facts, _decide_desired(facts, target), target)


def _decide_without_request(
    facts: node_state.Facts, node: node_state.ObservedNode
) -> actions.Decision:
    """Return the next action of a node whose Node object requests no config."""
    if facts.record.current.config:
        # Annotations got lost, or the Node was created again. The ledger knows where it is.
        reason = f"at {facts.record.current}; the Node requests no config"
        idle = _uncordon_first(facts, actions.IdleAction(reason, is_settled=True))
        return _decide_drift(facts, facts.record.current) or idle
    if facts.initial_annotations and not node.claimed.config:
        return actions.AnnotateNodeAction(
            facts.initial_annotations, "the config that this machine was installed with"
        )
    return actions.IdleAction("the Node requests no config")


def _is_request_from_backup(
    record: ledger_record.LedgerRecord, node: node_state.ObservedNode, target: ledger_record.Target
) -> bool:
    """Return whether the Node requests what was requested before a backup of etcd was restored.

    The node has had a newer target since, and the Node showed it. All such nodes would return to
    their earlier targets at the same time. The rollout controller knows how many may.
    """
    return (
        record.is_reported
        and target != record.current
        and node.shown_config != ""
        and not node.shows_current(record.current)
    )


def _make_current_annotations(
    current: ledger_record.Target, image_keys: Iterable[str]
) -> Mapping[str, str | None]:
    """Return the annotations of a Node that has, and requests, the current target.

    The image is spelled as in the request, or else in the default way.
    """
    annotations: dict[str, str | None] = {
        key.CURRENT_CONFIG: current.config,
        key.DESIRED_CONFIG: current.config,
    }
    spellings = set(image_keys) or {key.DESIRED_OS_IMAGE}
    for desired_key, current_key in key.IMAGE_SPELLINGS.items():
        image = current.image if desired_key in spellings else ""
        annotations[desired_key] = annotations[current_key] = image or None
    return annotations


def _decide_quarantined(
    facts: node_state.Facts,
    target: ledger_record.Target,
    quarantined: ledger_record.QuarantinedTarget,
) -> actions.Decision:
    """Return whether to try a quarantined target again, or another one, or to refuse it."""
    is_requested = facts.request == user_requests.UserRequest(user_requests.RequestKind.RETRY)
    if is_requested or quarantined.target != target or quarantined.is_withdrawn:
        return actions.RetryAction()
    if quarantined.check == image_content.IMAGE_FILES and not facts.has_files_in_image:
        return actions.RetryAction()
    if quarantined.fails_on_origin and facts.origin_check is health.OriginCheck.PASSES:
        return actions.RetryAction(
            f"check {quarantined.check} failed with the previous target, too, and passes now"
        )
    if is_retry_due(facts.record, facts.now):
        return actions.RetryAction("the delay after the failed step is over")
    error = errors.HostError(quarantined.reason, remedy=quarantined.remedy)
    return _uncordon_first(facts, actions.RefuseAction(error))


def decide_excuse(facts: node_state.Facts) -> actions.ExcuseTargetAction | None:
    """Excuse a target if the check that failed it fails with the previous target, too.

    The target cannot be the cause then, and is tried again as soon as the check passes.
    """
    quarantined = facts.record.quarantined
    if quarantined is None or quarantined.fails_on_origin:
        return None
    if facts.origin_check is not health.OriginCheck.FAILS:
        return None
    return actions.ExcuseTargetAction(quarantined.check)


def needs_origin_check(record: ledger_record.LedgerRecord) -> bool:
    """Return whether a target is quarantined that an outage of the cluster may have failed."""
    quarantined, update = record.quarantined, record.update
    if quarantined is None or not quarantined.is_only_check:
        return False
    is_back = update is None or update.phase is ledger_record.Phase.CANCELLING
    return is_back and health.is_outage_check(quarantined.check)


def needs_reapply(facts: node_state.Facts) -> bool:
    """Return whether the node must move to its current target once more.

    It booted another image, or may now write what its image lacks.
    """
    node, drift = facts.node, facts.drift
    if node is None or not isinstance(node.desired, node_state.DesiredTarget):
        return False
    if facts.record.quarantined is not None or node.desired.target != facts.record.current:
        return False
    is_other_image = any(
        difference.attribute is drift_comparison.DriftAttribute.IMAGE for difference in drift.all
    )
    has_gap = any(difference.subject in drift.image_gaps for difference in drift.all)
    return is_other_image or (has_gap and not facts.has_files_in_image)


def refuse_foreign_staged(deployments: os_change.DeploymentState) -> actions.RefuseAction:
    """Refuse to replace a deployment that another program staged."""
    problem = preflight.make_foreign_staged_problem(deployments.staged_id)
    error = errors.PreflightError(str(problem), reasons=(problem.reason,), remedy=problem.remedy)
    return actions.RefuseAction(error)


def refuse_unknown_booted(
    facts: node_state.Facts, impact: UpdateImpact
) -> actions.RefuseAction | None:
    """Refuse an update of the operating system where no deployment is known to be booted.

    It could not be pinned for a rollback, and no reboot could be verified.
    """
    deployments = facts.deployments
    if deployments is None or deployments.booted_id or impact.os.is_empty:
        return None
    listed = [*filter(None, (deployments.staged_id, *deployments.other_ids))]
    named = ", ".join(listed[:_NAMED_DEPLOYMENTS]) or "no deployment at all"
    more = len(listed) - _NAMED_DEPLOYMENTS
    return actions.RefuseAction(
        errors.HostError(
            "cannot update the operating system: expected one deployment to be booted, found none "
            f"booted of: {named}{f' and {more} more' if more > 0 else ''}",
            remedy="compare the list of: ostree admin status, with ostree= in /proc/cmdline; then "
            "boot one of the listed deployments: systemctl reboot",
        )
    )


def _find_requested_repairs(facts: node_state.Facts) -> tuple[drift_comparison.Drift, ...]:
    """Return the drift that a user requested to repair and that no policy repairs."""
    request, drift = facts.request, facts.drift
    if request is None or request.kind is not user_requests.RequestKind.REPAIR:
        return ()
    left_alone = (*drift.blocking, *drift.reported)
    return tuple(difference for difference in left_alone if difference.subject in request.paths)


def _decide_drift(facts: node_state.Facts, target: ledger_record.Target) -> actions.Decision | None:
    """Return the action about drift that comes before all others; None if there is none."""
    drift, config = facts.drift, facts.record.current.config
    to_repair = (*drift.to_repair, *_find_requested_repairs(facts))
    if to_repair:
        return actions.RepairDriftAction(to_repair)
    blocking = drift.blocking
    if target != facts.record.current or not facts.has_files_in_image:
        # The remedy is another image, or that the agent writes the files: neither may be blocked.
        blocking = tuple(
            difference for difference in blocking if difference.subject not in drift.image_gaps
        )
    if not blocking:
        return None
    error = errors.DriftError(
        drift_policy.format_drift(blocking, config, drift.contested),
        remedy=drift_policy.format_drift_remedy(
            blocking, drift.contested, image_gaps=drift.image_gaps
        ),
    )
    return _uncordon_first(facts, actions.RefuseAction(error))


def _decide_desired(facts: node_state.Facts, target: ledger_record.Target) -> actions.Decision:
    record, deployments = facts.record, facts.deployments
    at_target = actions.IdleAction(f"at {target}", is_settled=True)
    if deployments is None:
        # They are read whenever the desired target is not the current one.
        return _uncordon_first(facts, at_target)
    expected_digest = target.digest or record.booted_digest
    is_booted = not expected_digest or deployments.has_booted(expected_digest)
    if record.current == target and is_booted and not needs_reapply(facts):
        return _uncordon_first(facts, at_target)
    if is_first_contact(facts) and facts.adoption_change.is_empty:
        return actions.AdoptAction(target)
    if target.image and not deployments.has_booted(target.digest):
        return _check_foreign_staged(deployments, target) or actions.PlanAction(target)
    return actions.PlanAction(target)


def is_first_contact(facts: node_state.Facts) -> bool:
    """Return whether a machine without a ledger has its target: by its image, or as it claims."""
    node, deployments = facts.node, facts.deployments
    if (
        node is None
        or deployments is None
        or not isinstance(node.desired, node_state.DesiredTarget)
    ):
        return False
    if facts.record.update is not None or facts.record.current != ledger_record.Target():
        return False
    target = node.desired.target
    return deployments.has_booted(target.digest) if target.image else node.claimed == target


def _uncordon_first(facts: node_state.Facts, otherwise: actions.Decision) -> actions.Decision:
    """Withdraw a drain that no update needs, such as one from before the ledger was lost."""
    handshake = facts.node.handshake if facts.node else node_state.DrainHandshake()
    if handshake.is_drain_requested:
        config = node_state.read_drain_config(handshake.requested)
        return actions.UncordonAction(node_state.make_uncordon_token(config, handshake.applied))
    if handshake.requested and not handshake.is_settled and handshake.is_unschedulable:
        return actions.WaitAction("waiting for the uncordon", remedy=DRAIN_REMEDY)
    return otherwise


def _check_foreign_staged(
    deployments: os_change.DeploymentState, target: ledger_record.Target
) -> actions.RefuseAction | None:
    """Refuse the target if another program staged a deployment."""
    if not deployments.staged_id:
        return None
    if target.image and deployments.has_staged(target.digest) and deployments.is_locked:
        return None
    return refuse_foreign_staged(deployments)
