"""Stages ahead of time, and drops it again; no update is under way."""

import logging
from collections.abc import Callable
from dataclasses import replace

from treenail.daemon.reconcile.busy_wait import wait_while_busy
from treenail.daemon.reconcile.interfaces import NodeInterfaces
from treenail.daemon.reconcile.planning import UpdatePlanner
from treenail.daemon.reconcile.pull import pull_image
from treenail.errors import BusyError, CancelledError, HostError
from treenail.host.ostree.deployments import DeploymentChange, TransactionProgress, WatchVerdict
from treenail.update.decision.actions import DropPrestagedAction, PrestageAction
from treenail.update.decision.facts import Facts
from treenail.update.impact.os_change import OSChange
from treenail.update.state.record import LedgerRecord, PrestagedTarget

log = logging.getLogger(__name__)

OnProgress = Callable[[PrestagedTarget, TransactionProgress], WatchVerdict]


def prestage_target(
    action: PrestageAction,
    facts: Facts,
    interfaces: NodeInterfaces,
    planner: UpdatePlanner,
    *,
    on_progress: OnProgress,
    save_record: Callable[[LedgerRecord], None],
) -> None:
    """Pull and deploy, locked, what the target asks of the operating system.

    That it is ours is in the ledger before it begins. Raises `TreenailError`.
    """
    if action.foreign_id:
        raise HostError(
            f"deployment {action.foreign_id} is staged on this machine, and not by treenail",
            remedy="drop it with 'rpm-ostree cleanup --pending', or reboot into it",
        )
    if facts.deployments is None:
        raise AssertionError("to stage ahead was decided without a look at the deployments")
    record = facts.record
    work = planner.plan_update(action.target, record.current, facts.deployments)
    kept = PrestagedTarget(action.target, facts.boot_id)
    save_record(replace(record, prestaged=kept))
    if not work.os.is_empty:
        ended: list[WatchVerdict] = []

        def watch(progress: TransactionProgress) -> WatchVerdict:
            verdict = on_progress(kept, progress)
            if verdict is not WatchVerdict.CONTINUE:
                ended.append(verdict)
            return verdict

        def attempt() -> bool:
            interfaces.preflight.check_image(work.os.image)
            interfaces.os.stage_deployment(build_deployment_change(work.os), watch=watch)
            return not ended

        try:
            pull_image(interfaces.pull_secrets, work.os.image, attempt)
        except BusyError as error:
            wait_while_busy(error, interfaces.os, watch)
            return
        except CancelledError:
            if not ended:
                raise
            return
        if WatchVerdict.DETACH in ended:
            return
    staged = None if work.os.is_empty else interfaces.os.read_deployments().staged
    save_record(
        replace(
            record, prestaged=replace(kept, staged_id=staged.id if staged else "", is_done=True)
        )
    )
    interfaces.os.release_daemon()
    log.info("staged %s ahead, locked", action.target)


def drop_prestaged(
    action: DropPrestagedAction,
    facts: Facts,
    interfaces: NodeInterfaces,
    *,
    save_record: Callable[[LedgerRecord], None],
) -> None:
    """Have nothing staged that was staged ahead."""
    interfaces.os.drop_staged(action.staged_id)
    interfaces.os.release_daemon()
    log.info("dropped what was staged ahead")
    save_record(replace(facts.record, prestaged=None))


def build_deployment_change(os_change: OSChange) -> DeploymentChange:
    """What the operating system is asked for, in its adapter's words."""
    return DeploymentChange(
        image=os_change.image,
        append_kargs=os_change.append,
        delete_kargs=os_change.delete,
        install_packages=os_change.install,
        uninstall_packages=os_change.uninstall,
        override_remove=os_change.remove,
        override_reset=os_change.reset,
        extensions_image=os_change.packages_from,
    )
