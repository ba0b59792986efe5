"""The ledger: its document, read by this version and by others, and the history of updates."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.update.build import BOOT_1, BOOT_2, A, B, C, update
from treenail.deployment_change import DeploymentChange
from treenail.errors import LedgerError
from treenail.update.impact.impact import DisruptionLevel, UpdateImpact
from treenail.update.state.boot_trial import BootTrial
from treenail.update.state.ledger_record import (
    HISTORY_LIMIT,
    LedgerRecord,
    Moment,
    PastUpdate,
    Phase,
    PrestagedTarget,
    QuarantinedTarget,
    RetainedDeployment,
    Target,
    UpdateOutcome,
    UpdateRecord,
    from_json,
    to_json,
)

Json = dict[str, object]
Path_ = tuple[str | int, ...]

DAY_S = 86_400.0
JUMP_S = 1_790_000_000.0
"""From the wall clock of a machine without a clock battery to the right time."""

# A complete ledger of each released version. Never change one: add the next one.
GOLDEN = sorted((Path(__file__).parents[2] / "data").glob("ledger-*.json"))

COMPLETE = LedgerRecord(
    current=A,
    update=UpdateRecord(
        id="0123456789abcdef0123456789abcdef",
        target=B,
        origin=A,
        phase=Phase.VERIFYING,
        boot_id=f"{BOOT_2}+1",
        began=1763773200.25,
        entered=1763773500.5,
        impact=UpdateImpact(
            os=DeploymentChange(
                image=B.image,
                append_kargs=("console=tty0", "console=ttyS0"),
                delete_kargs=("quiet",),
                install_packages=("kernel-rt-core",),
                uninstall_packages=("usbguard",),
                override_remove=("kernel-core",),
                override_reset=("kernel-modules",),
                extensions_image=C.image,
            ),
            needs_write=True,
            level=DisruptionLevel.REBOOT,
            reasons=("file /etc/motd changed (no policy for this path)", "and 3 more"),
        ),
        staged_id="default-0123.1",
        drain_token="drain-rendered-worker-b.again-1",
        reboot_count=2,
        phase_seconds={Phase.STAGING: 190.5, Phase.DRAINING: 42.0, Phase.ROLLING_BACK: 3.0},
        boot_trial=BootTrial(
            has_api_before_reboot=True,
            has_api_since_reboot=True,
            boot_id=f"{BOOT_2}+1",
            began_monotonic=17.5,
            boot_count=2,
            agent_starts=3,
            rollback_reboots=1,
            is_healthy=True,
        ),
        is_soft_reboot=True,
    ),
    quarantined=QuarantinedTarget(
        C, "it is not healthy", "fix the image", is_cancelled_by_user=True, check="Kubelet"
    ),
    history=(
        PastUpdate(
            id="fedcba9876543210fedcba9876543210",
            target=C,
            origin=A,
            began=1763770000.0,
            ended=1763771000.0,
            outcome=UpdateOutcome.FAILED,
            reboot_count=3,
            reasons=("osImageURL changed (part of the operating system)",),
            failure="it is not healthy",
            phase_seconds={Phase.STAGING: 100.0, Phase.CANCELLING: 2.0},
            is_soft_reboot=True,
        ),
        PastUpdate("1" * 32, A, Target("rendered-worker-0"), 1.0, 2.0, UpdateOutcome.DONE),
    ),
    booted_digest=A.digest,
    prestaged=PrestagedTarget(B, BOOT_2, "default-0123.1", is_done=True),
    api_blamed=B,
    retained=RetainedDeployment("default-4567.0", 1763700000.0),
)

REQUIRED = {
    "current", "update", "quarantined",
    "update.id", "update.target", "update.origin", "update.phase", "update.bootID",
    "update.began", "update.entered",
    "update.impact.os", "update.impact.needsWrite", "update.impact.level",
    "quarantined.target", "quarantined.reason",
    "history.id", "history.target", "history.origin", "history.began", "history.ended",
    "history.outcome",
    "prestaged.target", "prestaged.bootID",
    "retained.id",
}  # fmt: skip


def make_moment(wall: float) -> Moment:
    return Moment(wall, BOOT_1, wall)


def read_golden(path: Path) -> Json:
    return json.loads(path.read_bytes())


def list_paths(value: object, path: Path_ = ()) -> Iterator[Path_]:
    """Every key of a document, with the keys and indexes that lead to it."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield (*path, name)
            if name != "phaseSeconds":
                yield from list_paths(each, (*path, name))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from list_paths(each, (*path, index))


def find_parent(document: Json, path: Path_) -> Json:
    found: object = document
    for each in path[:-1]:
        found = found[each]  # type: ignore[index]
    assert isinstance(found, dict)
    return found


def format_path(path: Path_) -> str:
    return ".".join(each for each in path if isinstance(each, str))


def is_part_of(part: object, whole: object) -> bool:
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(name in whole and is_part_of(part[name], whole[name]) for name in part)
    return part == whole


def test_golden_ledgers_exist() -> None:
    assert GOLDEN


