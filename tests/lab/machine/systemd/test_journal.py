"""journald's stand-in, sent to by its own protocol."""

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.machine.client import wait_until
from treenail_lab.images import make_image
from treenail_lab.machine import rootfs
from treenail_lab.machine.systemd.journal import (
    JOURNAL_SOCKET,
    EmulatedJournal,
    JournalEntry,
    parse_datagram,
)

TRUSTED = ("__REALTIME_TIMESTAMP", "_BOOT_ID", "_PID", "_UID")


@pytest.fixture
def root(directory: Path) -> Path:
    rootfs.install_root(directory, make_image("os/node", "41.1", 1000))
    rootfs.boot_root(directory)
    return directory


@pytest.fixture
def journal(root: Path) -> Iterator[EmulatedJournal]:
    running = EmulatedJournal(root)
    running.start()
    yield running
    running.stop()


def send(root: Path, message: bytes, *fds: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.connect(str(root / JOURNAL_SOCKET))
        if fds:
            socket.send_fds(out, [message], list(fds))
        else:
            out.send(message)


def sent(entry: JournalEntry) -> JournalEntry:
    return {key: value for key, value in entry.items() if key not in TRUSTED}


@pytest.mark.process
def test_lines_are_fields(root: Path, journal: EmulatedJournal) -> None:
    send(root, b"MESSAGE=staged\nPRIORITY=6\nTREENAIL_PHASE=stage\n")
    wait_until(journal.read_entries)
    (entry,) = journal.read_entries()
    assert sent(entry) == {"MESSAGE": "staged", "PRIORITY": "6", "TREENAIL_PHASE": "stage"}


@pytest.mark.process
def test_entry_has_time_boot_id_and_sender(root: Path, journal: EmulatedJournal) -> None:
    send(root, b"MESSAGE=hello\n")
    wait_until(journal.read_entries)
    (entry,) = journal.read_entries()
    assert entry["_BOOT_ID"] == rootfs.read_boot_id(root).replace("-", "")
    assert (entry["_PID"], entry["_UID"]) == (str(os.getpid()), str(os.getuid()))
    assert str(entry["__REALTIME_TIMESTAMP"]).isdecimal()


def test_value_of_several_lines_comes_with_its_length() -> None:
    value = b"one\ntwo"
    message = b"MESSAGE\n" + struct.pack("<Q", len(value)) + value + b"\nPRIORITY=3\n"
    assert parse_datagram(message) == {"MESSAGE": "one\ntwo", "PRIORITY": "3"}


def test_field_sent_twice_is_a_list() -> None:
    assert parse_datagram(b"A=1\nA=2\nA=3\n") == {"A": ["1", "2", "3"]}


def test_field_with_invalid_name_is_skipped() -> None:
    assert parse_datagram(b"_BOOT_ID=x\nlower=x\n1A=x\nMESSAGE=ok\n") == {"MESSAGE": "ok"}


def test_truncated_value_is_skipped() -> None:
    assert parse_datagram(b"MESSAGE=ok\nLONG\n" + struct.pack("<Q", 100) + b"short") == {
        "MESSAGE": "ok"
    }


@pytest.mark.process
def test_large_entry_is_read_from_file(root: Path, journal: EmulatedJournal) -> None:
    text = b"x" * 500_000
    file = os.memfd_create("entry")
    os.write(file, b"MESSAGE=" + text + b"\n")
    send(root, b"", file)
    os.close(file)
    wait_until(journal.read_entries)
    (entry,) = journal.read_entries()
    assert sent(entry) == {"MESSAGE": text.decode()}


@pytest.mark.process
def test_entries_are_found_by_their_fields(root: Path, journal: EmulatedJournal) -> None:
    send(root, b"MESSAGE=a\nUNIT=x.service\n")
    send(root, b"MESSAGE=b\nUNIT=y.service\nUNIT=x.service\n")
    send(root, b"MESSAGE=c\n")
    wait_until(lambda: len(journal.read_entries()) == 3)
    found = journal.read_entries({"UNIT": "x.service"})
    assert [entry["MESSAGE"] for entry in found] == ["a", "b"]
    assert [e["MESSAGE"] for e in journal.read_entries({"UNIT": "x.service", "MESSAGE": "b"})] == [
        "b"
    ]


@pytest.mark.process
def test_entries_survive_reboot(root: Path) -> None:
    boots = []
    journal = EmulatedJournal(root)
    for number in range(2):
        rootfs.boot_root(root)
        boots.append(rootfs.read_boot_id(root).replace("-", ""))
        journal.start()
        send(root, b"MESSAGE=%d\n" % number)
        journal.stop()
    assert [(e["MESSAGE"], e["_BOOT_ID"]) for e in journal.read_entries()] == [
        ("0", boots[0]),
        ("1", boots[1]),
    ]


@pytest.mark.process
def test_stopped_journal_has_no_socket(root: Path) -> None:
    journal = EmulatedJournal(root)
    journal.start()
    journal.stop()
    assert not (root / JOURNAL_SOCKET).exists()
