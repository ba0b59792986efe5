"""Counts failed attempts of a build, and schedules the next one. Pure."""

from treenail.controllers.image_build.facts import AttemptFailure, BuildReport
from treenail.image.build_reason import RetryClass, classify_retry, compute_retry_delay

MAX_COUNTED = 8
"""Failed Jobs in a report: more than those of one attempt, which have an architecture each."""


def count_failure(
    report: BuildReport, failure: AttemptFailure, now: float, jobs: tuple[str, ...] = ()
) -> BuildReport:
    """Return the report after a failed attempt; without `BuildReport.retry_at` it was the last."""
    attempts = report.attempts + 1
    retry = classify_retry(failure.reason)
    is_repeated = report.failure is not None and report.failure.reason == failure.reason
    count = (2 if is_repeated else 1) if retry is RetryClass.ONCE else attempts
    delay = compute_retry_delay(count, retry)
    retry_at = None if delay is None else now + delay.total_seconds()
    counted = tuple(dict.fromkeys((*report.jobs, *jobs)))[-MAX_COUNTED:]
    return BuildReport(attempts, failure, retry_at, counted, failure.seconds)
