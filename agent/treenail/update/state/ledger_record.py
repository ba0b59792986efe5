"""The ledger: what a node must remember to survive a crash at any instruction.

One document holds the current target and the update under way. "The new target is verified" and
"the update passed its last step" are therefore one atomic write.

The ledger compares times and boots. A `Moment` has both clocks, for waits that outlive the agent's
process. The boot ID is a text that changes with every boot, soft reboots included: a soft reboot
restarts user space on the running kernel, so the kernel's own boot ID stays. The boot ID is
therefore the kernel's, with the number of soft reboots since after the first: ``UUID+1``.

An update is in a phase; `TRANSITIONS` has the phases that may follow it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from treenail import errors
from treenail.encoding import codec
from treenail.update.state.boot_trial import BootTrial

if TYPE_CHECKING:
    from treenail.update.impact.impact import UpdateImpact


class Phase(StrEnum):
    """The phase of an update. The agent writes a new phase to the ledger before it acts on it."""

    STAGING = "staging"
    """The agent reads the configs and deploys what the OS needs, locked; the node is in service."""
    DRAINING = "draining"
    """The agent requested the drain; the staged deployment is still locked."""
    APPLYING = "applying"
    """The agent writes files, units and users; all of that can be undone."""
    REBOOTING = "rebooting"
    """The agent unlocks the staged deployment and requests the reboot: the point of no return."""
    VERIFYING = "verifying"
    """The node booted the target; its health checks decide whether it stays."""
    ROLLING_BACK = "rolling-back"
    """The target is unhealthy: the previous deployment becomes the default and is booted."""
    UNCORDONING = "uncordoning"
    """The node reached the target and verified it; the agent requests the uncordon."""
    CANCELLING = "cancelling"
    """The agent drops what it staged, restores files and requests the uncordon."""


TRANSITIONS: Mapping[Phase | None, Mapping[Phase | None, str]] = {
    None: {
        Phase.STAGING: "the node requests another target, or the force file exists",
    },
    Phase.STAGING: {
        Phase.DRAINING: "everything is staged and the update needs a drain",
        Phase.APPLYING: "everything is staged and the node needs no drain, or is drained",
        Phase.REBOOTING: "everything is staged, nothing must be written and the node needs no "
        "drain, or is drained",
        Phase.CANCELLING: "the request changed, a user cancelled, or the image cannot be used",
    },
    Phase.DRAINING: {
        Phase.STAGING: "the staged deployment is gone, after a power cut for example",
        Phase.APPLYING: "the drain controller drained the node",
        Phase.REBOOTING: "the drain controller drained the node and nothing must be written",
        Phase.CANCELLING: "the request changed, a user cancelled, or the deployment was unlocked",
    },
    Phase.APPLYING: {
        Phase.STAGING: "the staged deployment is gone, or the update now needs more than planned",
        Phase.DRAINING: "another client uncordoned the node before any file was changed",
        Phase.REBOOTING: "everything is written and the update needs a reboot",
        Phase.VERIFYING: "everything is written and the kubelet or the container runtime was "
        "restarted, or the machine rebooted by another cause and the target is booted",
        Phase.ROLLING_BACK: "the machine rebooted by another cause, and the agent crashed at each "
        "start since then",
        Phase.UNCORDONING: "everything is written and the update needs no reboot",
        Phase.CANCELLING: "a step failed, the request changed, a user cancelled, another client "
        "uncordoned the node, or the agent crashed at each start",
    },
    Phase.REBOOTING: {
        Phase.STAGING: "the staged deployment is gone",
        Phase.DRAINING: "another client uncordoned the node before the deployment was unlocked",
        Phase.VERIFYING: "the target is booted",
        Phase.ROLLING_BACK: "the agent crashed at each start since the boot",
        Phase.CANCELLING: "the request changed before the reboot, the agent crashed at each start "
        "before the reboot, or the boot loader chose the previous deployment",
    },
    Phase.VERIFYING: {
        Phase.UNCORDONING: "the node is healthy",
        Phase.ROLLING_BACK: "a health check failed at the deadline, the agent crashed at each "
        "start, or the request changed",
        Phase.CANCELLING: "the previous deployment was booted, or the node is unhealthy after an "
        "update without a reboot",
    },
    Phase.ROLLING_BACK: {
        Phase.CANCELLING: "the previous deployment is booted, or the previous files are restored",
    },
    Phase.UNCORDONING: {
        None: "the node is uncordoned, or was never cordoned",
    },
    Phase.CANCELLING: {
        Phase.ROLLING_BACK: "a reboot came before the staged deployment was dropped",
        None: "everything is undone, and the node is uncordoned or was never cordoned",
    },
}
"""The phases that may follow each phase, and when; None is a node without an update.

