"""Every error treenail raises on purpose, and what the loop does about it.

::

    TreenailError                    state            again
    ├─ ConfigError                   Degraded         on change   the wish itself is wrong
    │  ├─ IgnitionError
    │  └─ UnreconcilableError        Unreconcilable   on change
    ├─ DriftError                    Degraded         on change   disk and current config differ
    ├─ HostError                     Degraded         backoff     this machine refused
    │  ├─ FileError  UnitError  CommandError  LedgerError
    │  ├─ CredentialError                                         a pull secret can't be used
    │  ├─ PreflightError                                          it would not work; nothing touched
    │  ├─ BusError                                                D-Bus said no, or nothing
    │  │  └─ BusyError               (unchanged)                  somebody else's transaction
    │  ├─ TransactionError                                        rpm-ostree or bootc failed
    │  │  └─ CancelledError          (unchanged)                  we changed our mind
    │  ├─ StepError                                               a step failed, the rest is undone
    │  └─ RollbackError              Degraded         on change   undoing failed too
    ├─ DrainError                    Working          backoff     somebody's budget; it is named
    └─ ClusterError                  (unchanged)      backoff     the API server
       └─ Unreachable  Conflict  Gone  Forbidden  NotFound  AlreadyExists  Invalid  TooManyRequests
    UsageError                       (exit code 2)                 a bad argument or setting

``state`` is what the Node shows, ``again`` when the loop tries once more: those two class
attributes answer the only two questions it has, so nothing else asks for the class.
"""

from enum import StrEnum


class RetryPolicy(StrEnum):
    """When an operation that failed is tried again."""

    BACKOFF = "backoff"
    ON_CHANGE = "on change"


class TreenailError(Exception):
    """An error with a sentence for a person: what was expected, what was found, what to do.

    ``remedy`` is what a person can do about it; empty when waiting is all there is.
    """

    node_state: str | None = "Degraded"
    retry_policy: RetryPolicy = RetryPolicy.BACKOFF
    report_after_failures: int = 1
    """How many times in a row before the Node shows it."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class UsageError(TreenailError):
    """A command line argument or a setting can't be used."""


class ConfigError(TreenailError):
    """What the cluster asks for can't be read or is not allowed."""

    retry_policy = RetryPolicy.ON_CHANGE


class IgnitionError(ConfigError):
    """An Ignition config can't be read."""


class UnreconcilableError(ConfigError):
    """The difference between two configs can't be made on a running node."""

    node_state = "Unreconcilable"


class DriftError(TreenailError):
    """The disk is not as the current config says."""

    retry_policy = RetryPolicy.ON_CHANGE


class HostError(TreenailError):
    """This machine refused."""


class FileError(HostError):
    """A path can't be read or written."""


class UnitError(HostError):
    """systemd refused an operation on a unit."""


class CommandError(HostError):
    """A program failed; ``stderr`` is what it wrote to its standard error, without credentials."""

    def __init__(self, message: str, *, stderr: str = "", remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.stderr = stderr


class PreflightError(HostError):
    """The update can't begin, and nothing was touched; ``reasons`` are for programs."""

    def __init__(self, message: str, *, reasons: tuple[str, ...] = (), remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.reasons = reasons


class LedgerError(HostError):
    """The ledger on disk can't be read or written."""


class CredentialError(HostError):
    """A pull secret can't be used."""


class BusError(HostError):
    """A D-Bus call failed; ``name`` is the D-Bus error name, empty when there was no reply.

    Services are restarted and come back; a third failure in a row is no restart.
    """

    report_after_failures = 3

    def __init__(self, message: str, *, name: str = "", remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.name = name


class BusyError(BusError):
    """Another transaction holds the OS; waiting is the remedy."""

    node_state = None


class TransactionError(HostError):
    """An OS transaction ended without success."""


class CancelledError(TransactionError):
    """An OS transaction was cancelled, by us or by somebody else."""

    node_state = None


class StepError(HostError):
    """A step failed; the earlier ones were undone. ``step`` is for programs; None if unknown."""

    def __init__(self, message: str, *, step: object = None, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.step = step


class RollbackError(HostError):
    """A step failed, and undoing failed too; the message lists what is left."""

    retry_policy = RetryPolicy.ON_CHANGE


class DrainError(TreenailError):
    """The node can't be drained yet."""

    node_state = "Working"


class ClusterError(TreenailError):
    """The API server answered no, or not at all."""

    node_state = None


class UnreachableError(ClusterError):
    """No answer from the API server."""


class ConflictError(ClusterError):
    """409: the object changed since it was read."""


class AlreadyExistsError(ClusterError):
    """409: an object of this name exists."""


class GoneError(ClusterError):
    """410: the resource version is too old; list again."""


class ForbiddenError(ClusterError):
    """401 or 403: this credential may not."""


class NotFoundError(ClusterError):
    """404: no such object or kind."""


class InvalidError(ClusterError):
    """400 or 422: the API server refuses the object."""


class TooManyRequestsError(ClusterError):
    """429: later, ``retry_after_s`` seconds if the server said so; also a refused eviction."""

    def __init__(self, message: str, *, retry_after_s: float = 0.0, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.retry_after_s = retry_after_s
