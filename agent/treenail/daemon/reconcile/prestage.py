"""Pre-staging: stage the next deployment before an update begins, or drop it again."""

import logging
from collections.abc import Callable
from dataclasses import replace

from treenail import errors
from treenail.daemon.reconcile import context, os_transaction, planning
from treenail.host.ostree import deployments
from treenail.update.decision import actions, node_state
from treenail.update.state import ledger_record

log = logging.getLogger(__name__)

OnProgress = Callable[
    [ledger_record.PrestagedTarget, deployments.TransactionProgress], deployments.TransactionVerdict
]


def prestage_target(
    action: actions.PrestageAction,
    facts: node_state.Facts,
    interfaces: context.NodeInterfaces,
    planner: planning.UpdatePlanner,
    *,
    on_progress: OnProgress,
    save_record: Callable[[ledger_record.LedgerRecord], None],
) -> None:
    """Pull and stage the target's operating system change as a locked deployment.

    The ledger records the pre-staged target before the transaction begins, so that a restarted
    agent knows whose deployment is staged. Raises `TreenailError`.
    """
    if action.foreign_id:
        raise errors.HostError(
            f"cannot pre-stage {action.target}: deployment {action.foreign_id} is staged, and "
            "treenail did not stage it",
            remedy="run: rpm-ostree cleanup --pending, or reboot into it",
        )
    if facts.deployments is None:
        raise AssertionError("pre-staging was decided without reading the deployments")
    record = facts.record
    impact = planner.plan_update(
        action.target,
        record.current,
        facts.deployments,
        writes_image_files=not facts.has_files_in_image,
    )
    prestaged = ledger_record.PrestagedTarget(action.target, facts.boot_id)
    save_record(replace(record, prestaged=prestaged))
    if not impact.os.is_empty:
        ended: list[deployments.TransactionVerdict] = []

        def watch(progress: deployments.TransactionProgress) -> deployments.TransactionVerdict:
            verdict = on_progress(prestaged, progress)
            if verdict is not deployments.TransactionVerdict.CONTINUE:
                ended.append(verdict)
            return verdict

        def attempt() -> bool:
            interfaces.preflight.check_image(impact.os.image)
            interfaces.os.stage_deployment(
                os_transaction.build_deployment_change(impact.os), watch=watch
            )
            return not ended

        try:
            os_transaction.pull_image(interfaces.pull_secrets, impact.os.image, attempt)
        except errors.BusyError as error:
            os_transaction.wait_while_busy(error, interfaces.os, watch)
            return
        except errors.CancelledError:
            if not ended:
                raise
            return
        if deployments.TransactionVerdict.DETACH in ended:
            return
    staged = None if impact.os.is_empty else interfaces.os.read_deployments().staged
    if staged is not None and action.target.image and impact.os.image:
        # The update compares again. A part that the image lacks is reported days before it.
        planner.plan_staged_update(action.target, record.current, impact, staged.id)
    save_record(
        replace(
            record,
            prestaged=replace(prestaged, staged_id=staged.id if staged else "", is_done=True),
        )
    )
    interfaces.os.release_daemon()
    log.info("pre-staged %s, locked", action.target)


def drop_prestaged(
    action: actions.DropPrestagedAction,
    facts: node_state.Facts,
    interfaces: context.NodeInterfaces,
    *,
    save_record: Callable[[ledger_record.LedgerRecord], None],
) -> None:
    """Drop the pre-staged deployment and remove it from the ledger."""
    interfaces.os.drop_staged(action.staged_id)
    interfaces.os.release_daemon()
    log.info("dropped the pre-staged deployment")
    save_record(replace(facts.record, prestaged=None))
