"""The crash record: crashes of the agent with a target that is not verified, beside the ledger.

It names the deployment that was booted before the update. A rollback therefore needs no ledger: an
agent that cannot read the ledger of another version, or a damaged one, returns to that deployment.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from treenail.encoding import codec
from treenail.update.state import boot_trial, ledger_record

Json = dict[str, object]

BOOTS_ALLOWED = 3
"""Boots into a target that may end before a verdict: a power cut may end one."""
CRASHES_TO_ROLL_BACK = 5
"""Crashes of the agent in one boot, at which the target is rolled back."""


@dataclass(frozen=True, slots=True)
class CrashRecord:
    """Starts and ends of the agent, from the first written file of a target until the verdict."""

    update_id: Annotated[str, codec.Key("updateID")]
    target: ledger_record.Target
    origin_boot_id: Annotated[str, codec.Key("originBootID")] = ""
    """The boot in which the files were written, and the reboot into the target was requested."""
    origin_id: Annotated[str, codec.Key("originID")] = ""
    """The deployment that was booted then; empty if unknown."""
    has_os_change: Annotated[bool, codec.Key("osChange")] = True
    """The target is another deployment; otherwise a rollback restores files alone."""
    needs_reboot: Annotated[bool, codec.Key("needsReboot")] = True
    """Without it the node may be in service, so a rollback must not reboot it."""
    mode: Annotated[
        boot_trial.HealthCheckMode,
        codec.Key("healthMode", fallback=boot_trial.HealthCheckMode.ENFORCE),
    ] = boot_trial.HealthCheckMode.ENFORCE
    boot_id: Annotated[str, codec.Key("bootID")] = ""
    """The boot on trial; empty before the first."""
    boot_count: Annotated[int, codec.Key("bootCount")] = 0
    crash_count: Annotated[int, codec.Key("crashes")] = 0
    """Ends of the agent in the boot on trial that were no clean stop."""
    is_running: Annotated[bool, codec.Key("running")] = False
    """The agent started and has not recorded a clean stop."""
    rollback_reboots: Annotated[int, codec.Key("rollbackReboots")] = 0

    def count_start(self, boot_id: str, *, counts_boot: bool = True) -> "CrashRecord":
        """Return the record after a start: an earlier start without a clean stop was a crash.

        Without ``counts_boot`` the boot is none into the target.
        """
        if boot_id == self.boot_id:
            crash_count = self.crash_count + int(self.is_running)
            return replace(self, crash_count=crash_count, is_running=True)
        return replace(
            self,
            boot_id=boot_id,
            boot_count=self.boot_count + int(counts_boot and boot_id != self.origin_boot_id),
            crash_count=0,
            is_running=True,
        )

    @property
    def failure(self) -> str:
        """The reason for a rollback without a verdict, as a sentence; empty without one."""
        if self.boot_count > BOOTS_ALLOWED:
            return f"it was booted {self.boot_count} times, and no boot lasted until a verdict"
        if self.crash_count >= CRASHES_TO_ROLL_BACK:
            return f"the agent crashed {self.crash_count} times in one boot, without a verdict"
        return ""


def derive_crash_record(update: ledger_record.UpdateRecord) -> CrashRecord:
    """Return the record of an update that has none: before its reboot, or of an older agent."""
    trial = update.boot_trial
    is_before_boot = update.phase in {ledger_record.Phase.APPLYING, ledger_record.Phase.REBOOTING}
    return CrashRecord(
        update_id=update.id,
        target=update.target,
        origin_boot_id=update.boot_id if is_before_boot else "",
        needs_reboot=update.impact is None or update.impact.needs_reboot,
        has_os_change=update.impact is None or not update.impact.os.is_empty,
        mode=trial.mode,
        boot_id=trial.boot_id,
        boot_count=trial.boot_count,
        rollback_reboots=trial.rollback_reboots,
    )


def to_json(record: CrashRecord) -> Json:
    """Return the JSON document of the record."""
    return codec.encode(record)


def from_json(document: Json | None) -> CrashRecord | None:
    """Return the record of a document; None without one, and for one that is not readable."""
    if document is None:
        return None
    try:
        return codec.decode(CrashRecord, document)
    except codec.CodecError:
        return None
