"""`classify_failure` on recorded outputs of buildah."""

import pytest

from tests.builder.outputs import FAILURES, RecordedFailure
from treenail.builder.buildah.classify import classify_failure
from treenail.image.build_reason import BuildReason


@pytest.mark.parametrize("failure", FAILURES, ids=lambda each: each.name)
def test_classification_of_recorded_failure_gives_reason_and_cause(
    failure: RecordedFailure,
) -> None:
    found = classify_failure(failure.code, failure.lines)
    assert found.reason is failure.reason
    assert failure.cause in found.cause
    assert "imagebuilder" not in found.cause


def test_classification_with_oom_kills_names_memory() -> None:
    lines = ("subprocess exited on killed", 'Error: building at STEP "RUN make": exit status 1')
    found = classify_failure(1, lines, oom_kills=2)
    assert found.reason is BuildReason.OUT_OF_MEMORY
    assert "2 processes" in found.cause


@pytest.mark.parametrize(
    ("code", "oom_kills", "reason"),
    [
        (137, 0, BuildReason.INSTRUCTION_FAILED),
        (137, None, BuildReason.OUT_OF_MEMORY),
        (143, None, BuildReason.INSTRUCTION_FAILED),
        (139, 0, BuildReason.BUILDER_FAILED),
    ],
)
def test_classification_of_killed_buildah_needs_evidence_for_memory(
    code: int, oom_kills: int | None, reason: BuildReason
) -> None:
    found = classify_failure(code, ("STEP 2/2: RUN kill -9 -1",), oom_kills=oom_kills)
    assert found.reason is reason
    assert f"signal {code - 128}" in found.cause


def test_classification_of_full_disk_needs_recent_output() -> None:
    lines = ("No space left on device", *["compiling"] * 20)
    found = classify_failure(1, (*lines, 'Error: building at STEP "RUN make": exit status 1'))
    assert found.reason is BuildReason.INSTRUCTION_FAILED
