"""A stand-in for logind: shutdown and what holds it up.

A block lock does not stop root up to systemd 256 unless root asks for it by a flag; from 257 on it
does. A delay lock holds a shutdown up for as long as logind lets it.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from gi.repository import Gio, GLib

from treenail_lab.machine.bus.objects import (
    ACCESS_DENIED,
    INVALID_ARGS,
    Call,
    ExportedObject,
    Refusal,
    Values,
    credential,
    interfaces,
)
from treenail_lab.machine.logind.inhibitors import WHAT, Inhibitor, Inhibitors
from treenail_lab.machine.settings import Settings

NAME = "org.freedesktop.login1"
PATH = "/org/freedesktop/login1"
IN_PROGRESS = f"{NAME}.OperationInProgress"
BLOCKED = f"{NAME}.BlockedByInhibitorLock"

ROOT_CHECK_INHIBITORS = 1
SOFT_REBOOT = 4
SKIP_INHIBITORS = 16
_FLAGS_SINCE = {1: 0, 2: 0, 4: 254, 8: 255, 16: 257}
_TYPES = ("poweroff", "reboot", "halt")
_DRY = tuple(f"dry-{kind}" for kind in _TYPES)


class Login1:
    """The manager object; it calls ``reboot`` or ``soft_reboot`` when the time has come."""

    def __init__(
        self,
        connection: Any,
        settings: Callable[[], Settings],
        reboot: Callable[[], None],
        soft_reboot: Callable[[], None],
    ) -> None:
        self._soft_reboot = soft_reboot
        self._soft = False
        self._connection = connection
        self._settings = settings
        self._reboot = reboot
        self._inhibitors = Inhibitors(self._show_inhibitors)
        self._going_down = False
        self._delayed = 0
        self._scheduled = 0
        self._face = ExportedObject(
            connection,
            PATH,
            interfaces("login1.xml")[f"{NAME}.Manager"],
            {
                "Reboot": self._reboot_asked,
                "RebootWithFlags": self._reboot_with_flags,
                "CanReboot": lambda _call: ("yes",),
                "ScheduleShutdown": self._schedule,
                "CancelScheduledShutdown": self._cancel_scheduled,
                "SetWallMessage": lambda _call: (),
                "Inhibit": self._inhibit,
                "ListInhibitors": self._list_inhibitors,
            },
        )
        self._face.set_properties(
            PreparingForShutdown=False,
            ScheduledShutdown=("", 0),
            InhibitDelayMaxUSec=round(settings().inhibit_delay_max_s * 1e6),
        )
        self._show_inhibitors()

    def _reboot_asked(self, _call: Call) -> Values:
        return self._go_down(0)

    def _reboot_with_flags(self, call: Call) -> Values:
        flags = int(call.values[0])
        version = self._settings().systemd_version
        known = sum(flag for flag, since in _FLAGS_SINCE.items() if version >= since)
        if flags & ~known:
            raise Refusal(INVALID_ARGS, "Invalid flags parameter")
        return self._go_down(flags)

    def _go_down(self, flags: int) -> Values:
        if self._going_down:
            raise Refusal(IN_PROGRESS, "There's already a shutdown or sleep operation in progress")
        self._refuse_if_blocked(flags)
        self._going_down, self._soft = True, bool(flags & SOFT_REBOOT)
        self._face.set_properties(PreparingForShutdown=True)
        self._face.signal("PrepareForShutdown", "(b)", True)  # noqa: FBT003  the signal's body
        limit_ms = round(self._settings().inhibit_delay_max_s * 1000)
        if self._inhibitors.held("shutdown", "delay"):
            self._delayed = GLib.timeout_add(limit_ms, self._delay_over)
        else:
            GLib.idle_add(self._off)
        return ()

    def _refuse_if_blocked(self, flags: int) -> None:
        version = self._settings().systemd_version
        blocking = self._inhibitors.held("shutdown", "block")
        blocked = bool(blocking)
        weak = bool(self._inhibitors.held("shutdown", "block-weak"))
        asked = bool(flags & ROOT_CHECK_INHIBITORS)
        if flags & SKIP_INHIBITORS:
            return
        # Up to 256, who asks passes by the locks of their own user, so root by all of root's.
        others = any(each.uid != os.getuid() for each in blocking)
        if asked and (weak or (blocked if version >= 257 else others)):
            raise Refusal(ACCESS_DENIED, "Access denied to root due to active block inhibitor")
        if blocked and version >= 257:
            name = BLOCKED if version >= 258 else ACCESS_DENIED
            raise Refusal(name, "Operation denied due to active block inhibitor")

    def _delay_over(self) -> bool:
        self._delayed = 0
        self._off()
        return False

    def _off(self) -> bool:
        (self._soft_reboot if self._soft else self._reboot)()
        return False

    def _schedule(self, call: Call) -> Values:
        kind, when_us = call.values
        if kind not in _TYPES + _DRY:
            raise Refusal(INVALID_ARGS, f"Unsupported shutdown type: {kind}")
        self._unschedule()
        delay_ms = max(0, round(when_us / 1000 - time.time() * 1000))
        self._scheduled = GLib.timeout_add(delay_ms, self._time_has_come, kind)
        self._face.set_properties(ScheduledShutdown=(kind, when_us))
        return ()

    def _time_has_come(self, kind: str) -> bool:
        self._scheduled = 0
        self._face.set_properties(ScheduledShutdown=("", 0))
        if kind in _TYPES and not self._going_down:
            self._go_down(0)
        return False

    def _cancel_scheduled(self, _call: Call) -> Values:
        return (self._unschedule(),)

    def _unschedule(self) -> bool:
        had, self._scheduled = self._scheduled, 0
        if had:
            GLib.source_remove(had)
            self._face.set_properties(ScheduledShutdown=("", 0))
        return bool(had)

    def _inhibit(self, call: Call) -> None:
        what, who, why, mode = call.values
        modes = {"block", "delay"}
        if self._settings().systemd_version >= 257:
            modes.add("block-weak")
        if not what or any(part not in WHAT for part in what.split(":")):
            raise Refusal(INVALID_ARGS, f"Invalid what specification {what}")
        if mode not in modes:
            raise Refusal(INVALID_ARGS, f"Invalid mode specification {mode}")
        if mode == "delay" and set(what.split(":")) - {"shutdown", "sleep"}:
            raise Refusal(INVALID_ARGS, "Delay inhibitors only supported for shutdown and sleep")
        if self._going_down and "shutdown" in what.split(":"):
            raise Refusal(
                IN_PROGRESS, "The operation inhibition has been requested for is already running"
            )
        uid = credential(self._connection, "GetConnectionUnixUser", call.sender)
        pid = credential(self._connection, "GetConnectionUnixProcessID", call.sender)
        lock = self._inhibitors.take(Inhibitor(what, who, why, mode, uid, pid))
        fds = Gio.UnixFDList.new()
        handle = fds.append(lock)
        os.close(lock)
        call.answer(handle, fds=fds)

    def _list_inhibitors(self, _call: Call) -> Values:
        return ([(i.what, i.who, i.why, i.mode, i.uid, i.pid) for i in self._inhibitors.all()],)

    def _show_inhibitors(self) -> None:
        self._face.set_properties(
            BlockInhibited=self._inhibitors.inhibited("block"),
            DelayInhibited=self._inhibitors.inhibited("delay"),
        )
        if self._delayed and not self._inhibitors.held("shutdown", "delay"):
            GLib.source_remove(self._delayed)
            self._delay_over()
