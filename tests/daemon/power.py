"""Finds what is wrong with the machine that the next start finds after a power cut."""

import itertools
import os
import sys
from collections.abc import Callable, Iterator

from tests.crash.recorder import Site
from tests.daemon.machines import (
    TOP,
    Case,
    Ends,
    apply_config,
    names,
    restart,
    runner,
    settled,
    visible,
)
from tests.fakes.disk import Found, MemoryDisk, PowerCut, Tree
from treenail.daemon.configuration.node_configuration import RecoveryOutcome
from treenail.errors import StepError, TreenailError

CALLS = ("fsync", "syncfs", "replace", "exchange")
"""The calls that make a change durable or atomic."""


class WitnessedDisk(MemoryDisk):
    """Calls `on_call` before each call that changes something, and omits the calls of one site.

    ``sites`` are those that were called, of `CALLS`. The log is on another file system.
    """

    mounts = (f"{TOP}/var",)

    def __init__(self, found: Tree, without: Site | None = None) -> None:
        super().__init__(found)
        self.chunk = 1 << 20
        self.without = without
        self.sites: set[Site] = set()
        self.on_call: Callable[[], None] = lambda: None

    def fsync(self, descriptor):
        if self._called("fsync"):
            super().fsync(descriptor)

    def syncfs(self, descriptor):
        if self._called("syncfs"):
            super().syncfs(descriptor)

    def replace(self, path, target):
        if self._called("replace"):
            super().replace(path, target)

    def exchange(self, path, other):
        if self._called("exchange"):
            super().exchange(path, other)

    def _called(self, call: str) -> bool:
        functions: list[str] = []
        frame = sys._getframe()
        while frame.f_back is not None and not frame.f_code.co_qualname.startswith("Findings."):
            frame = frame.f_back
            code = frame.f_code
            if f"{os.sep}host{os.sep}" in code.co_filename and "<" not in code.co_name:
                functions.insert(0, code.co_qualname)
        # Found again and again in directories of directories.
        functions = list(dict.fromkeys(functions))
        site = Site(call, tuple(functions))
        self.sites.add(site)
        return site != self.without

    def _count(self) -> None:
        self.on_call()
        super()._count()