@pytest.mark.parametrize("path", GOLDEN, ids=lambda each: each.stem)
def test_golden_ledger_of_released_version_is_read(path: Path) -> None:
    assert from_json(read_golden(path)) == COMPLETE


@pytest.mark.parametrize("path", GOLDEN, ids=lambda each: each.stem)
def test_written_ledger_contains_what_released_version_reads(path: Path) -> None:
    golden = read_golden(path)
    del golden["version"]
    written = json.loads(json.dumps(to_json(COMPLETE)))
    assert is_part_of({**golden, "history": []}, {**written, "history": []})
    for part, whole in zip(golden["history"], written["history"], strict=True):  # type: ignore[call-overload]
        assert is_part_of(part, whole)


def test_complete_ledger_without_any_one_key_is_read_unless_the_key_is_required() -> None:
    document = json.loads(json.dumps(to_json(COMPLETE)))
    paths = list(list_paths(document))
    assert {format_path(path) for path in paths} >= REQUIRED
    for path in paths:
        changed = copy.deepcopy(document)
        del find_parent(changed, path)[str(path[-1])]
        if format_path(path) in REQUIRED:
            with pytest.raises(LedgerError, match=f"{path[-1]}: the key is missing"):
                from_json(changed)
        else:
            from_json(changed)


def test_ledger_with_unknown_keys_is_read_without_them() -> None:
    document = json.loads(json.dumps(to_json(COMPLETE)))
    places = {path[:-1] for path in list_paths(document)}
    for path in sorted(places, key=str):
        find_parent(document, (*path, ""))["addedLater"] = {"x": [1]}
    assert from_json(document) == COMPLETE


def test_ledger_with_unknown_phase_in_history_is_read_without_it() -> None:
    document = json.loads(json.dumps(to_json(COMPLETE)))
    document["history"][0]["phaseSeconds"]["defrosting"] = 1.0
    document["update"]["phaseSeconds"]["defrosting"] = 1.0
    assert from_json(document) == COMPLETE


def test_ledger_with_unknown_outcome_in_history_is_read_without_that_update() -> None:
    document = json.loads(json.dumps(to_json(COMPLETE)))
    document["history"][0]["outcome"] = "postponed"
    assert from_json(document) == replace(COMPLETE, history=COMPLETE.history[1:])


def test_ledger_with_unknown_phase_of_the_update_is_read_as_cancelling() -> None:
    document = json.loads(json.dumps(to_json(COMPLETE)))
    document["update"]["phase"] = "defrosting"
    found = from_json(document).update
    assert found.phase is Phase.CANCELLING


def test_ledger_with_unknown_level_is_read_as_the_gravest() -> None:
    document = json.loads(json.dumps(to_json(COMPLETE)))
    document["update"]["impact"]["level"] = "POWER_CYCLE"
    found = from_json(document).update
    assert found.impact.needs_reboot


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("current",), "nonsense"),
        (("update",), "nonsense"),
        (("quarantined",), "nonsense"),
        (("history",), {}),
        (("retained", "healthySince"), "yesterday"),
        (("update", "bootTrial", "bootCount"), "2"),
        (("update", "impact", "os", "append"), ["a", 1]),
        (("update", "phase"), None),
    ],
)
def test_ledger_with_a_wrong_type_is_refused_with_the_key(path: Path_, value: object) -> None:
    document = json.loads(json.dumps(to_json(COMPLETE)))
    find_parent(document, path)[str(path[-1])] = value
    with pytest.raises(LedgerError) as caught:
        from_json(document)
    assert str(caught.value).startswith(f"cannot read the ledger: {format_path(path)}")


@pytest.mark.parametrize(
    "record",
    [
        LedgerRecord(),
        LedgerRecord(current=A),
        LedgerRecord(A, update(Phase.DRAINING)),
        LedgerRecord(A, update(impact=None)),
        LedgerRecord(retained=RetainedDeployment("os-1")),
        COMPLETE,
    ],
)
def test_record_survives_writing_and_reading(record: LedgerRecord) -> None:
    assert from_json(json.loads(json.dumps(to_json(record)))) == record


def test_no_document_is_an_empty_record() -> None:
    assert from_json(None) == LedgerRecord()


def test_update_that_ended_is_moved_to_the_history() -> None:
    begun = update(Phase.CANCELLING, began=5.0, entered=6.0, reboot_count=1)
    record = LedgerRecord(A, begun, QuarantinedTarget(B, "it broke"))
    past = PastUpdate(
        id="0" * 32,
        target=B,
        origin=A,
        began=5.0,
        ended=9.0,
        outcome=UpdateOutcome.FAILED,
        reboot_count=1,
        failure="it broke",
        phase_seconds={Phase.CANCELLING: 3.0},
    )
    closed = record.close_update(UpdateOutcome.FAILED, make_moment(9.0))
    assert closed == replace(record, update=None, history=(past,))


def test_history_keeps_the_newest_updates_up_to_its_limit() -> None:
    record = LedgerRecord(current=A)
    for number in range(HISTORY_LIMIT + 3):
        begun = replace(record, update=update(id=str(number), target=C))
        record = begun.close_update(UpdateOutcome.DONE, make_moment(float(number)))
    assert [past.id for past in record.history] == [
        str(number) for number in range(HISTORY_LIMIT + 2, 2, -1)
    ]


