"""The actions of the agent. `decide_action` chooses one, the daemon runs it.

``str(action)`` is the text for logs and ``treenail status``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail.config.drift_comparison import Drift
from treenail.errors import TreenailError
from treenail.update.state import ledger_record


@dataclass(frozen=True, slots=True)
class IdleAction:
    """Do nothing; ``is_settled`` if the node has its desired target."""

    reason: str
    is_settled: bool = False

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class WaitAction:
    """Wait for another program; ``is_overdue`` if that takes longer than ``limit_s``."""

    reason: str
    is_overdue: bool = False
    limit_s: float = field(default=600.0, compare=False)
    """Seconds after which the wait is overdue, if the agent decides it in each pass until then."""
    remedy: str = field(default="", compare=False)
    """What a user can do about an overdue wait."""

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class AdoptAction:
    """Record the target as current, because the machine already has it."""

    target: ledger_record.Target

    def __str__(self) -> str:
        return f"already at {self.target}"


@dataclass(frozen=True, slots=True)
class RecoverAction:
    """Undo a change of files that was interrupted, or remove what it left behind."""

    def __str__(self) -> str:
        return "recovering from an interrupted change of files"


@dataclass(frozen=True, slots=True)
class RepairDriftAction:
    """Restore what drifted from the current config."""

    drifts: tuple[Drift, ...]

    def __str__(self) -> str:
        return "repairing drift"


@dataclass(frozen=True, slots=True)
class PlanAction:
    """Read the configs and compute what the update changes and disrupts."""

    target: ledger_record.Target

    def __str__(self) -> str:
        return f"planning the update to {self.target}"


@dataclass(frozen=True, slots=True)
class StageAction:
    """Pull and deploy the target's operating system, locked."""

    target: ledger_record.Target

    def __str__(self) -> str:
        return f"staging {self.target}"


@dataclass(frozen=True, slots=True)
class CheckImageAction:
    """Compare the staged image with the config, and plan again with what the image lacks."""

    target: ledger_record.Target
    staged_id: str

    def __str__(self) -> str:
        return f"comparing the staged image with {self.target.config}"


@dataclass(frozen=True, slots=True)
class PrestageAction:
    """Pull and deploy a target that is requested for later, locked; the node stays idle."""

    target: ledger_record.Target
    foreign_id: str = ""
    """The deployment that another program staged, and which blocks this one."""

    def __str__(self) -> str:
        return f"pre-staging {self.target}"


@dataclass(frozen=True, slots=True)
class DropPrestagedAction:
    """Drop the pre-staged deployment."""

    staged_id: str = ""

    def __str__(self) -> str:
        return "dropping the pre-staged deployment"


@dataclass(frozen=True, slots=True)
class DrainAction:
    """Request the drain with this token."""

    target: ledger_record.Target
    token: str

    def __str__(self) -> str:
        return "requesting the drain"


@dataclass(frozen=True, slots=True)
class ApplyAction:
    """Write files, units and users, all or none. An update without a reboot ends with this."""

    target: ledger_record.Target

    def __str__(self) -> str:
        return f"applying {self.target}"


@dataclass(frozen=True, slots=True)
class RebootAction:
    """Unlock the staged deployment, if there is one, and reboot into it."""

    target: ledger_record.Target
    staged_id: str = ""
    is_soft: bool = False
    """Keep the kernel running if the staged deployment has the same one."""

    def __str__(self) -> str:
        how = ", with a soft reboot if the kernel stays" if self.is_soft else ""
        return f"rebooting into {self.target}{how}"


@dataclass(frozen=True, slots=True)
class RestoreAction:
    """Restore files, units and users as they were before the update."""

    def __str__(self) -> str:
        return "restoring files, units and users"


TRIAL_REMEDY = "to see all checks and the time left, run on this node: treenail status"