A phase may also be entered again: in another boot, with another drain token, or with a new plan.
"""


_SOFT = "+"


def extract_kernel_boot_id(boot_id: str) -> str:
    """Return the kernel's boot ID, which is what the kubelet reports."""
    return boot_id.partition(_SOFT)[0]


def is_soft_boot(boot_id: str) -> bool:
    """Return whether the boot was a soft reboot."""
    return _SOFT in boot_id


def has_same_kernel(before: str, after: str) -> bool:
    """Return whether both boots ran on one kernel, whose monotonic clock goes on."""
    return extract_kernel_boot_id(before) == extract_kernel_boot_id(after)


def is_soft_reboot(before: str, after: str) -> bool:
    """Return whether only soft reboots lie between the two boots."""
    return before != after and has_same_kernel(before, after)


@dataclass(frozen=True, slots=True)
class Moment:
    """The wall clock may jump: a machine without a clock battery boots in 1970 or at its last time.

    The monotonic clock never jumps, but it begins again with each kernel.
    """

    wall: float
    """Seconds since the epoch."""
    boot_id: str
    monotonic: float
    """Seconds of this boot's monotonic clock."""


Json = dict[str, object]

_SHORT_DIGEST = 12
HISTORY_LIMIT = 20
FAILED_TRIES_LIMIT = 5
_ERROR_LIMIT = 500


def _import_impact_type() -> object:
    # The import costs all packages of configs, and most commands read a ledger without an update.
    from treenail.update.impact.impact import UpdateImpact  # noqa: PLC0415 - see above

    return UpdateImpact


@dataclass(frozen=True, slots=True)
class Target:
    """A rendered config and the OS image beside it; ``image`` is empty outside image mode."""

    config: str = ""
    image: str = ""

    @property
    def digest(self) -> str:
        """The manifest digest of the image, ``sha256:…``; empty without an image."""
        return self.image.partition("@")[2]

    def to_json(self) -> Json:
        """Return the target as the status shows it."""
        return {"config": self.config, "image": self.image}

    def __str__(self) -> str:
        """Return the target for sentences, with a short digest."""
        if not self.image:
            return self.config or "nothing"
        name, at, digest = self.image.partition("@")
        return f"{self.config} with {name}{at}{digest[: len('sha256:') + _SHORT_DIGEST]}"


@dataclass(frozen=True, slots=True)
class FailedTry:
    """A try of an update that failed, and that was repeated."""

    at: float
    """Seconds since the epoch."""
    error: str


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """The update of this node that is under way."""

    id: str
    target: Target
    origin: Target
    # An older agent that finds a newer one's phase was booted by a rollback: it cleans up.
    phase: Annotated[Phase, codec.Key(fallback=Phase.CANCELLING)]
    boot_id: Annotated[str, codec.Key("bootID")]
    """The boot in which ``phase`` was entered."""
    began: float
    """Seconds since the epoch."""
    entered: float
    """The time when ``phase`` was entered, in seconds since the epoch."""
    impact: Annotated["UpdateImpact | None", codec.Key(resolve=_import_impact_type)] = None
    """The planned changes; None until the configs were read."""
    staged_id: Annotated[str, codec.Key("stagedID")] = ""
    """The deployment that treenail staged; empty before, and if a crash prevented the write."""
    drain_token: Annotated[str, codec.Key("drainToken")] = ""
    """The last requested value of ``desiredDrain``; empty before the first."""
    reboot_count: Annotated[int, codec.Key("rebootCount")] = 0
    """Reboots into this target that were requested."""
    phase_seconds: Annotated[Mapping[Phase, float], codec.Key("phaseSeconds", can_skip=True)] = (
        field(default_factory=dict)
    )
    """Seconds in each earlier phase, in the order in which the phases were entered first."""
    boot_trial: Annotated[BootTrial, codec.Key("bootTrial")] = field(default_factory=BootTrial)
    is_soft_reboot: Annotated[bool, codec.Key("softReboot")] = False
    """The last reboot kept the kernel."""
    failed_tries: Annotated[tuple[FailedTry, ...], codec.Key("failedTries")] = ()
    """The last tries that failed, the oldest first; of equal errors in a row only the first."""
    entered_monotonic: Annotated[float | None, codec.Key("enteredMonotonic")] = None
    """The same time on the monotonic clock of `boot_id`; None if an older agent entered it."""
    applied_boot_id: Annotated[str, codec.Key("appliedBootID")] = ""
    """The boot in which files were written; empty before, and if an older agent wrote them."""

    def add_failed_try(self, error: str, *, now: float) -> "UpdateRecord":
        """Return the update with the failed try; the same update if its error is the last one."""
        text = error[:_ERROR_LIMIT]
        if self.failed_tries and self.failed_tries[-1].error == text:
            return self
        tries = (*self.failed_tries, FailedTry(now, text))
        return replace(self, failed_tries=tries[-FAILED_TRIES_LIMIT:])

    def enter_phase(self, phase: Phase, now: Moment) -> "UpdateRecord":
        """Return the update as it enters ``phase``."""
        is_first_boot = phase is Phase.VERIFYING and self.phase is Phase.REBOOTING
        return replace(
            self,
            phase=phase,
            boot_id=now.boot_id,
            entered=now.wall,
            entered_monotonic=now.monotonic,
            applied_boot_id=now.boot_id if phase is Phase.APPLYING else self.applied_boot_id,
            phase_seconds=self.compute_phase_seconds(now),
            is_soft_reboot=(
                is_soft_reboot(self.boot_id, now.boot_id) if is_first_boot else self.is_soft_reboot
            ),
        )

    def has_booted_files(self, boot_id: str) -> bool:
        """Return whether this boot started with files that the update had written before."""
        return (self.applied_boot_id or self.boot_id) != boot_id

    def compute_wait(self, now: Moment) -> float:
        """Return the seconds in this phase since the kernel started, without the wall clock.

        A soft reboot keeps the kernel. An update of an older agent has only the wall clock's time.
        """
        if self.entered_monotonic is None:
            return now.wall - self.entered
        is_same_kernel = has_same_kernel(self.boot_id, now.boot_id)
        began = self.entered_monotonic if is_same_kernel else 0.0
        return now.monotonic - began

    def compute_phase_seconds(self, now: Moment) -> Mapping[Phase, float]:
        """Return the seconds in each phase until now; a clock set back subtracts nothing."""
        is_same_kernel = has_same_kernel(self.boot_id, now.boot_id)
        # Across a reboot of the kernel only the wall clock counts.
        passed = self.compute_wait(now) if is_same_kernel else now.wall - self.entered
        seconds = dict(self.phase_seconds)
        seconds[self.phase] = seconds.get(self.phase, 0.0) + max(passed, 0.0)
        return seconds


