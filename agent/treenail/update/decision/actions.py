"""The moves there are: `decide` chooses one, the daemon makes it. Each says itself to people."""

from collections.abc import Mapping
from dataclasses import dataclass

from treenail.config.drift import Drift
from treenail.errors import TreenailError
from treenail.update.state.record import QuarantinedTarget, Target


@dataclass(frozen=True, slots=True)
class IdleAction:
    """Nothing to do. ``is_settled`` when the node is what it is asked to be."""

    reason: str
    is_settled: bool = False

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class WaitAction:
    """Something is awaited from outside; ``is_overdue`` when it takes longer than it may."""

    reason: str
    is_overdue: bool = False

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class AdoptAction:
    """The machine already is the target: record it as current."""

    target: Target

    def __str__(self) -> str:
        return f"already at {self.target}"


@dataclass(frozen=True, slots=True)
class RecoverAction:
    """Put back, or clean up after, what a change of files that was cut short has left."""

    def __str__(self) -> str:
        return "putting in order what was cut short"


@dataclass(frozen=True, slots=True)
class RepairDriftAction:
    """Have what drifted as the current config says."""

    drifts: tuple[Drift, ...]

    def __str__(self) -> str:
        return "putting right what drifted"


@dataclass(frozen=True, slots=True)
class PlanAction:
    """Read the configs and work out what there is to do, and what it costs."""

    target: Target

    def __str__(self) -> str:
        return f"working out what {self.target} asks for"


@dataclass(frozen=True, slots=True)
class StageAction:
    """Pull and deploy what the target asks of the operating system, locked."""

    target: Target

    def __str__(self) -> str:
        return f"staging {self.target}"


@dataclass(frozen=True, slots=True)
class PrestageAction:
    """Pull and deploy a target that is to be at hand later, locked; the node stays as it is."""

    target: Target
    foreign_id: str = ""
    """What somebody else has staged, which is in the way."""

    def __str__(self) -> str:
        return f"staging {self.target} ahead"


@dataclass(frozen=True, slots=True)
class DropPrestagedAction:
    """Drop what was staged ahead."""

    staged_id: str = ""

    def __str__(self) -> str:
        return "dropping what was staged ahead"


@dataclass(frozen=True, slots=True)
class DrainAction:
    """Ask for the drain with this token."""

    target: Target
    token: str

    def __str__(self) -> str:
        return "asking for the drain"


@dataclass(frozen=True, slots=True)
class ApplyAction:
    """Write files, units and users, all or none; whatever needs no reboot is over with that."""

    target: Target

    def __str__(self) -> str:
        return f"applying {self.target}"


@dataclass(frozen=True, slots=True)
class RebootAction:
    """Unlock what is staged, if anything is, and reboot into it."""

    target: Target
    staged_id: str = ""
    is_soft: bool = False
    """The kernel goes on if what is staged has the same one."""

    def __str__(self) -> str:
        how = ", with a soft reboot if the kernel stays" if self.is_soft else ""
        return f"rebooting into {self.target}{how}"


@dataclass(frozen=True, slots=True)
class RestoreAction:
    """Have files, units and users as before the update."""

    def __str__(self) -> str:
        return "putting files, units and users back"


@dataclass(frozen=True, slots=True)
class VerifyAction:
    """The target is booted: see whether the node is healthy with it."""

    target: Target
    reason: str

    def __str__(self) -> str:
        return f"seeing whether {self.target} is healthy: {self.reason}"


@dataclass(frozen=True, slots=True)
class RollBackAction:
    """Go back to what was before: the deployment and the config, as one."""

    quarantine: QuarantinedTarget

    def __str__(self) -> str:
        return "going back to what was before"


@dataclass(frozen=True, slots=True)
class CommitAction:
    """The target is booted: verify its files, units and users, and record it as current."""

    target: Target

    def __str__(self) -> str:
        return f"verifying {self.target}"


@dataclass(frozen=True, slots=True)
class UncordonAction:
    """Ask for the uncordon with this token."""

    token: str

    def __str__(self) -> str:
        return "asking for the uncordon"


@dataclass(frozen=True, slots=True)
class FinishAction:
    """The update is over; ``is_done`` when it reached its target."""

    is_done: bool

    def __str__(self) -> str:
        return "update done" if self.is_done else "update called off"


@dataclass(frozen=True, slots=True)
class CancelStagedAction:
    """Call the update off and drop what it staged; refuse its target if there is a reason to."""

    reason: str
    staged_id: str = ""
    quarantine: QuarantinedTarget | None = None

    def __str__(self) -> str:
        return f"calling the update off: {self.reason}"


@dataclass(frozen=True, slots=True)
class RefuseAction:
    """The wish can't be obeyed; a person has to act."""

    error: TreenailError

    def __str__(self) -> str:
        return "can't do what is asked for"


@dataclass(frozen=True, slots=True)
class IntroduceNodeAction:
    """Annotate a Node that is new to its cluster with what its machine was made for."""

    annotations: Mapping[str, str]

    def __str__(self) -> str:
        return "telling the cluster which config this machine was made with"


@dataclass(frozen=True, slots=True)
class UnpinAction:
    """Let the previous deployment go: it was kept for long enough, or stands in the way."""

    id: str

    def __str__(self) -> str:
        return "letting the previous deployment go"


@dataclass(frozen=True, slots=True)
class RetryAction:
    """Forget the refusal: another target is asked for, or somebody asked to try it again."""

    def __str__(self) -> str:
        return "nothing is refused any more"


Decision = (
    IdleAction
    | WaitAction
    | AdoptAction
    | RecoverAction
    | RepairDriftAction
    | PlanAction
    | StageAction
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
    | IntroduceNodeAction
    | RetryAction
    | UnpinAction
)
