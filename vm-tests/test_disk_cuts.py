"""The log of a disk's writes in updates is cut at many points, and each disk is recovered."""

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.crash.cut_disks import CutVerdict, Reference, check_cut, read_reference
from tests.records import write_record
from treenail_lab.cluster import build_rendered_config
from vmlab.configs import read_file
from vmlab.cut_disk import check_file_systems, enter_mount_namespace, mount_cut
from vmlab.drivers import Qemu
from vmlab.image.build import Builder, Built
from vmlab.machine import BOOT_LIMIT_S
from vmlab.recording import (
    CHANGED,
    OTHERS,
    STORY,
    WITNESS,
    NodeEvent,
    Recording,
    make_recording,
)
from vmlab.site import Site
from vmlab.tools import REPOSITORY, ToolError, run, say
from vmlab.write_log import LogEntry, PowerCut, Replay, choose_cuts, copy_sparse, read_log

CUTS = int(os.environ.get("TREENAIL_VM_DISK_CUTS", "1000"))
BOOTS = int(os.environ.get("TREENAIL_VM_DISK_BOOTS", "5"))
SEED = int(os.environ.get("TREENAIL_VM_SEED", "1"))
RECORDING = os.environ.get("TREENAIL_VM_RECORDING")
VARIABLES = f"TREENAIL_VM_DISK_CUTS={CUTS} TREENAIL_VM_SEED={SEED}"
MEMORY = Path("/dev/shm")
UPDATES = {
    1: "files and units, with a reboot",
    2: "a file, without a reboot",
    3: "another image, files and units",
}
LIVE_UPDATE = 2
CUTS_EACH = -(-CUTS // len(UPDATES))
LYING_CUTS = 40
TRIED = 40
"""So many disks are checked to choose the booted ones."""
WRONG_LIMIT = 20
"""After so many cuts with a broken rule, the rest is left out."""


@pytest.fixture(scope="module")
def recording(request: pytest.FixtureRequest) -> Iterator[Recording]:
    """Return the recording in the directory that the user names; make it first if it is missing.

    Without a name it is removed at the end, unless a test failed.
    """
    directory = Path(RECORDING) if RECORDING else REPOSITORY / "build/vm/recording"
    if RECORDING and (directory / STORY).exists():
        yield Recording.load(directory)
        return
    built: Built = request.getfixturevalue("built")
    builder: Builder = request.getfixturevalue("builder")
    yield make_recording(directory, built, builder)
    if not RECORDING and not request.session.testsfailed:
        shutil.rmtree(directory)


@dataclass(frozen=True, slots=True)
class UpdateCut:
    """A power cut in the update to the rest point with this number."""

    cut: PowerCut
    update: int


class CutDisks:
    """Makes the disks of power cuts in a scratch directory, in memory where possible."""

    def __init__(
        self,
        recording: Recording,
        scratch: Path,
        entries: list[LogEntry] | None = None,
    ) -> None:
        self.recording = recording
        self.entries = entries or read_log(recording.log)
        self.disk = scratch / "cut.raw"
        self._scratch = scratch
        self._place = scratch / "mounted"
        self._place.mkdir()
        self._replay = self._begin()
        self.references = [self._read_reference(each) for each in range(len(recording.rests))]
        self._replay = self._begin()

    def choose(self, update: int, count: int) -> list[UpdateCut]:
        """Choose power cuts in one update."""
        chance = random.Random(f"{SEED} {update}")
        begin, end = (
            self._find_position(each.size) for each in self.recording.rests[update - 1 : update + 1]
        )
        say(f"seed {SEED}, update {update}: {end - begin} writes and flushes")
        return [
            UpdateCut(cut, update) for cut in choose_cuts(self.entries, begin, end, count, chance)
        ]

    def choose_lossy(self, count: int) -> list[UpdateCut]:
        """Choose power cuts in the first update whose disk lacks some of all its writes."""
        chance = random.Random(SEED)
        begin, end = (self._find_position(each.size) for each in self.recording.rests[:2])
        found = []
        for _ in range(count):
            position, share = chance.randrange(begin + 1, end), chance.choice((0.02, 0.1, 0.3))
            kept = tuple(
                (number, self.entries[number].length)
                for number in range(position)
                if number < begin or chance.random() >= share
            )
            found.append(UpdateCut(PowerCut(position, kept), 1))
        return found

    def check(self, chosen: UpdateCut) -> CutVerdict:
        """Make the disk of the power cut, start the agent on it, and check its file systems."""
        self.make(chosen.cut)
        old, new = self.references[chosen.update - 1 : chosen.update + 1]
        event = self.find_event(chosen.cut)
        try:
            with mount_cut(self.disk, self._place) as machine:
                verdict = check_cut(machine, event, old, new)
        except (ToolError, OSError) as error:
            return CutVerdict([f"the disk does not boot: {error}"], "unknown", "")
        verdict.wrong.extend(check_file_systems(self.disk))
        return verdict

    def find_event(self, cut: PowerCut) -> NodeEvent:
        """Return the Node as the API server had it at the power cut."""
        return self.recording.find_event(self.entries[cut.position - 1].end)

    def restart(self) -> None:
        """Accept earlier power cuts again."""
        self._replay = self._begin()

    def make(self, cut: PowerCut) -> None:
        self._replay.make_disk(cut, self.disk)

    def _begin(self) -> Replay:
        base = self._scratch / "base.raw"
        copy_sparse(self.recording.base, base)
        return Replay(self.recording.log, self.entries, base)

    def _read_reference(self, number: int) -> Reference:
        rest = self.recording.rests[number]
        position = self._find_position(rest.size)
        self.make(PowerCut(position, tuple(enumerate(each.length for each in self.entries))))
        with mount_cut(self.disk, self._place) as machine:
            return read_reference(machine, rest)

    def _find_position(self, size: int) -> int:
        return sum(1 for entry in self.entries if entry.end <= size)


@contextmanager
def make_scratch() -> Iterator[Path]:
    """Make a directory for disks, in memory if 3 GiB are free there.

    With mkfs.xfs, of the package xfsprogs, copies of disks there share their blocks.
    """
    enter_mount_namespace()
    is_memory = MEMORY.exists() and shutil.disk_usage(MEMORY).free >> 30 >= 3
    with tempfile.TemporaryDirectory(prefix="tnvm", dir=MEMORY if is_memory else None) as scratch:
        if shutil.which("mkfs.xfs") is None:
            yield Path(scratch)
            return
        pool, place = Path(scratch, "pool"), Path(scratch, "disks")
        place.mkdir()
        run("truncate", "-s", "8G", pool)
        run("mkfs.xfs", "-q", "-m", "reflink=1", pool)
        run("mount", "-o", "loop", pool, place)
        try:
            yield place
        finally:
            run("umount", place)


@pytest.fixture(scope="module")
def disks(recording: Recording) -> Iterator[CutDisks]:
    with make_scratch() as scratch:
        yield CutDisks(recording, scratch)


@pytest.mark.limit(4 * 3600)
@pytest.mark.parametrize("update", UPDATES)
def test_disk_cuts_leave_old_or_new_state(
    update: int, disks: CutDisks, request: pytest.FixtureRequest
) -> None:
    disks.restart()
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for number, chosen in enumerate(chosen_cuts := disks.choose(update, CUTS_EACH), 1):
        verdict = disks.check(chosen)
        counts.update((verdict.phase, chosen.cut.kind))
        counts["restored by the start"] += verdict.has_restored
        request.node.user_properties.append(("cut", verdict.phase))
        if verdict.wrong:
            wrong.append(f"{chosen}: {verdict}")
            say(wrong[-1])
        if number % 50 == 0:
            say(f"power cut {number} of {len(chosen_cuts)}; {len(wrong)} wrong; {dict(counts)}")
        if len(wrong) >= WRONG_LIMIT:
            break
    say(f"{len(wrong)} wrong; {dict(counts)}")
    write_record(
        "machines",
        what="power cuts of a virtual machine's disk at points of the log of its writes, mounted "
        f"and recovered by a start of the agent: {UPDATES[update]}",
        count=len(request.node.user_properties),
        result=f"{len(wrong)} with a broken rule"
        if wrong
        else f"{counts['restored by the start']} restored by the start; old or new files and image "
        "each time, ledger and status true, files of others untouched, clean file systems",
        command=f"{VARIABLES} make vm-test ARGS='-k disk_cuts_leave'",
    )
    assert wrong == []


def test_disk_that_ignores_flushes_is_noticed(recording: Recording, disks: CutDisks) -> None:
    entries = [replace(each, is_flush=False) for each in disks.entries]
    with make_scratch() as scratch:
        lying = CutDisks(recording, scratch, entries)
        verdicts = [lying.check(each) for each in lying.choose_lossy(LYING_CUTS)]
    wrong = [sentence for each in verdicts for sentence in each.wrong]
    noticed = sum(bool(each.wrong) for each in verdicts)
    write_record(
        "machines",
        what="control: disks of power cuts that lack 2 to 30 % of the flushed writes of an update",
        count=len(verdicts),
        result=f"the check notices {noticed}",
        command=f"TREENAIL_VM_SEED={SEED} make vm-test ARGS='-k ignores_flushes'",
    )
    assert any("after the start" in each for each in wrong)
    assert any("is torn" in each for each in wrong)


@pytest.mark.limit(4 * 3600)
def test_booted_disk_cuts_agree_with_the_checked_ones(
    disks: CutDisks, request: pytest.FixtureRequest
) -> None:
    built: Built = request.getfixturevalue("built")
    builder: Builder = request.getfixturevalue("builder")
    disks.restart()
    booted = 0
    try:
        for chosen in choose_sample(disks, BOOTS):
            verdict = disks.check(chosen)
            assert verdict.wrong == []
            say(f"booting the disk of {chosen}: {verdict}")
            boot_disk(disks, chosen, verdict, built, builder)
            booted += 1
    finally:
        write_record(
            "machines",
            what="disks of such power cuts, booted in the virtual machine until the update is done",
            count=booted,
            result="files and image of the check, then the new ones"
            if booted == BOOTS
            else "not finished",
            command=f"{VARIABLES} TREENAIL_VM_DISK_BOOTS={BOOTS} make vm-test "
            "ARGS='-k booted_disk_cuts'",
        )


def choose_sample(disks: CutDisks, count: int) -> list[UpdateCut]:
    """Choose cuts in updates with a reboot: different ones, first those that a start restores."""
    found = [
        each
        for update in UPDATES
        if update != LIVE_UPDATE
        for each in disks.choose(update, CUTS_EACH)
    ]
    chance = random.Random(SEED)
    tried = [(disks.check(each), each) for each in found[:: max(1, len(found) // TRIED)]]
    disks.restart()
    chance.shuffle(tried)
    kinds = {(verdict.phase, verdict.has_restored): each for verdict, each in tried}
    names = sorted(kinds, key=lambda kind: not kind[1])
    return sorted((kinds[name] for name in names[:count]), key=lambda each: each.cut.position)


def boot_disk(
    disks: CutDisks, chosen: UpdateCut, verdict: CutVerdict, built: Built, builder: Builder
) -> None:
    """Boot the disk of a power cut with the Node of that moment, and finish the update."""
    directory = REPOSITORY / "build/vm/booted-cut"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    disk = directory / "disk.raw"
    disks.make(chosen.cut)
    copy_sparse(disks.disk, disk)
    rests = disks.recording.rests[chosen.update - 1 : chosen.update + 1]
    event = disks.find_event(chosen.cut)
    site = Site(directory, built, builder, Qemu(), disk=disk)

    def restore_node() -> None:
        for each in rests:
            site.lab.add_config(build_rendered_config(each.goal.config, each.config))
        site.story.digest = event.digest
        notes = event.node["metadata"]["annotations"]
        site.patch({"metadata": {"annotations": notes}, "spec": event.node["spec"]})

    try:
        site.power_on(restore_node)
        found = site.machine.sh(
            f"until test -e {WITNESS}; do sleep 1; done; cat {WITNESS}", limit_s=BOOT_LIMIT_S
        )
        expected = next(each for each in rests if each.goal.config == verdict.config)
        assert found == read_file(expected.config, CHANGED)
        assert site.story.digest == verdict.digest
        site.ask(rests[1].goal)
        site.machine.sh("systemctl restart kubelet; systemctl restart --no-block treenail")
        site.settle(rests[1].goal)
        assert site.machine.sh(f"cat {CHANGED}") == read_file(rests[1].config, CHANGED)
        for path, text in OTHERS.items():
            assert site.machine.sh(f"cat {path}") == text
        assert site.story.violations == []
    except BaseException:
        print(site.report())
        raise
    finally:
        site.stop()
        disk.unlink()
