"""Checks of the ledger of a machine at rest, after any crash."""

from collections.abc import Mapping

from treenail.update.state import ledger_record as records
from treenail.update.state.ledger_record import LedgerRecord

Json = dict[str, object]


def read_ledger(document: Json | None) -> LedgerRecord:
    """Decode the document of a ledger, as the agent does."""
    return records.from_json(document)


def find_wrong_ledger(
    found: LedgerRecord, expected: LedgerRecord, pins: set[str], *, is_power_cut: bool
) -> list[str]:
    """Compare what users see of the ledger; ``pins`` are the deployments that are pinned."""
    shown, wanted = _describe_ledger(found), _describe_ledger(expected)
    wrong = [
        f"the ledger has {name} {shown[name]}, expected {wanted[name]}"
        for name in wanted
        if shown[name] != wanted[name]
    ]
    counted = found.history[0].reboot_count if found.history else 0
    requested = expected.history[0].reboot_count if expected.history else 0
    if counted < requested and not is_power_cut:
        # A power cut may be the boot into the target. Other crashes cost reboots or none.
        wrong.append(f"the history has {counted} reboots into the target, expected {requested}")
    retained = {found.retained.id} if found.retained else set()
    if pins - retained:
        wrong.append(f"{pins - retained} stay pinned, the ledger retains {retained}")
    return wrong


def _describe_ledger(ledger: LedgerRecord) -> Mapping[str, object]:
    refused = ledger.quarantined
    last = ledger.history[0] if ledger.history else None
    return {
        "current": ledger.current,
        "booted": ledger.booted_digest,
        "quarantined": refused and (refused.target, refused.check, refused.is_withdrawn),
        "last update": last and (last.target, last.origin, last.outcome, bool(last.failure)),
    }
