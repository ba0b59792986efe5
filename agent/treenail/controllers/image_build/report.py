"""The annotation ``treenail.io/build-report`` of a MachineOSBuild."""

import json
from collections.abc import Mapping

from treenail.api.decode import Fields, Json, load_json
from treenail.clock import format_rfc3339, parse_rfc3339
from treenail.controllers.image_build.facts import AttemptFailure, BuildReport
from treenail.errors import ConfigError
from treenail.image.build_reason import BuildReason

LIMIT_BYTES = 8 * 1024
_MESSAGE_LIMIT = 2000
_WARNING_LIMIT = 500
_MAX_PHASES = 16


def encode_report(report: BuildReport) -> str:
    """Encode a report in at most `LIMIT_BYTES`; the begin of a long log is left out."""
    text = json.dumps(_convert_report(report, None), ensure_ascii=True, separators=(",", ":"))
    log = "" if report.failure is None else report.failure.log
    while len(text) > LIMIT_BYTES and log:
        # Escapes take up to 6 bytes a character.
        log = log[max((len(text) - LIMIT_BYTES) // 6, 64) :]
        text = json.dumps(_convert_report(report, log), ensure_ascii=True, separators=(",", ":"))
    return text


def decode_report(text: str) -> BuildReport:
    """Decode a report; an unreadable one counts no attempt."""
    if not text or len(text) > 2 * LIMIT_BYTES:
        return BuildReport()
    try:
        fields = Fields.from_json(load_json(text, where="build report"), "build report")
        retry_at = fields.get_text("retryAt")
        return BuildReport(
            attempts=max(fields.get_optional_integer("attempts") or 0, 0),
            failure=_decode_failure(fields),
            retry_at=parse_rfc3339(retry_at) if retry_at else None,
            jobs=tuple(filter(None, fields.get_text("job").split(","))),
            seconds=_decode_seconds(fields.get_object("seconds")),
            warning=fields.get_text("warning"),
        )
    except (ConfigError, ValueError):
        return BuildReport()


def _convert_report(report: BuildReport, log: str | None) -> Json:
    found: Json = {"attempts": report.attempts, "seconds": _round(report.seconds)}
    if report.jobs:
        found["job"] = ",".join(report.jobs)
    if report.warning:
        found["warning"] = report.warning[:_WARNING_LIMIT]
    if report.retry_at is not None:
        found["retryAt"] = format_rfc3339(report.retry_at)
    if (failure := report.failure) is not None:
        found |= {
            "reason": failure.reason.value,
            "message": failure.message[:_MESSAGE_LIMIT],
            "line": failure.line,
            "log": failure.log if log is None else log,
        }
    return found


def _decode_failure(fields: Fields) -> AttemptFailure | None:
    reason = fields.get_text("reason")
    if reason not in tuple(BuildReason):
        return None
    return AttemptFailure(
        BuildReason(reason),
        fields.get_text("message"),
        line=fields.get_optional_integer("line") or 0,
        log=fields.get_text("log"),
    )


def _decode_seconds(fields: Fields) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in list(fields.values.items())[:_MAX_PHASES]
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _round(seconds: Mapping[str, float]) -> Json:
    return {name: round(value, 3) for name, value in list(seconds.items())[:_MAX_PHASES]}
