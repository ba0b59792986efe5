"""What was done to a node, when and why: the ledger's record, read for people."""

from dataclasses import dataclass

from treenail.update.state.phases import Phase
from treenail.update.state.record import LedgerRecord, PastUpdate, Target


@dataclass(frozen=True, slots=True)
class UpdateSummary:
    """One update as an answer to "why": what it asked of the node, and what asked for it."""

    id: str
    origin: Target
    target: Target
    began: float
    """Seconds since the epoch."""
    needs_drain: bool
    needs_reboot: bool
    reasons: tuple[str, ...]
    is_planned: bool = True
    """It is known what it asks for."""
    is_soft_reboot: bool = False
    """Its last reboot kept the kernel."""

    @property
    def disruption(self) -> str:
        """What it asks of the node, as a noun."""
        if not self.is_planned:
            return "change that is being worked out"
        if self.needs_reboot:
            reboot = "soft reboot" if self.is_soft_reboot else "reboot"
            return f"drain and {reboot}" if self.needs_drain else reboot
        return "drain" if self.needs_drain else "change in service"


@dataclass(frozen=True, slots=True)
class DisruptionHistory:
    """Why the node is, was or will be disturbed.

    ``boot`` is the update that the machine was booted for: None when it was somebody else's doing,
    or when the moment of the boot is not known.
    """

    pending: UpdateSummary | None = None
    last: UpdateSummary | None = None
    """The last one that is over and drained or rebooted the node."""
    boot: UpdateSummary | None = None


def summarize_history(record: LedgerRecord, *, booted_at: float | None) -> DisruptionHistory:
    """What the record says; ``booted_at`` is in seconds since the epoch, None if not known."""
    past = [_summarize_past(each) for each in record.history]
    pending = _summarize_pending(record)
    spans = [(each, over.ended) for each, over in zip(past, record.history, strict=True)]
    if pending is not None and record.update is not None and record.update.reboot_count:
        spans.insert(0, (pending, float("inf")))
    return DisruptionHistory(
        pending=pending,
        last=next((each for each in past if each.needs_drain or each.needs_reboot), None),
        boot=next((each for each, ended in spans if _is_boot_of(each, ended, booted_at)), None),
    )


def _is_boot_of(update: UpdateSummary, ended: float, booted_at: float | None) -> bool:
    """Whether the boot was within the update: one that reboots is over only after its boot."""
    return booted_at is not None and update.needs_reboot and update.began <= booted_at <= ended


def _summarize_pending(record: LedgerRecord) -> UpdateSummary | None:
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


def _summarize_past(past: PastUpdate) -> UpdateSummary:
    return UpdateSummary(
        id=past.id,
        origin=past.origin,
        target=past.target,
        began=past.began,
        needs_drain=Phase.DRAINING in past.phase_seconds,
        needs_reboot=past.reboot_count > 0,
        reasons=past.reasons,
        is_soft_reboot=past.is_soft_reboot,
    )
