"""`classify_failure` on recorded outputs of buildah."""

from pathlib import Path

import pytest

from tests.builder.outputs import FAILURES, RecordedFailure
from tests.waiting import wait_until
from treenail.builder.disk_space import DiskSpace, DiskSpaceSampler
from treenail.builder.failures import classify_failure
from treenail.image.build_result import BuildReason


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
        (137, None, BuildReason.INSTRUCTION_FAILED),
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


def test_classification_of_a_kill_without_counter_names_both_causes() -> None:
    found = classify_failure(137, ("STEP 2/2: RUN kill -9 -1",), oom_kills=None)
    assert "the instruction" in found.cause
    assert "lack of memory" in found.cause


@pytest.mark.parametrize(("oom_kills", "is_named"), [(None, True), (0, False)])
def test_classification_of_a_killed_command_names_memory_if_unknown(
    oom_kills: int | None, is_named: bool
) -> None:
    lines = ("subprocess exited on killed", 'Error: building at STEP "RUN make": exit status 1')
    found = classify_failure(1, lines, oom_kills=oom_kills)
    assert found.reason is BuildReason.INSTRUCTION_FAILED
    assert ("lack of memory" in found.cause) is is_named


MIB = 1024 * 1024
PRINTED = "echo No space left on device"
NEEDED = "installing package kernel needs 900MB more space on the / filesystem"


@pytest.mark.parametrize(
    ("line", "space", "reason"),
    [
        (PRINTED, DiskSpace(20_000 * MIB, 1_000_000), BuildReason.INSTRUCTION_FAILED),
        (PRINTED, DiskSpace(3 * MIB, 1_000_000), BuildReason.DISK_FULL),
        (PRINTED, DiskSpace(20_000 * MIB, 0), BuildReason.DISK_FULL),
        (PRINTED, DiskSpace(3 * MIB), BuildReason.DISK_FULL),
        (PRINTED, None, BuildReason.DISK_FULL),
        (NEEDED, DiskSpace(2_000 * MIB), BuildReason.DISK_FULL),
        (NEEDED, DiskSpace(200_000 * MIB), BuildReason.INSTRUCTION_FAILED),
    ],
)
def test_classification_of_full_disk_needs_a_disk_without_space(
    line: str, space: DiskSpace | None, reason: BuildReason
) -> None:
    error = f'Error: building at STEP "RUN {line}; false": exit status 1'
    assert classify_failure(1, (line, error), space=space).reason is reason


def test_classification_of_own_error_on_a_full_disk_names_the_free_space() -> None:
    error = "Error: committing container: write /storage/x: no space left on device"
    found = classify_failure(125, (error,), space=DiskSpace(3 * MIB))
    assert found.reason is BuildReason.DISK_FULL
    assert "3 MiB" in found.cause


def test_disk_watch_records_the_least_space_of_each_kind() -> None:
    found = [DiskSpace(5, 7), DiskSpace(9, 2), None, DiskSpace(8, None)]
    watch = DiskSpaceSampler(Path("/"), read=lambda _: found.pop(0) if found else None)
    with watch:
        while found:
            watch.sample()
    assert watch.lowest == DiskSpace(5, 2)


def test_disk_watch_samples_without_calls(tmp_path: Path) -> None:
    sizes = iter([10, 4])
    watch = DiskSpaceSampler(tmp_path, read=lambda _: DiskSpace(next(sizes, 100)))
    with watch:
        wait_until(lambda: watch.lowest == DiskSpace(4))


def test_classification_of_full_disk_needs_recent_output() -> None:
    lines = ("No space left on device", *["compiling"] * 20)
    found = classify_failure(1, (*lines, 'Error: building at STEP "RUN make": exit status 1'))
    assert found.reason is BuildReason.INSTRUCTION_FAILED