class Findings:
    """Brings a machine to a config once, and looks at what each call would have left behind.

    Each state is looked at as a killed process leaves it, nothing of it flushed, and in so many
    ``states`` as a power cut may leave it.
    """

    def __init__(
        self,
        case: Case,
        *,
        states: int,
        make: Callable[[Tree], MemoryDisk] = WitnessedDisk,
    ) -> None:
        self.case = case
        self.states = states
        self.make = make
        self.sites: set[Site] = set()
        self.wrong: list[str] = []
        self._calls = 0
        self._starts = 0
        self._known: dict[object, None] = {}

    def check(self) -> "Findings":
        """Check until the first finding."""
        try:
            self._apply()
            self.sites |= self._disk.sites
        except StopIteration:
            pass
        return self

    def _apply(self) -> None:
        self._disk = self.make(self.case.before)
        while True:
            self._disk.on_call = lambda: self._check_call([self.case.before, self.case.after])
            try:
                apply_config(
                    self._disk,
                    self.case.new,
                    "new",
                    has_systemd=self.case.has_systemd,
                    ends=self.case.ends,
                )
            except TreenailError as error:
                self._report(f"an error without a fault: {error}")
            self._disk.on_call = lambda: None
            self._check_call([self.case.after])
            if self.case.next is None:
                return
            self.case = self.case.next

    def _check_call(self, allowed: list[Tree]) -> None:
        self._calls += 1
        for found in self._disk.after_power_cut(self.states):
            if self._is_new(found, allowed):
                self._check_torn(found, f"power cut after {self._calls} calls")
                self._start(self.make(found), allowed, f"power cut after {self._calls} calls")
        story = f"killed after {self._calls} calls"
        new = self._is_new(self._disk.tree(), allowed, self._disk.flushes)
        if new and self._start(self._killed(), allowed, story):
            self._interrupt_start_at_each_call(allowed, story)

    def _is_new(self, found: Tree, allowed: list[Tree], *flushes: int) -> bool:
        inodes = sorted(found.inodes.items()) if isinstance(found, Found) else ()
        key = (len(allowed), tuple(sorted(found.items())), tuple(inodes), flushes)
        if key in self._known:
            return False
        self._known[key] = None
        return True

    def _check_torn(self, found: Tree, story: str) -> None:
        """Check what programs see that start before the agent: each path as before or after."""
        before, after, now = map(visible, (self.case.before, self.case.made, found))
        for path in before.keys() | after.keys() | now.keys():
            entry = now.get(path)
            # A new directory may still be without its mode, and a unit that is enabled again has
            # a moment without links.
            new = path not in before and after.get(path, ("",))[0] == "directory"
            is_enabled_again = entry is None and ".wants/" in path
            if entry not in (before.get(path), after.get(path)) and not (new or is_enabled_again):
                self._report(f"{story}: {path} is torn: {entry}")

    def _killed(self) -> MemoryDisk:
        disk = self._disk.abandoned()
        disk.on_call, disk.sites = lambda: None, set()
        return disk

    def _interrupt_start_at_each_call(self, allowed: list[Tree], story: str) -> None:
        """A change found committed must stay committed for the start after that."""
        for calls in itertools.count():
            disk = self._killed()
            disk.calls_left = calls
            try:
                restart(disk, has_systemd=self.case.has_systemd, ends=self.case.ends)
            except PowerCut:
                for found in disk.after_power_cut(self.states):
                    self._start(self.make(found), allowed, f"{story}, power cut after {calls} more")
            else:
                return

    def _start(self, disk: MemoryDisk, allowed: list[Tree], story: str) -> bool:
        """Return whether it found a committed change."""
        self._starts += 1
        if runner(disk).pending.find_owner():
            self._check_undo(disk.tree(), story)
            if len(allowed) == 1 or self.case.ends is Ends.COMMITTED:
                self._report(f"{story}: pending again")
        try:
            if self._starts % 5 == 0:
                self._interrupt_start(disk)
            recovery = restart(disk, has_systemd=self.case.has_systemd, ends=self.case.ends)
        except TreenailError as error:
            self._report(f"{story}: {error}")
        now = disk.tree()
        if not any(_same(now, tree) for tree in allowed):
            paths = {path for path, _ in settled(now).items() ^ settled(allowed[0]).items()}
            self._report(f"{story}: neither as before nor as after: {sorted(paths)}")
        for after in disk.after_power_cut(min(self.states, 3)):
            again = self.make(after)
            if (
                restart(again, has_systemd=self.case.has_systemd, ends=self.case.ends)
                is RecoveryOutcome.UNDONE
            ):
                self._report(f"{story}: undone twice")
            if not _same(again.tree(), now):
                self._report(f"{story}: the undo was lost")
        self.sites |= disk.sites
        return recovery is RecoveryOutcome.CONFIRMED

    def _check_undo(self, found: Tree, story: str) -> None:
        """Check that a pending change can be undone until its owner confirms it."""
        disk = self.make(found)
        restart(disk, has_systemd=self.case.has_systemd, ends=Ends.UNDONE)
        if not _same(disk.tree(), self.case.before):
            self._report(f"{story}: pending, and cannot be undone")

    def _interrupt_start(self, disk: MemoryDisk) -> None:
        disk.calls_left = self._starts % 17
        try:
            restart(disk, has_systemd=self.case.has_systemd, ends=self.case.ends)
        except PowerCut:
            disk.replace_by(next(disk.after_power_cut(1)))
        disk.calls_left = None

    def _report(self, wrong: str) -> None:
        self.wrong.append(wrong)
        raise StopIteration


def _same(one: Tree, other: Tree) -> bool:
    return settled(one) == settled(other) and names(one) == names(other)


def failing_calls(case: Case, chosen: Callable[[int], Iterator[int]]) -> list[str]:
    """Return what is wrong when one call fails; ``chosen`` selects the calls from their number."""
    disk = CountedDisk(case.before)
    apply_config(disk, case.new, "new", has_systemd=case.has_systemd, ends=case.ends)
    wrong: list[str] = []
    for number in chosen(disk.calls):
        disk = CountedDisk(case.before, fails_at=number)
        try:
            apply_config(disk, case.new, "new", has_systemd=case.has_systemd, ends=case.ends)
            expected = case.after
        except StepError as error:
            expected = case.before
            if "all steps were undone" not in str(error):
                wrong.append(f"call {number}: {error}")
        except TreenailError as error:
            # The owner of the pending change tries again until it is done.
            expected = case.after
            if case.ends is Ends.COMMITTED:
                wrong.append(f"call {number}: {error}")
        disk.calls = -1_000_000
        restart(disk, has_systemd=case.has_systemd, ends=case.ends)
        if not _same(disk.tree(), expected):
            wrong.append(f"call {number} failed, and something is left")
    return wrong


class CountedDisk(MemoryDisk):
    """One call fails, once."""

    def __init__(self, found: Tree, fails_at: int = -1) -> None:
        super().__init__(found)
        self.chunk = 1 << 20
        self.calls = 0
        self.fails_at = fails_at

    def _count(self) -> None:
        self.calls += 1
        if self.calls - 1 == self.fails_at:
            raise OSError(28, "No space left on device")