@dataclass(frozen=True, slots=True)
class QuarantinedTarget:
    """A target that is not tried again until another one is requested, or a user retries it."""

    target: Target
    reason: str
    remedy: str = ""
    is_cancelled_by_user: Annotated[bool, codec.Key("cancelledByUser")] = False
    """A user on the machine cancelled the update; nothing is wrong with the target."""
    is_withdrawn: Annotated[bool, codec.Key("withdrawn")] = False
    """The Node requested another target during the boot trial; nothing is wrong with this one."""
    check: str = ""
    """The health check that failed; empty if the target failed before it was booted."""
    is_only_check: Annotated[bool, codec.Key("onlyCheck")] = False
    """No other health check failed."""
    fails_on_origin: Annotated[bool, codec.Key("failsOnOrigin")] = False
    """The check failed on the previous target, too, so that the target is not the cause."""
    retry_at: Annotated[float, codec.Key("retryAt")] = 0.0
    """When the agent tries the target again, in seconds since the epoch; 0 for never."""


@dataclass(frozen=True, slots=True)
class PrestagedTarget:
    """A target that is staged, or being staged, before the node is requested to move to it."""

    target: Target
    boot_id: Annotated[str, codec.Key("bootID")]
    """The boot in which it was staged; a locked deployment does not outlive it."""
    staged_id: Annotated[str, codec.Key("stagedID")] = ""
    """The deployment; empty before it was recorded, and if nothing had to be staged."""
    is_done: Annotated[bool, codec.Key("done")] = False


@dataclass(frozen=True, slots=True)
class RetainedDeployment:
    """The previous deployment, which the agent pins so that no program drops it."""

    id: str
    healthy_since: Annotated[float | None, codec.Key("healthySince")] = None
    """When its successor was found healthy, seconds since the epoch; None during the trial."""
    boot_id: Annotated[str, codec.Key("bootID")] = ""
    """The boot of that time; empty before, and if an older agent found it."""
    healthy_monotonic: Annotated[float, codec.Key("healthyMonotonic")] = 0.0
    """The same time on the monotonic clock of that boot."""

    def end_trial(self, now: Moment, *, is_healthy: bool) -> "RetainedDeployment":
        """Return it after the update that pinned it; without success it expires at once."""
        if self.healthy_since is not None:
            return self
        if not is_healthy:
            return replace(self, healthy_since=0.0)
        return replace(
            self,
            healthy_since=now.wall,
            boot_id=now.boot_id,
            healthy_monotonic=now.monotonic,
        )

    def is_expired(self, now: Moment, *, retention_s: float) -> bool:
        """Return whether the deployment was retained for ``retention_s``.

        After a reboot of the kernel the wall clock counts, unless the time since then is enough.
        """
        if self.healthy_since is None:
            return False
        if has_same_kernel(self.boot_id, now.boot_id):
            return now.monotonic - self.healthy_monotonic >= retention_s
        is_long_boot = self.boot_id != "" and now.monotonic >= retention_s
        return is_long_boot or now.wall >= self.healthy_since + retention_s


