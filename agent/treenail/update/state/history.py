"""What was done to a node, when and why: the ledger's record, read for people."""

from dataclasses import dataclass

from treenail.update.state.record import Past, Phase, Record, Target


@dataclass(frozen=True, slots=True)
class Asked:
    """One update as an answer to "why": what it asked of the node, and what asked for it."""

    id: str
    origin: Target
    target: Target
    began: float
    """Seconds since the epoch."""
    drains: bool
    reboots: bool
    reasons: tuple[str, ...]
    weighed: bool = True
    """It is known what it asks for."""
    soft: bool = False
    """Its last reboot kept the kernel."""

    @property
    def deed(self) -> str:
        """What it asks of the node, as a noun."""
        if not self.weighed:
            return "change that is being worked out"
        if self.reboots:
            reboot = "soft reboot" if self.soft else "reboot"
            return f"drain and {reboot}" if self.drains else reboot
        return "drain" if self.drains else "change in service"


@dataclass(frozen=True, slots=True)
class Account:
    """Why the node is, was or will be disturbed.

    ``boot`` is the update that the machine was booted for: None when it was somebody else's doing,
    or when the moment of the boot is not known.
    """

    pending: Asked | None = None
    last: Asked | None = None
    """The last one that is over and drained or rebooted the node."""
    boot: Asked | None = None


def account(record: Record, *, booted_at: float | None) -> Account:
    """What the record says; ``booted_at`` is in seconds since the epoch, None if not known."""
    past = [_past(each) for each in record.history]
    pending = _pending(record)
    spans = [(each, over.ended) for each, over in zip(past, record.history, strict=True)]
    if pending is not None and record.update is not None and record.update.reboots:
        spans.insert(0, (pending, float("inf")))
    return Account(
        pending=pending,
        last=next((each for each in past if each.drains or each.reboots), None),
        boot=next((each for each, ended in spans if _booted_for(each, ended, booted_at)), None),
    )


def _booted_for(update: Asked, ended: float, booted_at: float | None) -> bool:
    """Whether the boot was within the update: one that reboots is over only after its boot."""
    return booted_at is not None and update.reboots and update.began <= booted_at <= ended


def _pending(record: Record) -> Asked | None:
    update = record.update
    if update is None:
        return None
    return Asked(
        id=update.id,
        origin=update.origin,
        target=update.target,
        began=update.began,
        drains=update.work is not None and update.work.drains,
        reboots=update.work is not None and update.work.reboots,
        reasons=update.work.reasons if update.work else (),
        weighed=update.work is not None,
        soft=update.soft,
    )


def _past(past: Past) -> Asked:
    return Asked(
        id=past.id,
        origin=past.origin,
        target=past.target,
        began=past.began,
        drains=any(phase is Phase.DRAINING for phase, _seconds in past.spent),
        reboots=past.reboots > 0,
        reasons=past.reasons,
        soft=past.soft,
    )
