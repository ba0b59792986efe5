"""logind's stand-in: reboots, and the locks that hold them up."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from gi.repository import Gio, GLib

from tests.lab.machine.client import LIMIT_S, Client, refused, wait_until
from tests.lab.machine.conftest import Services
from treenail_lab.machine.bus.objects import ACCESS_DENIED, INVALID_ARGS
from treenail_lab.machine.settings import MachineSettings
from treenail_lab.machine.systemd.login1 import BLOCKED, IN_PROGRESS, NAME, PATH

pytestmark = pytest.mark.integration

MANAGER = f"{NAME}.Manager"


class Logind(Client):
    """A client of logind."""

    def do(self, method: str, signature: str = "()", *values: object) -> tuple[Any, ...]:
        return self.call((NAME, PATH, MANAGER, method), signature, *values)

    def shown(self) -> dict[str, Any]:
        return self.properties(NAME, PATH, MANAGER)

    def inhibit(self, mode: str, what: str = "shutdown") -> int:
        """The lock's descriptor."""
        _, fds = self.connection.call_with_unix_fd_list_sync(
            NAME,
            PATH,
            MANAGER,
            "Inhibit",
            GLib.Variant("(ssss)", (what, "test", "because", mode)),
            None,
            Gio.DBusCallFlags.NONE,
            round(LIMIT_S * 1000),
            None,
            None,
        )
        (lock,) = fds.steal_fds()
        return int(lock)

    @contextmanager
    def inhibited(self, mode: str) -> Iterator[None]:
        lock = self.inhibit(mode)
        yield
        os.close(lock)


@pytest.fixture
def logind(services: Services) -> Iterator[Logind]:
    with Logind(services.address) as client:
        yield client


def test_reboot_emits_signal_and_requests_reboot(services: Services, logind: Logind) -> None:
    heard = logind.listen(PATH, MANAGER)
    assert logind.do("CanReboot") == ("yes",)
    assert logind.do("Reboot", "(b)", False) == ()
    wait_until(lambda: services.requests == ["reboot"])
    wait_until(lambda: heard == [("PrepareForShutdown", (True,))])
    assert logind.shown()["PreparingForShutdown"]


def test_second_reboot_is_refused_as_in_progress(logind: Logind) -> None:
    logind.do("Reboot", "(b)", False)
    assert refused(logind, "Reboot", "(b)", False) == IN_PROGRESS


def test_delay_lock_delays_shutdown_until_released(services: Services, logind: Logind) -> None:
    services.change(MachineSettings(inhibit_delay_max_s=60))
    with logind.inhibited("delay"):
        logind.do("Reboot", "(b)", False)
        assert logind.shown()["DelayInhibited"] == "shutdown"
        assert services.requests == []
    wait_until(lambda: services.requests == ["reboot"])


def test_delay_lock_delays_shutdown_at_most_for_limit(services: Services, logind: Logind) -> None:
    with logind.inhibited("delay"):
        logind.do("Reboot", "(b)", False)
        wait_until(lambda: services.requests == ["reboot"])


def test_lock_is_listed_until_last_copy_is_closed(logind: Logind) -> None:
    lock = logind.inhibit("block")
    copy = os.dup(lock)
    held = ("shutdown", "test", "because", "block", os.getuid(), os.getpid())
    os.close(lock)
    assert logind.do("ListInhibitors") == ([held],)
    assert logind.shown()["BlockInhibited"] == "shutdown"
    os.close(copy)
    wait_until(lambda: logind.do("ListInhibitors") == ([],))
    assert logind.shown()["BlockInhibited"] == ""


@pytest.mark.parametrize(
    ("method", "signature", "value"), [("Reboot", "(b)", False), ("RebootWithFlags", "(t)", 1)]
)
def test_block_lock_of_same_user_before_systemd_257_does_not_block(
    logind: Logind, method: str, signature: str, value: object
) -> None:
    with logind.inhibited("block"):
        assert logind.do(method, signature, value) == ()


@pytest.mark.parametrize(("version", "name"), [(257, ACCESS_DENIED), (258, BLOCKED)])
def test_block_lock_from_systemd_257_blocks_root(
    services: Services, logind: Logind, version: int, name: str
) -> None:
    services.change(MachineSettings(systemd_version=version))
    with logind.inhibited("block"):
        assert refused(logind, "Reboot", "(b)", False) == name
        assert refused(logind, "RebootWithFlags", "(t)", 1) == ACCESS_DENIED
        assert logind.do("RebootWithFlags", "(t)", 16) == ()


@pytest.mark.parametrize(("version", "flag"), [(252, 4), (253, 4), (254, 8), (256, 16)])
def test_unknown_reboot_flag_is_invalid(
    services: Services, logind: Logind, version: int, flag: int
) -> None:
    services.change(MachineSettings(systemd_version=version))
    assert refused(logind, "RebootWithFlags", "(t)", flag) == INVALID_ARGS
    assert logind.do("RebootWithFlags", "(t)", 0) == ()


@pytest.mark.parametrize(
    ("what", "mode"),
    [("shutdown", "block-weak"), ("shutdown", "never"), ("coffee", "block"), ("idle", "delay")],
)
def test_invalid_lock_is_refused(logind: Logind, what: str, mode: str) -> None:
    assert refused(logind, "Inhibit", "(ssss)", what, "test", "because", mode) == INVALID_ARGS


def test_lock_after_begin_of_shutdown_is_refused(logind: Logind) -> None:
    logind.do("Reboot", "(b)", False)
    inhibit = ("Inhibit", "(ssss)", "shutdown", "test", "because", "delay")
    assert refused(logind, *inhibit) == IN_PROGRESS


def test_scheduled_reboot_happens_on_time(services: Services, logind: Logind) -> None:
    soon_us = round((time.time() + 0.1) * 1e6)
    logind.do("ScheduleShutdown", "(st)", "reboot", soon_us)
    assert logind.shown()["ScheduledShutdown"] == ("reboot", soon_us)
    wait_until(lambda: services.requests == ["reboot"])


def test_scheduled_reboot_can_be_cancelled(services: Services, logind: Logind) -> None:
    later_us = round((time.time() + 3600) * 1e6)
    logind.do("ScheduleShutdown", "(st)", "reboot", later_us)
    assert logind.do("CancelScheduledShutdown") == (True,)
    assert logind.do("CancelScheduledShutdown") == (False,)
    assert logind.shown()["ScheduledShutdown"] == ("", 0)
    assert refused(logind, "ScheduleShutdown", "(st)", "nap", later_us) == INVALID_ARGS
