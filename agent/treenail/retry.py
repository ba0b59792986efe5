"""Named policies for retries, and pauses that double; the only user of tenacity.

A policy bridges seconds: an API server that restarts, a D-Bus service that starts. The reconcile
loop retries what fails for longer. Every call must be idempotent. The limits apply to the pauses;
each call has its own time limit. `Backoff` is for loops that retry for as long as they run.
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from treenail import clocks, errors

if TYPE_CHECKING:
    from tenacity import RetryCallState


T = TypeVar("T")

_BUS_ERROR_PREFIX = "org.freedesktop.DBus.Error."
_STARTING_ERRORS = {
    f"{_BUS_ERROR_PREFIX}{name}"
    for name in ("NoReply", "ServiceUnknown", "NameHasNoOwner", "Disconnected")
}


def retry_api_write(call: Callable[[], T], clock: clocks.Clock) -> T:
    """Call a write to the API server up to 4 times, with at most 10 s of pauses.

    Retry if the API server is unreachable or answers 429. Raise the last error.
    """
    return _call_with_retries(
        call, clock, _is_temporary, attempts=4, first_pause_s=0.5, max_pause_s=3.0
    )


def retry_bus_call(call: Callable[[], T], clock: clocks.Clock) -> T:
    """Call a D-Bus method up to 4 times, with at most 3 s of pauses.

    Retry if the service is starting or exiting: rpm-ostreed exits after 60 s without a client, and
    a call at that time gets NoReply (rpmostreed-daemon.cxx). Raise the last error.
    """
    return _call_with_retries(
        call, clock, is_service_starting, attempts=4, first_pause_s=0.2, max_pause_s=0.8
    )


def retry_registry_probe(
    call: Callable[[], T], clock: clocks.Clock, should_retry: Callable[[BaseException], bool]
) -> T:
    """Call a probe of a registry up to 3 times, with at most 5 s of pauses.

    The probe classifies its errors, and ``should_retry`` returns whether one is an outage. Raise
    the last error.
    """
    return _call_with_retries(
        call, clock, should_retry, attempts=3, first_pause_s=1.0, max_pause_s=2.5
    )


def retry_registry_call(
    call: Callable[[], T],
    clock: clocks.Clock,
    should_retry: Callable[[BaseException], bool],
    get_retry_after_s: Callable[[BaseException], float],
    *,
    attempts: int = 5,
) -> T:
    """Call a request to an image registry up to 5 times, with at most 40 s of pauses.

    ``get_retry_after_s`` returns the pause that the registry requests, which counts up to 10 s.
    Raise the last error.
    """
    return _call_with_retries(
        call,
        clock,
        should_retry,
        get_retry_after_s,
        attempts=attempts,
        first_pause_s=0.5,
        max_pause_s=10.0,
    )


def compute_event_pause_s(failures: int) -> float:
    """Return the pause after this many failed Event writes in a row, in seconds.

    The first pause takes 15 to 30 s, each further one twice as long, up to 5 minutes. The recorder
    does not sleep: the caller must not wait for an Event.
    """
    # Imported late: see _call_with_retries.
    import tenacity  # noqa: PLC0415

    # Jitter: all nodes lose the same API server at the same time.
    wait = tenacity.wait_exponential(multiplier=15, max=285) + tenacity.wait_random(0, 15)
    state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
    state.attempt_number = failures
    return wait(state)


def _is_temporary(error: BaseException) -> bool:
    return isinstance(error, errors.UnreachableError | errors.TooManyRequestsError)


def _get_retry_after_s(error: BaseException) -> float:
    return error.retry_after_s if isinstance(error, errors.TooManyRequestsError) else 0.0


def is_service_starting(error: BaseException) -> bool:
    """Return whether the bus answered, because the service does not run or left during the call."""
    return isinstance(error, errors.BusError) and (
        error.name in _STARTING_ERRORS or error.name.startswith(f"{_BUS_ERROR_PREFIX}Spawn.")
    )


def _call_with_retries(
    call: Callable[[], T],
    clock: clocks.Clock,
    should_retry: Callable[[BaseException], bool],
    get_retry_after_s: Callable[[BaseException], float] | None = None,
    *,
    attempts: int,
    first_pause_s: float,
    max_pause_s: float,
) -> T:
    try:
        return call()
    except Exception as error:
        if not should_retry(error):
            raise
        failures = [error]

    def repeat_call() -> T:
        # The failure above is the first attempt.
        if failures:
            raise failures.pop()
        return call()

    # Imported late: tenacity takes 1 MiB of memory, and most processes never retry.
    import tenacity  # noqa: PLC0415

    exponential = tenacity.wait_exponential(multiplier=first_pause_s, max=max_pause_s)
    # Jitter: all nodes lose the same API server at the same time.
    jitter = tenacity.wait_random(0, first_pause_s)

    def pause_s(state: "RetryCallState") -> float:
        error = state.outcome.exception() if state.outcome else None
        get_s = get_retry_after_s or _get_retry_after_s
        retry_after_s = get_s(error) if error is not None else 0.0
        return min(max(exponential(state) + jitter(state), retry_after_s), max_pause_s)

    retrying = tenacity.Retrying(
        sleep=clock.sleep,
        stop=tenacity.stop_after_attempt(attempts),
        wait=pause_s,
        retry=tenacity.retry_if_exception(should_retry),
        reraise=True,
    )
    return retrying(repeat_call)


Random = Callable[[], float]
"""Returns a number from 0 up to 1."""


class Backoff:
    """Pauses that double from ``first_s`` up to ``max_s``, each reduced by up to a half.

    The jitter spreads the reconnects of a thousand nodes that lost the same server.
    """

    def __init__(
        self, *, first_s: float = 0.5, max_s: float = 30.0, jitter: Random = random.random
    ) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._jitter = jitter
        self._next_s = first_s

    def next_pause_s(self) -> float:
        """Return the next pause and double the one after it."""
        pause_s = self._next_s
        self._next_s = min(pause_s * 2, self._max_s)
        return pause_s * (1 - self._jitter() / 2)

    def reset(self) -> None:
        """Restart with the shortest pause."""
        self._next_s = self._first_s
