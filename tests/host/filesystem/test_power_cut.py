"""Every write, interrupted at every system call by a power cut or by a kill of the process."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.fakes.disk import Entry, MemoryDisk, PowerCut, Tree
from treenail.errors import FileError
from treenail.host.filesystem.atomic_files import FileSpec, HostFiles
from treenail.host.filesystem.root_directory import Root
from treenail.host.system.state_file import Ledger

# A path that the real disk does not have, so that no real link is followed.
ROOT = Root("/no-such-root")


def tree(**entries: str | int) -> Tree:
    """A file for text (mode 0644), a link for text with an arrow, a directory for a mode."""
    found: Tree = {"/no-such-root": Entry("directory", 0o755, b"")}
    for name, entry in entries.items():
        path = "/no-such-root/" + name.replace("_", "/")
        if isinstance(entry, int):
            found[path] = Entry("directory", entry, b"")
        elif entry.startswith("->"):
            found[path] = Entry("link", 0o777, entry[2:].encode())
        else:
            found[path] = Entry("file", 0o644, entry.encode())
    return found


@dataclass(frozen=True, slots=True)
class Case:
    before: Tree
    change: Callable[[HostFiles], object]
    after: Tree


def batch(files: HostFiles) -> object:
    return files.write_files(
        [
            *(FileSpec(f"/a/{name}", b"new " + name.encode()) for name in "123"),
            *(FileSpec(f"/b/{name}", b"new " + name.encode()) for name in "45"),
            FileSpec("/b/same", b"same"),
        ]
    )


CASES = {
    "a new file": Case(
        tree(a=0o755),
        lambda files: files.write_file("/a/f", b"content"),
        tree(a=0o755, a_f="content"),
    ),
    "a file that changes": Case(
        tree(a=0o755, a_f="old content"),
        lambda files: files.write_file("/a/f", b"new"),
        tree(a=0o755, a_f="new"),
    ),
    "a file that does not change": Case(
        tree(a=0o755, a_f="same"),
        lambda files: files.write_file("/a/f", b"same"),
        tree(a=0o755, a_f="same"),
    ),
    "a file in directories that are missing": Case(
        tree(),
        lambda files: files.write_file("/a/b/f", b"new"),
        tree(a=0o755, a_b=0o755, a_b_f="new"),
    ),
    "a few files": Case(
        tree(a=0o755, a_f="old"),
        lambda files: files.write_files([FileSpec("/a/f", b"new"), FileSpec("/g", b"g")]),
        tree(a=0o755, a_f="new", g="g"),
    ),
    "many files": Case(
        tree(a=0o755, a_1="old", b_4="old 4", b_same="same", b=0o755),
        batch,
        tree(
            a=0o755,
            a_1="new 1",
            a_2="new 2",
            a_3="new 3",
            b=0o755,
            b_4="new 4",
            b_5="new 5",
            b_same="same",
        ),
    ),
    "a new link": Case(
        tree(a=0o755), lambda files: files.make_symlink("/a/l", "../t"), tree(a=0o755, a_l="->../t")
    ),
    "a link in the place of a file": Case(
        tree(l="a file"), lambda files: files.make_symlink("/l", "t"), tree(l="->t")
    ),
    "a removal": Case(tree(f="old"), lambda files: files.remove_file("/f"), tree()),
    "a directory that changes": Case(
        tree(a=0o755), lambda files: files.make_directory("/a", mode=0o700), tree(a=0o700)
    ),
    "a directory": Case(
        tree(),
        lambda files: files.make_directory("/a/b", mode=0o700),
        tree(a=0o755, a_b=0o700),
    ),
}


def remove_temporaries(found: Tree) -> Tree:
    return {path: entry for path, entry in found.items() if ".treenail-" not in path}


def find_torn_paths(case: Case, found: Tree) -> list[str]:
    """Return the paths that are neither old nor new."""
    before, after = case.before, case.after
    return [
        path
        for path in before.keys() | after.keys() | remove_temporaries(found).keys()
        if found.get(path) not in (before.get(path), after.get(path))
    ]


class Findings:
    """The wrong states that disks were found in."""

    def __init__(self, case: Case, ignores_flush: Callable[[int], bool]) -> None:
        self.case = case
        self.ignores_flush = ignores_flush
        self.states = 0
        self.wrong: list[str] = []

    def check(self) -> None:
        """Cut the power, or kill the process, after every number of calls."""
        calls = 0
        while not self.interrupt_after(calls) and not self.wrong:
            calls += 1
        disk = MemoryDisk(self.case.before, flushed=False)
        self.change(disk, "files that another program had not flushed")

    def interrupt_after(self, calls: int) -> bool:
        """Return whether the change was complete by then."""
        disk = MemoryDisk(self.case.before)
        disk.ignores_flush = self.ignores_flush
        disk.calls_left = calls
        try:
            self.case.change(HostFiles(ROOT, disk))
            done = True
        except PowerCut:
            done = False
        disk.calls_left = None
        for found in disk.after_power_cut():
            self.states += 1
            self.wrong += [
                f"power cut after {calls} calls: {path}"
                for path in find_torn_paths(self.case, found)
            ]
            if done and remove_temporaries(found) != self.case.after:
                self.wrong.append("a completed change is lost")
            if self.states % 50 == 0:
                self.change(MemoryDisk(found), f"repeated after {calls} calls")
        self.change(disk, f"killed after {calls} calls")
        return done

    def change(self, disk: MemoryDisk, story: str) -> None:
        """Make the change on this disk; once it returns, it must be durable."""
        disk.ignores_flush = self.ignores_flush
        disk.flushes = 0
        try:
            self.case.change(HostFiles(ROOT, disk))
        except FileError as error:
            self.wrong.append(f"{story}: {error}")
            return
        if disk.tree() != self.case.after:
            self.wrong.append(f"{story}: {disk.tree()}")
        for found in disk.after_power_cut():
            self.states += 1
            if remove_temporaries(found) != self.case.after:
                self.wrong.append(f"{story}, completed, and lost: {found}")


@pytest.mark.parametrize("name", CASES)
def test_write_after_power_cut_is_old_or_new_and_new_once_returned(name):
    findings = Findings(CASES[name], lambda _: False)
    findings.check()
    assert findings.wrong == []
    assert findings.states > 0


def count_flushes(name: str) -> list[int]:
    disk = MemoryDisk(CASES[name].before)
    CASES[name].change(HostFiles(ROOT, disk))
    # The parent of two directories is flushed for each of them, and again with the file system or
    # for its own file.
    spare = {"a few files": 1, "many files": 2}.get(name, 0)
    return list(range(spare, disk.flushes))


@pytest.mark.parametrize(
    ("name", "flush"), [(name, n) for name in CASES for n in count_flushes(name)]
)
def test_write_without_any_one_flush_loses_something(name, flush):
    findings = Findings(CASES[name], lambda number: number == flush)
    findings.check()
    assert findings.wrong != []


DOCUMENTS = [{"version": 1, "phase": phase} for phase in ("staging", "staged", "rebooting")]


def test_ledger_after_power_cut_holds_last_or_next_document():
    done = 0
    calls = 0
    while done < len(DOCUMENTS):
        disk = MemoryDisk(tree())
        disk.calls_left = calls
        done = 0
        try:
            ledger = Ledger(ROOT, HostFiles(ROOT, disk))
            for document in DOCUMENTS:
                ledger.write_document(document)
                done += 1
        except PowerCut:
            pass
        allowed = [[None, *DOCUMENTS][done], *DOCUMENTS[done : done + 1]]
        for found in disk.after_power_cut():
            assert Ledger(ROOT, HostFiles(ROOT, MemoryDisk(found))).read_document() in allowed
        calls += 1
    assert calls > 50
