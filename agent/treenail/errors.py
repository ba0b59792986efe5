"""Every error that treenail raises on purpose, and how the reconcile loop reacts to it.

::

    TreenailError                    node_state       retry_policy
    ├─ ConfigError                   Degraded         on change   the desired target is invalid
    │  ├─ IgnitionError
    │  └─ UnreconcilableError        Unreconcilable   on change
    ├─ DriftError                Degraded         on change   files differ from the current config
    ├─ HostError                 Degraded         backoff     an operation on this machine failed
    │  ├─ FileError  UnitError  CommandError (CommandTimeoutError)  LedgerError
    │  ├─ CredentialError                                         a pull secret is not usable
    │  ├─ PreflightError                                          the update would fail
    │  ├─ BusError                                                a D-Bus call failed
    │  │  ├─ BusTimeoutError                                      no answer within the time limit
    │  │  └─ BusyError               (unchanged)                  another transaction is in progress
    │  ├─ TransactionError                                        rpm-ostree or bootc failed
    │  │  └─ CancelledError          (unchanged)                  the transaction was cancelled
    │  ├─ StepError                                               a step failed
    │  └─ RollbackError              Degraded         on change   undoing failed too
    ├─ OverdueError                  Degraded         backoff     a wait exceeds its limit
    └─ ClusterError                  (unchanged)      backoff     the API server
       ├─ ConfigRejectedError        Degraded                     a named config cannot be read
       │  └─ ConfigPendingError      (unchanged)                  it is that of a new machine
        ├─ UnreachableError           (unchanged)                  no answer
        │  └─ UnnamedNodeError                                     the Node is not known yet
        └─ ConflictError  GoneError  ForbiddenError  NotFoundError
           AlreadyExistsError  InvalidError  TooLargeError  TooManyRequestsError  NotLeaderError
    UsageError                       (exit code 2)                 an invalid argument or setting

``node_state`` is the state that the Node shows. With None the state stays, and the Node shows the
error as the reason of a wait, until ``wait_limit_s`` ends. ``retry_policy`` says when the loop
retries. The loop reads these class attributes and never the class.
"""

from enum import StrEnum


class RetryPolicy(StrEnum):
    """When the loop retries a failed operation."""

    BACKOFF = "backoff"
    ON_CHANGE = "on change"


class TreenailError(Exception):
    """An error for users: ``cannot VERB OBJECT: CAUSE``, and a remedy.

    ``remedy`` is an instruction with the exact command; empty if the user can only wait.
    """

    node_state: str | None = "Degraded"
    retry_policy: RetryPolicy = RetryPolicy.BACKOFF
    report_after_failures: int = 1
    """Number of failures in a row after which the Node shows the error."""
    wait_limit_s: float = float("inf")
    """Seconds after which the Node is Degraded by an error without ``node_state``."""
    max_delay_s: float = float("inf")
    """Maximum seconds between two attempts, if that is less than the loop's own maximum."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class UsageError(TreenailError):
    """A command line argument or a setting is invalid."""


class ConfigError(TreenailError):
    """The desired target cannot be parsed, or is not allowed."""

    retry_policy = RetryPolicy.ON_CHANGE


class IgnitionError(ConfigError):
    """An Ignition config cannot be parsed."""


class UnreconcilableError(ConfigError):
    """A running node cannot make the change from one config to the other."""

    node_state = "Unreconcilable"


class DriftError(TreenailError):
    """Files differ from the current config."""

    retry_policy = RetryPolicy.ON_CHANGE


class HostError(TreenailError):
    """An operation on this machine failed."""


class FileError(HostError):
    """A path cannot be read or written."""


class UnitError(HostError):
    """An operation of systemd on a unit failed."""


class CommandError(HostError):
    """A program failed; ``stderr`` is its standard error, without credentials."""

    def __init__(self, message: str, *, stderr: str = "", remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.stderr = stderr


class CommandTimeoutError(CommandError):
    """A program exceeded its time limit and was killed."""


class PreflightError(HostError):
    """The update cannot start; nothing was changed. ``reasons`` are for programs."""

    def __init__(self, message: str, *, reasons: tuple[str, ...] = (), remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.reasons = reasons


class LedgerError(HostError):
    """The ledger cannot be read or written."""


class CredentialError(HostError):
    """A pull secret is not usable."""


class BusError(HostError):
    """A D-Bus call failed; ``name`` is the D-Bus error name, empty without a reply.

    A service that restarts answers again after one or two failures; the Node shows the third.
    """

    report_after_failures = 3

    def __init__(self, message: str, *, name: str = "", remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.name = name


class BusTimeoutError(BusError):
    """No answer within the time limit of the call, which a service that restarts does not reach.

    The Node shows the first one: the limit of some calls is 5 minutes.
    """

    report_after_failures = 1


class BusyError(BusError):
    """Another transaction of rpm-ostree or bootc is in progress; wait for it."""

    node_state = None


class TransactionError(HostError):
    """A transaction of rpm-ostree or bootc failed."""


class CancelledError(TransactionError):
    """A transaction was cancelled, by the agent or by another client."""

    node_state = None


class StepError(HostError):
    """A step failed; earlier steps are undone. ``step`` is for programs; None if unknown."""

    def __init__(self, message: str, *, step: object = None, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.step = step


class RollbackError(HostError):
    """A step failed, and so did its undo; the message lists what remains changed."""

    retry_policy = RetryPolicy.ON_CHANGE


class OverdueError(TreenailError):
    """Another program takes longer than its limit."""


class ClusterError(TreenailError):
    """A request to the API server failed."""

    node_state: str | None = None
    report_after_failures = 3
    wait_limit_s = 600.0
    max_delay_s = 60.0


class UnreachableError(ClusterError):
    """The API server does not answer."""

    wait_limit_s = float("inf")


class UnnamedNodeError(UnreachableError):
    """It is not certain yet which Node this machine is."""


class ConfigRejectedError(ClusterError):
    """The API server does not return a config that the Node names, and says why."""

    node_state: str | None = "Degraded"


class ConflictError(ClusterError):
    """409: the object changed after it was read."""


class AlreadyExistsError(ClusterError):
    """409: an object with this name exists."""


class GoneError(ClusterError):
    """410: the resource version is too old; list again."""


class ForbiddenError(ClusterError):
    """401 or 403: the credential lacks the permission."""


class NotFoundError(ClusterError):
    """404: the object or kind does not exist."""


class ConfigMissingError(NotFoundError, ConfigRejectedError):
    """A config that the Node names does not exist."""


class ConfigPendingError(ConfigMissingError):
    """The cluster does not have yet the config that this new machine was served."""

    node_state = None
    report_after_failures = 1
    wait_limit_s = 1800.0
    max_delay_s = 15.0


class InvalidError(ClusterError):
    """400 or 422: the API server rejects the object."""


class TooLargeError(ClusterError):
    """A response, an object or all objects of a watch have more bytes than allowed."""


class NotLeaderError(ClusterError):
    """The request was not sent: another process may lead the controllers by now."""


class TooManyRequestsError(ClusterError):
    """429: retry after ``retry_after_s`` seconds if not 0; also a rejected eviction."""

    def __init__(self, message: str, *, retry_after_s: float = 0.0, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.retry_after_s = retry_after_s