@dataclass(frozen=True, slots=True)
class VerifyAction:
    """Check whether the node is healthy with the booted target."""

    target: ledger_record.Target
    reason: str
    problem: str = ""
    """The checks that keep failing, for the Node; empty without one."""

    def __str__(self) -> str:
        return f"verifying {self.target}: {self.reason}"


@dataclass(frozen=True, slots=True)
class RollBackAction:
    """Roll back to the previous deployment and its config, and quarantine the target."""

    quarantine: ledger_record.QuarantinedTarget

    def __str__(self) -> str:
        return "rolling back"


@dataclass(frozen=True, slots=True)
class CommitAction:
    """Write what is left after the boot, and record the booted target as current."""

    target: ledger_record.Target
    unhealthy: str = ""
    """The health checks that did not pass and do not count, as a sentence."""

    def __str__(self) -> str:
        return f"committing {self.target}"


@dataclass(frozen=True, slots=True)
class UncordonAction:
    """Request the uncordon with this token."""

    token: str

    def __str__(self) -> str:
        return "requesting the uncordon"


@dataclass(frozen=True, slots=True)
class FinishAction:
    """Move the update to the history; ``is_done`` if it reached its target."""

    is_done: bool

    def __str__(self) -> str:
        return "update done" if self.is_done else "update cancelled"


@dataclass(frozen=True, slots=True)
class CancelStagedAction:
    """Cancel the update, drop what it staged, and quarantine its target if it is to blame."""

    reason: str
    staged_id: str = ""
    quarantine: ledger_record.QuarantinedTarget | None = None

    def __str__(self) -> str:
        return f"cancelling the update: {self.reason}"


@dataclass(frozen=True, slots=True)
class RefuseAction:
    """Refuse to move to the desired target until the cause of the error changes."""

    error: TreenailError
    is_observation_failure: bool = False
    """Whether the facts could not be collected, which the next pass tries again."""

    @property
    def reported_error(self) -> TreenailError | None:
        """The error that the first report shows; None for one that may pass.

        A report of Working first would look like a recovery, which the rollout controller reports.
        """
        is_lasting = not self.is_observation_failure and self.error.report_after_failures <= 1
        return self.error if is_lasting else None

    def __str__(self) -> str:
        return "blocked"


@dataclass(frozen=True, slots=True)
class AnnotateNodeAction:
    """Write the current target to the Node, as the request too."""

    annotations: Mapping[str, str | None]
    reason: str
    warning: str = ""
    """Why the request is replaced; for an Event."""

    def __str__(self) -> str:
        return f"annotating the Node with {self.reason}"


@dataclass(frozen=True, slots=True)
class UnpinAction:
    """Unpin the previous deployment: its retention ended, or the next one needs its space."""

    id: str

    def __str__(self) -> str:
        return "unpinning the previous deployment"


@dataclass(frozen=True, slots=True)
class RetryAction:
    """End the quarantine: the desired target or the cause changed, or a user requested a retry."""

    reason: str = ""
    retry: str | None = None
    """The value of the Node's annotation to remember; None to keep the remembered one."""

    def __str__(self) -> str:
        return f"ending the quarantine: {self.reason}" if self.reason else "ending the quarantine"


@dataclass(frozen=True, slots=True)
class ExcuseTargetAction:
    """Record that the check that failed the target fails with the previous target, too."""

    check: str

    def __str__(self) -> str:
        return f"recording that check {self.check} fails with the previous target, too"


Decision = (
    IdleAction
    | WaitAction
    | AdoptAction
    | RecoverAction
    | RepairDriftAction
    | PlanAction
    | StageAction
    | CheckImageAction
    | PrestageAction
    | DropPrestagedAction
    | DrainAction
    | ApplyAction
    | RebootAction
    | RestoreAction
    | VerifyAction
    | RollBackAction
    | CommitAction
    | UncordonAction
    | FinishAction
    | CancelStagedAction
    | RefuseAction
    | AnnotateNodeAction
    | RetryAction
    | ExcuseTargetAction
    | UnpinAction
)
