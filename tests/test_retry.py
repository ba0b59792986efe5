import subprocess
import sys
from pathlib import Path

import pytest

from treenail import retry
from treenail.errors import (
    BusError,
    CommandError,
    ConflictError,
    ForbiddenError,
    TooManyRequestsError,
    TreenailError,
    UnreachableError,
)


class Clock:
    """A clock that notes the pauses instead of making them."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def now(self) -> float:
        return sum(self.pauses)

    monotonic = now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


class Call:
    """Fails with each of the errors in turn, then answers."""

    def __init__(self, *errors: TreenailError) -> None:
        self.errors = list(errors)
        self.times = 0

    def __call__(self) -> str:
        self.times += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def gone(name: str = "NoReply") -> BusError:
    return BusError("the service went away", name=f"org.freedesktop.DBus.Error.{name}")


def test_successful_call_is_not_repeated():
    clock = Clock()
    for policy in (retry.retry_api_write, retry.retry_bus_call):
        call = Call()
        assert (policy(call, clock), call.times, clock.pauses) == ("done", 1, [])


def test_api_write_is_retried_while_server_is_unreachable_or_busy():
    clock = Clock()
    call = Call(UnreachableError("refused"), TooManyRequestsError("later"))
    assert (retry.retry_api_write(call, clock), call.times) == ("done", 3)
    first, second = clock.pauses
    assert 0.5 <= first <= 1.0
    assert 1.0 <= second <= 1.5


def test_api_write_honours_retry_after_up_to_limit():
    clock = Clock()
    call = Call(
        TooManyRequestsError("later", retry_after_s=2.5),
        TooManyRequestsError("later", retry_after_s=60),
    )
    retry.retry_api_write(call, clock)
    assert clock.pauses == [2.5, 3.0]


def test_registry_probe_is_retried_for_outages_only():
    clock = Clock()
    outage, rejection = CommandError("connection refused"), CommandError("unauthorized")
    call = Call(outage, outage)
    assert retry.retry_registry_probe(call, clock, lambda error: error is outage) == "done"
    assert call.times == 3
    assert sum(clock.pauses) <= 5
    with pytest.raises(CommandError, match="unauthorized"):
        retry.retry_registry_probe(Call(rejection), clock, lambda error: error is outage)
    assert len(clock.pauses) == 2


@pytest.mark.parametrize("name", ["NoReply", "ServiceUnknown", "Spawn.ChildExited"])
def test_bus_call_is_retried_while_service_starts(name):
    clock = Clock()
    assert retry.retry_bus_call(Call(gone(name), gone(name)), clock) == "done"


@pytest.mark.parametrize(
    ("policy", "error", "within_s"),
    [(retry.retry_api_write, UnreachableError("refused"), 10), (retry.retry_bus_call, gone(), 3)],
)
def test_permanent_failure_raises_last_error_in_bounded_time(policy, error, within_s):
    clock = Clock()
    call = Call(*[error] * 99)
    with pytest.raises(type(error)) as raised:
        policy(call, clock)
    assert raised.value is error
    assert call.times == 4
    assert sum(clock.pauses) <= within_s


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        (retry.retry_api_write, ConflictError("changed")),
        (retry.retry_api_write, ForbiddenError("no")),
        (retry.retry_bus_call, BusError("no", name="org.freedesktop.DBus.Error.AccessDenied")),
        (retry.retry_bus_call, BusError("no reply in time")),
    ],
)
def test_other_errors_are_raised_at_once(policy, error):
    clock = Clock()
    with pytest.raises(type(error)):
        policy(Call(error), clock)
    assert clock.pauses == []


@pytest.mark.process
def test_import_does_not_load_tenacity():
    agent = Path(__file__).parents[1] / "agent"
    code = "import sys, treenail.retry; sys.exit('tenacity' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(agent)})
