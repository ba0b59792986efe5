"""Stages ahead of time, and drops it again; no update is under way."""

import logging
from collections.abc import Callable
from dataclasses import replace

from treenail.daemon.reconcile.busy_wait import wait_out
from treenail.daemon.reconcile.interfaces import Ports
from treenail.daemon.reconcile.planning import Weighing
from treenail.daemon.reconcile.pull import pull
from treenail.errors import BusyError, CancelledError, HostError
from treenail.host.ostree.deployments import Change, Progress, Verdict
from treenail.update.decision.actions import DropAhead, StageAhead
from treenail.update.decision.facts import Facts
from treenail.update.impact.os_change import OSChange
from treenail.update.state.record import Record, StagedAhead

log = logging.getLogger(__name__)

OnProgress = Callable[[StagedAhead, Progress], Verdict]


def stage(
    move: StageAhead,
    facts: Facts,
    ports: Ports,
    weighing: Weighing,
    *,
    on_progress: OnProgress,
    save: Callable[[Record], None],
) -> None:
    """Pull and deploy, locked, what the target asks of the operating system.

    That it is ours is in the ledger before it begins. Raises `TreenailError`.
    """
    if move.foreign_id:
        raise HostError(
            f"deployment {move.foreign_id} is staged on this machine, and not by treenail",
            remedy="drop it with 'rpm-ostree cleanup --pending', or reboot into it",
        )
    if facts.deployed is None:
        raise AssertionError("to stage ahead was decided without a look at the deployments")
    record = facts.record
    work = weighing.weigh(move.target, record.current, facts.deployed)
    kept = StagedAhead(move.target, facts.boot_id)
    save(replace(record, ahead=kept))
    if not work.os.empty:
        ended: list[Verdict] = []

        def watch(progress: Progress) -> Verdict:
            verdict = on_progress(kept, progress)
            if verdict is not Verdict.GO_ON:
                ended.append(verdict)
            return verdict

        def attempt() -> bool:
            ports.preflight.clear(work.os.image)
            ports.os.stage(change(work.os), watch=watch)
            return not ended

        try:
            pull(ports.credentials, work.os.image, attempt)
        except BusyError as error:
            wait_out(error, ports.os, watch)
            return
        except CancelledError:
            if not ended:
                raise
            return
        if Verdict.LEAVE in ended:
            return
    staged = None if work.os.empty else ports.os.look().staged
    save(replace(record, ahead=replace(kept, staged_id=staged.id if staged else "", done=True)))
    ports.os.release()
    log.info("staged %s ahead, locked", move.target)


def drop(move: DropAhead, facts: Facts, ports: Ports, *, save: Callable[[Record], None]) -> None:
    """Have nothing staged that was staged ahead."""
    ports.os.drop(move.staged_id)
    ports.os.release()
    log.info("dropped what was staged ahead")
    save(replace(facts.record, ahead=None))


def change(asked: OSChange) -> Change:
    """What the operating system is asked for, in its adapter's words."""
    return Change(
        image=asked.image,
        append=asked.append,
        delete=asked.delete,
        install=asked.install,
        uninstall=asked.uninstall,
        remove=asked.remove,
        reset=asked.reset,
        packages_from=asked.packages_from,
    )
