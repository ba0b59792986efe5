"""Named policies for trying again at once; the only user of tenacity.

They bridge a moment: a server that restarts, a service that is being started. What lasts longer is
the loop's business, which looks at everything anew. What is called has to be harmless when done
twice. The limits hold for the pauses; each call has a limit of its own.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from treenail.clock import Clock
from treenail.errors import BusError, TooManyRequestsError, UnreachableError

if TYPE_CHECKING:
    from tenacity import RetryCallState

T = TypeVar("T")

_BUS_ERROR_PREFIX = "org.freedesktop.DBus.Error."
_STARTING_ERRORS = {
    f"{_BUS_ERROR_PREFIX}{name}"
    for name in ("NoReply", "ServiceUnknown", "NameHasNoOwner", "Disconnected")
}


def retry_api_write(call: Callable[[], T], clock: Clock) -> T:
    """What a write to the API server returns, tried up to 4 times within 10 s of pauses.

    Again when there was no answer, or when the server asks for later. The last error is raised.
    """
    return _call_with_retries(
        call, clock, _is_temporary, attempts=4, first_pause_s=0.5, max_pause_s=3.0
    )


def retry_bus_call(call: Callable[[], T], clock: Clock) -> T:
    """What a D-Bus call returns, tried up to 4 times within 3 s of pauses.

    Again when the service went away, as one that exits when idle may at the very moment it is
    called, or is only being started. The last error is raised.
    """
    return _call_with_retries(
        call, clock, _is_service_starting, attempts=4, first_pause_s=0.2, max_pause_s=0.8
    )


def _is_temporary(error: BaseException) -> bool:
    return isinstance(error, UnreachableError | TooManyRequestsError)


def _is_service_starting(error: BaseException) -> bool:
    return isinstance(error, BusError) and (
        error.name in _STARTING_ERRORS or error.name.startswith(f"{_BUS_ERROR_PREFIX}Spawn.")
    )


def _call_with_retries(
    call: Callable[[], T],
    clock: Clock,
    should_retry: Callable[[BaseException], bool],
    *,
    attempts: int,
    first_pause_s: float,
    max_pause_s: float,
) -> T:
    # 1 MiB of memory beside gi's, and most runs have nothing to try again.
    import tenacity  # noqa: PLC0415

    longer = tenacity.wait_exponential(multiplier=first_pause_s, max=max_pause_s)
    # Not at the same instant as every other node that lost the same server.
    spread = tenacity.wait_random(0, first_pause_s)

    def pause_s(state: "RetryCallState") -> float:
        error = state.outcome.exception() if state.outcome else None
        asked_s = error.retry_after_s if isinstance(error, TooManyRequestsError) else 0.0
        return min(max(longer(state) + spread(state), asked_s), max_pause_s)

    retrying = tenacity.Retrying(
        sleep=clock.sleep,
        stop=tenacity.stop_after_attempt(attempts),
        wait=pause_s,
        retry=tenacity.retry_if_exception(should_retry),
        reraise=True,
    )
    return retrying(call)
