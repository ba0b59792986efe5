"""An emulated logind: shutdown and the inhibitor locks that block or delay it.

Up to systemd 256 a block lock stops root only with the flag ROOT_CHECK_INHIBITORS; from 257 on it
always does. A delay lock delays a shutdown for at most InhibitDelayMaxSec=.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gi.repository import Gio, GLib

from treenail_lab.machine.bus.objects import (
    ACCESS_DENIED,
    INVALID_ARGS,
    ExportedObject,
    MethodCall,
    MethodError,
    ReplyValues,
    load_interfaces,
    query_credential,
)
from treenail_lab.machine.settings import MachineSettings

INHIBITABLE = ("shutdown", "sleep", "idle", "handle-power-key", "handle-suspend-key")


@dataclass(frozen=True, slots=True)
class LogindInhibitor:
    """One lock, with the fields in the order of ListInhibitors."""

    what: str
    who: str
    why: str
    mode: str
    uid: int
    pid: int

    def is_for(self, what: str, modes: tuple[str, ...]) -> bool:
        return what in self.what.split(":") and self.mode in modes


class InhibitorLocks:
    """The held locks; ``on_change`` is called after each change.

    Each is a file descriptor, and is released when its last copy is closed.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._locks: dict[int, LogindInhibitor] = {}

    def take_lock(self, inhibitor: LogindInhibitor) -> int:
        """Add a lock; return the descriptor to send to the caller and to close."""
        ours, theirs = os.pipe()
        self._locks[ours] = inhibitor
        condition = GLib.IOCondition.HUP | GLib.IOCondition.ERR
        GLib.unix_fd_add_full(GLib.PRIORITY_DEFAULT, ours, condition, self._release_lock)
        self._on_change()
        return theirs

    def list_locks(self) -> tuple[LogindInhibitor, ...]:
        return tuple(self._locks.values())

    def find_locks(self, what: str, *modes: str) -> tuple[LogindInhibitor, ...]:
        """Return the locks on ``what`` in one of the modes."""
        return tuple(lock for lock in self._locks.values() if lock.is_for(what, modes))

    def list_inhibited(self, mode: str) -> str:
        """Return the operations that are inhibited in that mode, joined by colons."""
        return ":".join(what for what in INHIBITABLE if self.find_locks(what, mode))

    def _release_lock(self, ours: int, _condition: object) -> bool:
        del self._locks[ours]
        os.close(ours)
        self._on_change()
        return False


NAME = "org.freedesktop.login1"
PATH = "/org/freedesktop/login1"
IN_PROGRESS = f"{NAME}.OperationInProgress"
BLOCKED = f"{NAME}.BlockedByInhibitorLock"

ROOT_CHECK_INHIBITORS = 1
SOFT_REBOOT = 4
SKIP_INHIBITORS = 16
_FLAGS_SINCE = {1: 0, 2: 0, 4: 254, 8: 255, 16: 257}
_TYPES = ("poweroff", "reboot", "halt")
_DRY_TYPES = tuple(f"dry-{kind}" for kind in _TYPES)


