"""The moves there are: `decide` chooses one, the daemon makes it. Each says itself to people."""

from collections.abc import Mapping
from dataclasses import dataclass

from treenail.config.drift import Drift
from treenail.errors import TreenailError
from treenail.update.state.record import Refused, Target


@dataclass(frozen=True, slots=True)
class Rest:
    """Nothing to do. ``settled`` when the node is what it is asked to be."""

    reason: str
    settled: bool = False

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class Wait:
    """Something is awaited from outside; ``overdue`` when it takes longer than it may."""

    reason: str
    overdue: bool = False

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class Adopt:
    """The machine already is the target: record it as current."""

    target: Target

    def __str__(self) -> str:
        return f"already at {self.target}"


@dataclass(frozen=True, slots=True)
class Recover:
    """Put back, or clean up after, what a change of files that was cut short has left."""

    def __str__(self) -> str:
        return "putting in order what was cut short"


@dataclass(frozen=True, slots=True)
class Heal:
    """Have what drifted as the current config says."""

    drifts: tuple[Drift, ...]

    def __str__(self) -> str:
        return "putting right what drifted"


@dataclass(frozen=True, slots=True)
class Weigh:
    """Read the configs and work out what there is to do, and what it costs."""

    target: Target

    def __str__(self) -> str:
        return f"working out what {self.target} asks for"


@dataclass(frozen=True, slots=True)
class Stage:
    """Pull and deploy what the target asks of the operating system, locked."""

    target: Target

    def __str__(self) -> str:
        return f"staging {self.target}"


@dataclass(frozen=True, slots=True)
class StageAhead:
    """Pull and deploy a target that is to be at hand later, locked; the node stays as it is."""

    target: Target
    foreign_id: str = ""
    """What somebody else has staged, which is in the way."""

    def __str__(self) -> str:
        return f"staging {self.target} ahead"


@dataclass(frozen=True, slots=True)
class DropAhead:
    """Drop what was staged ahead."""

    staged_id: str = ""

    def __str__(self) -> str:
        return "dropping what was staged ahead"


@dataclass(frozen=True, slots=True)
class Drain:
    """Ask for the drain with this token."""

    target: Target
    token: str

    def __str__(self) -> str:
        return "asking for the drain"


@dataclass(frozen=True, slots=True)
class Apply:
    """Write files, units and users, all or none; whatever needs no reboot is over with that."""

    target: Target

    def __str__(self) -> str:
        return f"applying {self.target}"


@dataclass(frozen=True, slots=True)
class Reboot:
    """Unlock what is staged, if anything is, and reboot into it."""

    target: Target
    staged_id: str = ""
    softly: bool = False
    """The kernel goes on if what is staged has the same one."""

    def __str__(self) -> str:
        how = ", with a soft reboot if the kernel stays" if self.softly else ""
        return f"rebooting into {self.target}{how}"


@dataclass(frozen=True, slots=True)
class PutBack:
    """Have files, units and users as before the update."""

    def __str__(self) -> str:
        return "putting files, units and users back"


@dataclass(frozen=True, slots=True)
class Prove:
    """The target is booted: see whether the node is healthy with it."""

    target: Target
    reason: str

    def __str__(self) -> str:
        return f"seeing whether {self.target} is healthy: {self.reason}"


@dataclass(frozen=True, slots=True)
class Return:
    """Go back to what was before: the deployment and the config, as one."""

    refuse: Refused

    def __str__(self) -> str:
        return "going back to what was before"


@dataclass(frozen=True, slots=True)
class Commit:
    """The target is booted: verify its files, units and users, and record it as current."""

    target: Target

    def __str__(self) -> str:
        return f"verifying {self.target}"


@dataclass(frozen=True, slots=True)
class Resume:
    """Ask for the uncordon with this token."""

    token: str

    def __str__(self) -> str:
        return "asking for the uncordon"


@dataclass(frozen=True, slots=True)
class Close:
    """The update is over; ``done`` when it reached its target."""

    done: bool

    def __str__(self) -> str:
        return "update done" if self.done else "update called off"


@dataclass(frozen=True, slots=True)
class Drop:
    """Call the update off and drop what it staged; refuse its target if there is a reason to."""

    reason: str
    staged_id: str = ""
    refuse: Refused | None = None

    def __str__(self) -> str:
        return f"calling the update off: {self.reason}"


@dataclass(frozen=True, slots=True)
class Refuse:
    """The wish can't be obeyed; a person has to act."""

    error: TreenailError

    def __str__(self) -> str:
        return "can't do what is asked for"


@dataclass(frozen=True, slots=True)
class Introduce:
    """Annotate a Node that is new to its cluster with what its machine was made for."""

    annotations: Mapping[str, str]

    def __str__(self) -> str:
        return "telling the cluster which config this machine was made with"


@dataclass(frozen=True, slots=True)
class Unpin:
    """Let the previous deployment go: it was kept for long enough, or stands in the way."""

    id: str

    def __str__(self) -> str:
        return "letting the previous deployment go"


@dataclass(frozen=True, slots=True)
class Forgive:
    """Forget the refusal: another target is asked for, or somebody asked to try it again."""

    def __str__(self) -> str:
        return "nothing is refused any more"


Decision = (
    Rest
    | Wait
    | Adopt
    | Recover
    | Heal
    | Weigh
    | Stage
    | StageAhead
    | DropAhead
    | Drain
    | Apply
    | Reboot
    | PutBack
    | Prove
    | Return
    | Commit
    | Resume
    | Close
    | Drop
    | Refuse
    | Introduce
    | Forgive
    | Unpin
)
