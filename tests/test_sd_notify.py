import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from treenail.sd_notify import SystemdNotifier


@pytest.fixture
def systemd() -> Iterator[socket.socket]:
    directory = Path(tempfile.mkdtemp(prefix="tn", dir="/tmp"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(directory / "notify"))
        receiver.settimeout(5)
        yield receiver
    shutil.rmtree(directory)


def test_notifications_follow_the_protocol(systemd):
    notifier = SystemdNotifier({"NOTIFY_SOCKET": systemd.getsockname()})
    notifier.notify_ready()
    notifier.notify_status("staging\nregistry.example.com/os:  40 %")
    notifier.notify_watchdog()
    notifier.notify_stopping()
    notifier.extend_start_timeout(0.5)
    assert [systemd.recv(4096) for _ in range(5)] == [
        b"READY=1",
        b"STATUS=staging registry.example.com/os: 40 %",
        b"WATCHDOG=1",
        b"STOPPING=1",
        b"EXTEND_TIMEOUT_USEC=500000",
    ]


def test_status_is_one_line_of_bounded_length(systemd):
    SystemdNotifier({"NOTIFY_SOCKET": systemd.getsockname()}).notify_status("x\nREADY=1 " * 1000)
    status = systemd.recv(65536)
    assert (len(status), b"\n" in status) == (len("STATUS=") + 500, False)


def test_abstract_address_is_supported():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("")  # the kernel picks an abstract name
        receiver.settimeout(5)
        SystemdNotifier({"NOTIFY_SOCKET": "@" + receiver.getsockname()[1:].decode()}).notify_ready()
        assert receiver.recv(4096) == b"READY=1"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NOTIFY_SOCKET": ""},
        {"NOTIFY_SOCKET": "/no/such/socket"},
        {"NOTIFY_SOCKET": "/" + "x" * 200},
        {"NOTIFY_SOCKET": "/tmp"},
        {"NOTIFY_SOCKET": "vsock:2:1"},
    ],
)
def test_notifier_without_listener_does_nothing(environ):
    notifier = SystemdNotifier(environ)
    notifier.notify_ready()
    notifier.notify_status("\udcff")
    assert notifier.watchdog_interval_s is None


def test_notifier_does_not_wait_for_a_listener(systemd):
    notifier = SystemdNotifier({"NOTIFY_SOCKET": systemd.getsockname()})
    queue = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
    for _ in range(queue + 3):
        notifier.notify_watchdog()


@pytest.mark.parametrize(
    ("environ", "interval_s"),
    [
        ({"WATCHDOG_USEC": "180000000"}, 90.0),
        ({"WATCHDOG_USEC": "180000000", "WATCHDOG_PID": str(os.getpid())}, 90.0),
        ({"WATCHDOG_USEC": "180000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_watchdog_interval_is_half_of_its_time(environ, interval_s):
    assert SystemdNotifier(environ).watchdog_interval_s == interval_s
