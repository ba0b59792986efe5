"""Summaries of a node's past and pending updates, for users."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from treenail.update.state import ledger_record

# The last reason of an update with more causes than the ledger keeps (`compute_impact`).
_REST = re.compile(r"and \d+ more")


@dataclass(frozen=True, slots=True)
class UpdateSummary:
    """One update, with what it disrupts and why."""

    id: str
    origin: ledger_record.Target
    target: ledger_record.Target
    began: float
    """Seconds since the epoch."""
    needs_drain: bool
    needs_reboot: bool
    reasons: tuple[str, ...]
    is_planned: bool = True
    """The impact of the update is known."""
    is_soft_reboot: bool = False
    """Its last reboot kept the kernel."""

    @property
    def disruption(self) -> str:
        """The disruption of the node, as a noun."""
        if not self.is_planned:
            return "change that is being planned"
        if self.needs_reboot:
            reboot = "soft reboot" if self.is_soft_reboot else "reboot"
            return f"drain and {reboot}" if self.needs_drain else reboot
        return "drain" if self.needs_drain else "change without disruption"


@dataclass(frozen=True, slots=True)
class DisruptionHistory:
    """The updates that disrupt or disrupted the node."""

    pending: UpdateSummary | None = None
    last: UpdateSummary | None = None
    """The last ended update that drained or rebooted the node."""
    boot: UpdateSummary | None = None
    """The update that caused the current boot; None if another cause or no boot time is known."""


def summarize_history(
    record: ledger_record.LedgerRecord, *, booted_at: float | None
) -> DisruptionHistory:
    """Return the history; ``booted_at`` is in seconds since the epoch, None if unknown."""
    past = [_summarize_past(update) for update in record.history]
    pending = _summarize_pending(record)
    spans = [(summary, over.ended) for summary, over in zip(past, record.history, strict=True)]
    if pending is not None and record.update is not None and record.update.reboot_count:
        spans.insert(0, (pending, float("inf")))
    return DisruptionHistory(
        pending=pending,
        last=next(
            (summary for summary in past if summary.needs_drain or summary.needs_reboot), None
        ),
        boot=next(
            (summary for summary, ended in spans if _is_boot_of(summary, ended, booted_at)), None
        ),
    )


def list_causes(reasons: Iterable[str]) -> Iterator[str]:
    """Yield the reasons of an update as ends of a sentence: ``because …``, and ``and 3 more``."""
    for reason in reasons:
        yield reason if _REST.fullmatch(reason) else f"because {reason}"


def _is_boot_of(update: UpdateSummary, ended: float, booted_at: float | None) -> bool:
    """Return whether the update caused the boot: an update ends only after its own reboot."""
    return booted_at is not None and update.needs_reboot and update.began <= booted_at <= ended


def _summarize_pending(record: ledger_record.LedgerRecord) -> UpdateSummary | None:
    update = record.update
    if update is None:
        return None
    return UpdateSummary(
        id=update.id,
        origin=update.origin,
        target=update.target,
        began=update.began,
        needs_drain=update.impact is not None and update.impact.needs_drain,
        needs_reboot=update.impact is not None and update.impact.needs_reboot,
        reasons=update.impact.reasons if update.impact else (),
        is_planned=update.impact is not None,
        is_soft_reboot=update.is_soft_reboot,
    )


def _summarize_past(past: ledger_record.PastUpdate) -> UpdateSummary:
    return UpdateSummary(
        id=past.id,
        origin=past.origin,
        target=past.target,
        began=past.began,
        needs_drain=ledger_record.Phase.DRAINING in past.phase_seconds,
        needs_reboot=past.reboot_count > 0,
        reasons=past.reasons,
        is_soft_reboot=past.is_soft_reboot,
    )