class UpdateOutcome(StrEnum):
    """The outcome of an update."""

    DONE = "done"
    CANCELLED = "cancelled"
    """The request changed, or another program interfered; the node has its previous state."""
    FAILED = "failed"
    """The target is quarantined; the node has its previous state."""


@dataclass(frozen=True, slots=True)
class PastUpdate:
    """An update that ended; times are seconds since the epoch."""

    id: str
    target: Target
    origin: Target
    began: float
    ended: float
    outcome: UpdateOutcome
    reboot_count: Annotated[int, codec.Key("rebootCount")] = 0
    reasons: tuple[str, ...] = ()
    """The causes of the disruption."""
    failure: str = ""
    phase_seconds: Annotated[Mapping[Phase, float], codec.Key("phaseSeconds", can_skip=True)] = (
        field(default_factory=dict)
    )
    is_soft_reboot: Annotated[bool, codec.Key("softReboot")] = False
    failed_tries: Annotated[tuple[FailedTry, ...], codec.Key("failedTries")] = ()
    """The last tries that failed before this outcome, the oldest first."""


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """The content of the ledger."""

    current: Annotated[Target, codec.Key(is_required=True)] = Target()
    """The target that was booted and verified; never set on the strength of a request alone."""
    update: Annotated[UpdateRecord | None, codec.Key(is_required=True)] = None
    quarantined: Annotated[QuarantinedTarget | None, codec.Key(is_required=True)] = None
    history: Annotated[tuple[PastUpdate, ...], codec.Key(can_skip=True)] = ()
    """The last updates, the newest first; at most `HISTORY_LIMIT`."""
    booted_digest: Annotated[str, codec.Key("bootedDigest")] = ""
    """The manifest digest that was booted when ``current`` was verified; empty if unknown."""
    prestaged: PrestagedTarget | None = None
    api_blamed: Annotated[Target, codec.Key("apiBlamed")] = Target()
    """The last target that was rolled back because the API server did not answer."""
    retained: RetainedDeployment | None = None
    """The previous deployment, while it is pinned."""
    retry: str = ""
    """The last value of the Node's annotation that requests a retry."""
    is_reported: Annotated[bool, codec.Key("reported")] = False
    """The Node showed ``current``. If it shows another one later, etcd was restored."""
    machine_arguments: Annotated[Mapping[str, int], codec.Key("machineArguments")] = field(
        default_factory=dict
    )
    """How often the machine itself has each kernel argument of ``current`` and its predecessor."""

    def close_update(self, outcome: UpdateOutcome, now: Moment) -> "LedgerRecord":
        """Return the record with the update moved to the history."""
        update = self.update
        if update is None:
            return self
        quarantined = self.quarantined
        is_failed = quarantined is not None and quarantined.target == update.target
        past = PastUpdate(
            id=update.id,
            target=update.target,
            origin=update.origin,
            began=update.began,
            ended=now.wall,
            outcome=outcome,
            reboot_count=update.reboot_count,
            reasons=update.impact.reasons if update.impact else (),
            failure=quarantined.reason if quarantined and is_failed else "",
            phase_seconds=update.compute_phase_seconds(now),
            is_soft_reboot=update.is_soft_reboot,
            failed_tries=update.failed_tries,
        )
        retained = self.retained
        if retained is not None:
            retained = retained.end_trial(now, is_healthy=outcome is UpdateOutcome.DONE)
        history = (past, *self.history)[:HISTORY_LIMIT]
        return replace(self, update=None, history=history, retained=retained)


def to_json(record: LedgerRecord) -> Json:
    """Return the JSON document of the record."""
    return codec.encode(record)


def from_json(document: Json | None) -> LedgerRecord:
    """Return the record of a ledger's document; None is a node without any update so far.

    Raises `LedgerError` when the document was not made by `to_json`, of this or another version.
    """
    if document is None:
        return LedgerRecord()
    try:
        return codec.decode(LedgerRecord, document)
    except codec.CodecError as error:
        raise errors.LedgerError(
            f"cannot read the ledger: {error}",
            remedy="install the treenail that wrote it, or rename the ledger: the agent then "
            "compares the machine with its desired config",
        ) from error
