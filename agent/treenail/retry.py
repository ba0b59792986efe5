"""Named policies for trying again at once; the only user of tenacity.

They bridge a moment: a server that restarts, a service that is being started. What lasts longer is
the loop's business, which looks at everything anew. What is called has to be harmless when done
twice. The limits hold for the pauses; each call has a limit of its own.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from treenail.clock import Clock
from treenail.errors import BusError, TooManyRequests, Unreachable

if TYPE_CHECKING:
    from tenacity import RetryCallState

T = TypeVar("T")

_BUS = "org.freedesktop.DBus.Error."
_STARTING = {
    f"{_BUS}{name}" for name in ("NoReply", "ServiceUnknown", "NameHasNoOwner", "Disconnected")
}


def api_write(call: Callable[[], T], clock: Clock) -> T:
    """What a write to the API server returns, tried up to 4 times within 10 s of pauses.

    Again when there was no answer, or when the server asks for later. The last error is raised.
    """
    return _tried(call, clock, _is_passing, attempts=4, first_s=0.5, most_s=3.0)


def bus_activation(call: Callable[[], T], clock: Clock) -> T:
    """What a D-Bus call returns, tried up to 4 times within 3 s of pauses.

    Again when the service went away, as one that exits when idle may at the very moment it is
    called, or is only being started. The last error is raised.
    """
    return _tried(call, clock, _is_starting, attempts=4, first_s=0.2, most_s=0.8)


def _is_passing(error: BaseException) -> bool:
    return isinstance(error, Unreachable | TooManyRequests)


def _is_starting(error: BaseException) -> bool:
    return isinstance(error, BusError) and (
        error.name in _STARTING or error.name.startswith(f"{_BUS}Spawn.")
    )


def _tried(
    call: Callable[[], T],
    clock: Clock,
    again: Callable[[BaseException], bool],
    *,
    attempts: int,
    first_s: float,
    most_s: float,
) -> T:
    # 1 MiB of memory beside gi's, and most runs have nothing to try again.
    import tenacity  # noqa: PLC0415

    longer = tenacity.wait_exponential(multiplier=first_s, max=most_s)
    # Not at the same instant as every other node that lost the same server.
    spread = tenacity.wait_random(0, first_s)

    def pause_s(state: "RetryCallState") -> float:
        error = state.outcome.exception() if state.outcome else None
        asked_s = error.retry_after_s if isinstance(error, TooManyRequests) else 0.0
        return min(max(longer(state) + spread(state), asked_s), most_s)

    retrying = tenacity.Retrying(
        sleep=clock.sleep,
        stop=tenacity.stop_after_attempt(attempts),
        wait=pause_s,
        retry=tenacity.retry_if_exception(again),
        reraise=True,
    )
    return retrying(call)