class EmulatedLogind:
    """The manager object; it calls ``reboot`` or ``soft_reboot`` when no lock delays it."""

    def __init__(
        self,
        connection: Any,
        settings: Callable[[], MachineSettings],
        reboot: Callable[[], None],
        soft_reboot: Callable[[], None],
    ) -> None:
        self._soft_reboot = soft_reboot
        self._is_soft_reboot = False
        self._connection = connection
        self._settings = settings
        self._reboot = reboot
        self._inhibitors = InhibitorLocks(self._publish_inhibitors)
        self._is_shutting_down = False
        self._delay_source = 0
        self._schedule_source = 0
        self._object = ExportedObject(
            connection,
            PATH,
            load_interfaces("login1.xml")[f"{NAME}.Manager"],
            {
                "Reboot": self._handle_reboot,
                "RebootWithFlags": self._handle_reboot_with_flags,
                "CanReboot": lambda _call: ("yes",),
                "ScheduleShutdown": self._handle_schedule,
                "CancelScheduledShutdown": self._handle_cancel_scheduled,
                "SetWallMessage": lambda _call: (),
                "Inhibit": self._handle_inhibit,
                "ListInhibitors": self._handle_list_inhibitors,
            },
        )
        self._object.set_properties(
            PreparingForShutdown=False,
            ScheduledShutdown=("", 0),
            InhibitDelayMaxUSec=round(settings().inhibit_delay_max_s * 1e6),
        )
        self._publish_inhibitors()

    def _handle_reboot(self, _call: MethodCall) -> ReplyValues:
        return self._begin_shutdown(0)

    def _handle_reboot_with_flags(self, call: MethodCall) -> ReplyValues:
        flags = int(call.arguments[0])
        version = self._settings().systemd_version
        known = sum(flag for flag, since in _FLAGS_SINCE.items() if version >= since)
        if flags & ~known:
            raise MethodError(INVALID_ARGS, "Invalid flags parameter")
        return self._begin_shutdown(flags)

    def _begin_shutdown(self, flags: int) -> ReplyValues:
        if self._is_shutting_down:
            raise MethodError(
                IN_PROGRESS, "There's already a shutdown or sleep operation in progress"
            )
        self._check_inhibitors(flags)
        self._is_shutting_down, self._is_soft_reboot = True, bool(flags & SOFT_REBOOT)
        self._object.set_properties(PreparingForShutdown=True)
        self._object.emit_signal("PrepareForShutdown", "(b)", True)  # noqa: FBT003  the signal's body
        limit_ms = round(self._settings().inhibit_delay_max_s * 1000)
        if self._inhibitors.find_locks("shutdown", "delay"):
            self._delay_source = GLib.timeout_add(limit_ms, self._end_delay)
        else:
            GLib.idle_add(self._power_off)
        return ()

    def _check_inhibitors(self, flags: int) -> None:
        version = self._settings().systemd_version
        blocking = self._inhibitors.find_locks("shutdown", "block")
        blocked = bool(blocking)
        weak = bool(self._inhibitors.find_locks("shutdown", "block-weak"))
        is_check_requested = bool(flags & ROOT_CHECK_INHIBITORS)
        if flags & SKIP_INHIBITORS:
            return
        # Up to 256 the locks of the caller's own user do not count, so root's not for root.
        others = any(lock.uid != os.getuid() for lock in blocking)
        if is_check_requested and (weak or (blocked if version >= 257 else others)):
            raise MethodError(ACCESS_DENIED, "Access denied to root due to active block inhibitor")
        if blocked and version >= 257:
            name = BLOCKED if version >= 258 else ACCESS_DENIED
            raise MethodError(name, "Operation denied due to active block inhibitor")

    def _end_delay(self) -> bool:
        self._delay_source = 0
        self._power_off()
        return False

    def _power_off(self) -> bool:
        (self._soft_reboot if self._is_soft_reboot else self._reboot)()
        return False

    def _handle_schedule(self, call: MethodCall) -> ReplyValues:
        kind, when_us = call.arguments
        if kind not in _TYPES + _DRY_TYPES:
            raise MethodError(INVALID_ARGS, f"Unsupported shutdown type: {kind}")
        self._clear_schedule()
        delay_ms = max(0, round(when_us / 1000 - time.time() * 1000))
        self._schedule_source = GLib.timeout_add(delay_ms, self._run_scheduled, kind)
        self._object.set_properties(ScheduledShutdown=(kind, when_us))
        return ()

    def _run_scheduled(self, kind: str) -> bool:
        self._schedule_source = 0
        self._object.set_properties(ScheduledShutdown=("", 0))
        if kind in _TYPES and not self._is_shutting_down:
            self._begin_shutdown(0)
        return False

    def _handle_cancel_scheduled(self, _call: MethodCall) -> ReplyValues:
        return (self._clear_schedule(),)

    def _clear_schedule(self) -> bool:
        had, self._schedule_source = self._schedule_source, 0
        if had:
            GLib.source_remove(had)
            self._object.set_properties(ScheduledShutdown=("", 0))
        return bool(had)

    def _handle_inhibit(self, call: MethodCall) -> None:
        what, who, why, mode = call.arguments
        modes = {"block", "delay"}
        if self._settings().systemd_version >= 257:
            modes.add("block-weak")
        if not what or any(part not in INHIBITABLE for part in what.split(":")):
            raise MethodError(INVALID_ARGS, f"Invalid what specification {what}")
        if mode not in modes:
            raise MethodError(INVALID_ARGS, f"Invalid mode specification {mode}")
        if mode == "delay" and set(what.split(":")) - {"shutdown", "sleep"}:
            raise MethodError(
                INVALID_ARGS, "Delay inhibitors only supported for shutdown and sleep"
            )
        if self._is_shutting_down and "shutdown" in what.split(":"):
            raise MethodError(
                IN_PROGRESS, "The operation inhibition has been requested for is already running"
            )
        uid = query_credential(self._connection, "GetConnectionUnixUser", call.sender)
        pid = query_credential(self._connection, "GetConnectionUnixProcessID", call.sender)
        lock = self._inhibitors.take_lock(LogindInhibitor(what, who, why, mode, uid, pid))
        fds = Gio.UnixFDList.new()
        handle = fds.append(lock)
        os.close(lock)
        call.send_reply(handle, fds=fds)

    def _handle_list_inhibitors(self, _call: MethodCall) -> ReplyValues:
        return (
            [(i.what, i.who, i.why, i.mode, i.uid, i.pid) for i in self._inhibitors.list_locks()],
        )

    def _publish_inhibitors(self) -> None:
        self._object.set_properties(
            BlockInhibited=self._inhibitors.list_inhibited("block"),
            DelayInhibited=self._inhibitors.list_inhibited("delay"),
        )
        if self._delay_source and not self._inhibitors.find_locks("shutdown", "delay"):
            GLib.source_remove(self._delay_source)
            self._end_delay()