def test_phase_entered_twice_adds_up_its_seconds() -> None:
    begun = update(Phase.STAGING, began=0.0, entered=0.0)
    drained = begun.enter_phase(Phase.DRAINING, make_moment(10.0))
    again = drained.enter_phase(Phase.STAGING, make_moment(15.0))
    late = again.enter_phase(Phase.DRAINING, Moment(12.0, BOOT_2, 3.0))
    assert late.phase_seconds == {Phase.STAGING: 10.0, Phase.DRAINING: 5.0}
    at_end = late.compute_phase_seconds(Moment(20.0, BOOT_2, 11.0))
    assert at_end == {Phase.STAGING: 10.0, Phase.DRAINING: 13.0}


def test_wall_clock_that_jumps_changes_no_phase_seconds() -> None:
    staging = update(entered=0.0, entered_monotonic=50.0)
    drained = staging.enter_phase(Phase.DRAINING, Moment(JUMP_S, BOOT_1, 60.0))
    assert drained.phase_seconds == {Phase.STAGING: 10.0}
    assert drained.compute_phase_seconds(Moment(0.0, BOOT_1, 65.0))[Phase.DRAINING] == 5.0


def test_phase_across_a_reboot_lasts_by_the_wall_clock() -> None:
    rebooting = update(Phase.REBOOTING, entered=100.0, entered_monotonic=900.0)
    booted = rebooting.enter_phase(Phase.VERIFYING, Moment(160.0, BOOT_2, 20.0))
    assert booted.phase_seconds == {Phase.REBOOTING: 60.0}


@pytest.mark.parametrize("jump_s", [JUMP_S, -JUMP_S, 3600.0, -3600.0])
def test_retention_is_no_shorter_or_longer_when_the_wall_clock_jumps(jump_s: float) -> None:
    retained = RetainedDeployment("os-1").end_trial(Moment(0.0, BOOT_1, 30.0), is_healthy=True)
    for passed_s in (0.0, DAY_S - 1.0, DAY_S):
        now = Moment(jump_s + passed_s, BOOT_1, 30.0 + passed_s)
        assert retained.is_expired(now, retention_s=DAY_S) is (passed_s == DAY_S)


def test_retention_counts_time_before_a_reboot() -> None:
    retained = RetainedDeployment("os-1").end_trial(Moment(0.0, BOOT_1, 30.0), is_healthy=True)
    assert not retained.is_expired(Moment(DAY_S - 1.0, BOOT_2, 20.0), retention_s=DAY_S)
    assert retained.is_expired(Moment(DAY_S, BOOT_2, 20.0), retention_s=DAY_S)


def test_retention_ends_after_a_long_boot_with_a_wrong_clock() -> None:
    retained = RetainedDeployment("os-1").end_trial(Moment(JUMP_S, BOOT_1, 30.0), is_healthy=True)
    assert not retained.is_expired(Moment(0.0, BOOT_2, DAY_S - 1.0), retention_s=DAY_S)
    assert retained.is_expired(Moment(0.0, BOOT_2, DAY_S), retention_s=DAY_S)


def test_wait_and_retention_go_on_across_a_soft_reboot() -> None:
    up_s = 30 * DAY_S
    after = Moment(up_s + 60.0, f"{BOOT_1}+1", up_s + 60.0)
    draining = update(Phase.DRAINING, boot_id=BOOT_1, entered=up_s, entered_monotonic=up_s)
    assert draining.compute_wait(after) == 60.0
    assert draining.compute_phase_seconds(after) == {Phase.DRAINING: 60.0}
    retained = RetainedDeployment("os-1").end_trial(Moment(up_s, BOOT_1, up_s), is_healthy=True)
    assert not retained.is_expired(after, retention_s=DAY_S)
    later = Moment(0.0, f"{BOOT_1}+1", up_s + DAY_S)
    assert retained.is_expired(later, retention_s=DAY_S)


def test_retention_of_an_older_agent_counts_by_the_wall_clock() -> None:
    retained = RetainedDeployment("os-1", healthy_since=0.0 + 1.0)
    assert not retained.is_expired(Moment(DAY_S, BOOT_1, 9 * DAY_S), retention_s=DAY_S)
    assert retained.is_expired(Moment(DAY_S + 1.0, BOOT_1, 9 * DAY_S), retention_s=DAY_S)


def test_failed_tries_reach_history_without_repetitions() -> None:
    tried = update()
    for at, error in enumerate(["no space", "no space", "registry", "no space", "a", "b", "c"]):
        tried = tried.add_failed_try(error, now=float(at))
    assert [(each.at, each.error) for each in tried.failed_tries] == [
        (2.0, "registry"), (3.0, "no space"), (4.0, "a"), (5.0, "b"), (6.0, "c"),
    ]  # fmt: skip
    done = LedgerRecord(current=A, update=tried).close_update(UpdateOutcome.DONE, make_moment(9.0))
    assert done.history[0].failed_tries == tried.failed_tries
    assert from_json(json.loads(json.dumps(to_json(done)))) == done
