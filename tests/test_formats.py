"""The formats of the state files: what this version writes, and what earlier ones wrote.

``tests/data/state`` has one directory for each format, numbered. Never change one: a format that
differs from the newest set needs the next number, and both sets must be readable.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from tests.daemon.machines import (
    BASE,
    ROOT,
    TOP,
    Ends,
    Systemd,
    file,
    machine,
    planned,
    restart,
    runner,
    settled,
    wanted,
)
from tests.fakes.disk import MemoryDisk
from tests.update.build import B
from tests.update.state.test_record import COMPLETE, is_part_of
from treenail.config.wanted_state import WantedDirectory, WantedUnit
from treenail.daemon.configuration.node_configuration import apply_steps
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.rollback.undo_log import PENDING_PATH
from treenail.update.decision import user_requests as requests
from treenail.update.decision.user_requests import RequestKind, UserRequest
from treenail.update.state import crash_record as crash_records
from treenail.update.state import ledger_record as records
from treenail.update.state.boot_trial import HealthCheckMode
from treenail.update.state.crash_record import CrashRecord
from treenail.update.state.ledger_record import FailedTry
from treenail.update.steps import inventory
from treenail.update.steps.inventory import Ownership

Json = dict[str, object]

SETS = sorted((Path(__file__).parent / "data/state").iterdir(), key=lambda folder: int(folder.name))
NEWEST = SETS[-1]

assert COMPLETE.update is not None
assert COMPLETE.update.impact is not None
assert COMPLETE.quarantined is not None
assert COMPLETE.retained is not None
TRIES = (FailedTry(1763773300.5, "no space left on device"),)
LEDGER = replace(
    COMPLETE,
    update=replace(
        COMPLETE.update,
        impact=replace(
            COMPLETE.update.impact,
            os=replace(COMPLETE.update.impact.os, keep_kargs=("console=tty0",)),
            checked_id="os-1",
            writes_image_files=True,
            machine_arguments={"console=tty0": 1, "console=ttyS0": 0},
        ),
        boot_trial=replace(
            COMPLETE.update.boot_trial,
            mode=HealthCheckMode.REPORT,
            failed_before=("Units",),
            passed_before=("Kubelet", "NodeReady"),
            paused_s=12.5,
        ),
        failed_tries=TRIES,
        entered_monotonic=310.25,
        applied_boot_id="boot-1",
    ),
    quarantined=replace(
        COMPLETE.quarantined,
        is_withdrawn=True,
        is_only_check=True,
        fails_on_origin=True,
        retry_at=1763774000.0,
    ),
    history=(replace(COMPLETE.history[0], failed_tries=TRIES), *COMPLETE.history[1:]),
    retained=replace(COMPLETE.retained, boot_id="boot-1", healthy_monotonic=95.5),
    retry="again",
    is_reported=True,
    machine_arguments={"quiet": 0},
)
CRASHES = CrashRecord(
    "0123", B, "boot-1", "os-1", has_os_change=False, mode=HealthCheckMode.REPORT,
    boot_id="boot-2", boot_count=2, crash_count=3, is_running=True, rollback_reboots=1,
)  # fmt: skip
OWNED = Ownership(
    "rendered-worker-a",
    frozenset({"/etc/motd"}),
    {"a.service": True, "b.service": False, "c.service": None},
    frozenset({"core"}),
)
REQUEST = UserRequest(RequestKind.REPAIR, "0123", ("/etc/motd", "a.service"))

DOCUMENTS: dict[str, tuple[object, Callable[..., Json], Callable[..., object]]] = {
    "ledger.json": (LEDGER, records.to_json, records.from_json),
    "crash-record.json": (CRASHES, crash_records.to_json, crash_records.from_json),
    "managed.json": (OWNED, inventory.to_json, inventory.from_json),
    "request.json": (REQUEST, requests.to_json, requests.from_json),
}
"""The complete value of each document, and its encoder and decoder."""

CHANGED = wanted(
    files=(file("/etc/motd", "new"), file("/etc/new/a", "a")),
    directories=(WantedDirectory("/etc/d", 0o700),),
    units=(WantedUnit("a.service", "[Install]\nWantedBy=multi-user.target\n", enabled=True),),
    keys=("ssh-ed25519 A",),
    password_hash="$6$x",
)
BACKUP = "/var/lib/treenail/original/etc/motd.original"
NEXT = "add the next set to tests/data/state"
BASE_AT_REST = settled(machine(BASE).tree())


def make_change() -> MemoryDisk:
    """A machine in memory with a pending change."""
    disk = machine(BASE)
    apply_steps(planned(disk, CHANGED, "new").steps, runner(disk, Systemd(disk)), owner="owner")
    return disk


def describe_shape(value: object) -> object:
    """Return the value with types in place of numbers, which differ from machine to machine."""
    if isinstance(value, dict):
        return {name: describe_shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [describe_shape(each) for each in value]
    return value if isinstance(value, str) else type(value).__name__


def read_shapes(content: bytes) -> list[object]:
    """Return the shape of each line of an undo log."""
    return [describe_shape(json.loads(line.partition(b" ")[2])) for line in content.splitlines()]


def find_missing_values(value: object, place: str = "") -> Iterator[str]:
    """Yield the fields whose value is empty, so that their format is not seen."""
    if is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from find_missing_values(getattr(value, each.name), f"{place}.{each.name}")
    elif value in (None, "", (), frozenset(), False):
        yield place


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_field_of_a_complete_document_has_a_value(name: str) -> None:
    # A crash record that is complete restores files alone.
    assert set(find_missing_values(DOCUMENTS[name][0])) <= {".has_os_change"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document_is_written_in_the_newest_recorded_format(name: str) -> None:
    value, encode, _ = DOCUMENTS[name]
    written = json.loads(json.dumps(encode(value)))
    assert written == json.loads((NEWEST / name).read_text()), (
        "add the next set to tests/data/state"
    )


@pytest.mark.parametrize("folder", SETS, ids=lambda each: each.name)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_document_of_every_format_is_read_and_written_again(folder: Path, name: str) -> None:
    _, encode, decode = DOCUMENTS[name]
    golden = json.loads((folder / name).read_text())
    assert is_part_of(golden, json.loads(json.dumps(encode(decode(golden)))))


def test_undo_log_is_written_in_the_newest_recorded_format() -> None:
    written = make_change().tree()[TOP + PENDING_PATH].content
    assert read_shapes(written) == read_shapes((NEWEST / "undo-pending").read_bytes()), NEXT


def test_backup_is_written_in_the_newest_recorded_format() -> None:
    assert make_change().tree()[TOP + BACKUP].content == (NEWEST / "original-motd").read_bytes(), (
        NEXT
    )


@pytest.mark.parametrize("folder", SETS, ids=lambda each: each.name)
def test_undo_log_of_every_format_restores_the_machine(folder: Path) -> None:
    disk = make_change()
    HostFiles(ROOT, disk).write_file(PENDING_PATH, (folder / "undo-pending").read_bytes())
    restart(disk, has_systemd=True, ends=Ends.UNDONE)
    assert settled(disk.tree()) == BASE_AT_REST


@pytest.mark.parametrize("folder", SETS, ids=lambda each: each.name)
def test_backup_of_every_format_is_restored_once_the_config_drops_its_path(folder: Path) -> None:
    disk = make_change()
    restart(disk, has_systemd=True)
    HostFiles(ROOT, disk).write_file(BACKUP, (folder / "original-motd").read_bytes())
    apply_steps(planned(disk, wanted(), "last").steps, runner(disk, Systemd(disk)))
    assert disk.tree()[f"{TOP}/etc/motd"] == BASE[f"{TOP}/etc/motd"]
