"""The crash record: crashes and clean stops, and its document in other versions."""

import json
from dataclasses import replace

from tests.update.build import B, update
from treenail.update.state.boot_trial import BootTrial, HealthCheckMode
from treenail.update.state.crash_record import (
    BOOTS_ALLOWED,
    CRASHES_TO_ROLL_BACK,
    CrashRecord,
    derive_crash_record,
    from_json,
    to_json,
)

RECORD = CrashRecord("id", B, "boot-1", "os-1")


def test_start_without_a_clean_stop_before_counts_as_crash() -> None:
    record = RECORD
    for start in range(CRASHES_TO_ROLL_BACK):
        record = record.count_start("boot-2")
        assert (record.boot_count, record.crash_count) == (1, start)
        assert not record.failure
    assert "crashed 5 times in one boot" in record.count_start("boot-2").failure


def test_clean_stops_never_count_as_crashes() -> None:
    record = RECORD
    for _ in range(50):
        record = replace(record.count_start("boot-2"), is_running=False)
    assert (record.crash_count, record.failure) == (0, "")


def test_boots_without_verdict_are_limited() -> None:
    record = RECORD
    for boot in range(BOOTS_ALLOWED):
        record = record.count_start(f"boot-{boot + 2}")
        assert not record.failure
    assert "booted 4 times" in record.count_start("boot-last").failure


def test_record_of_an_older_agent_is_derived_from_its_update() -> None:
    trial = BootTrial(boot_id="boot-2", boot_count=2, rollback_reboots=1, agent_starts=4)
    record = derive_crash_record(update(boot_trial=trial))
    assert (record.update_id, record.target, record.has_os_change) == ("0" * 32, B, True)
    assert (record.boot_count, record.crash_count, record.origin_id) == (2, 0, "")


def test_document_of_another_version_is_read() -> None:
    assert from_json(json.loads(json.dumps(to_json(RECORD)))) == RECORD
    newer = {**to_json(RECORD), "added": 1, "healthMode": "pray"}
    assert from_json(newer) == RECORD
    assert from_json({"updateID": "id", "target": {}}) is not None
    assert from_json({"target": {}}) is None
    assert from_json(None) is None
    assert RECORD.mode is HealthCheckMode.ENFORCE
