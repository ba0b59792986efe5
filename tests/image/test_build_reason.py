"""Classes, delays and remedies of build reasons."""

from datetime import timedelta

from treenail.image.build_result import (
    REMEDIES,
    BuildReason,
    RetryClass,
    classify_retry,
    compute_retry_delay,
)


def test_each_reason_has_a_remedy_and_a_retry_class() -> None:
    assert REMEDIES.keys() == set(BuildReason)
    assert {reason for reason in BuildReason if classify_retry(reason) is RetryClass.ONCE} == {
        "OutOfMemory",
        "DeadlineExceeded",
    }
    assert {reason for reason in BuildReason if classify_retry(reason) is RetryClass.EXTERNAL} == {
        "RegistryFull", "RegistryBusy", "RegistryUnreachable", "DiskFull", "Evicted",
        "DigestMismatch", "BaseLoginRefused", "PushLoginRefused", "BuilderFailed",
    }  # fmt: skip


def test_external_failures_are_retried_for_24_hours() -> None:
    delays: list[timedelta] = []
    while (delay := compute_retry_delay(len(delays) + 1)) is not None:
        delays.append(delay)
    assert [delay.total_seconds() / 60 for delay in delays[:5]] == [1, 5, 15, 60, 60]
    assert timedelta(hours=23) < sum(delays, timedelta()) <= timedelta(hours=24)
    assert compute_retry_delay(10_000) is None


def test_once_is_retried_once_and_user_never() -> None:
    assert compute_retry_delay(1, RetryClass.ONCE) == timedelta(minutes=1)
    assert compute_retry_delay(2, RetryClass.ONCE) is None
    assert compute_retry_delay(1, RetryClass.USER) is None
