"""Power cuts of the stages ``prepare`` and ``bootstrap``: what is not flushed may be lost.

A recorder follows the files of the install directory. At a cut it computes what the disk may have;
the next process starts from each of these directories.
"""

import copy
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.disk_model import DIRECTORY, LINK, Tree
from tests.crash.recorder import Recorder
from tests.fixtures.files import read_files
from tests.installer.directories import OUTPUTS
from tests.installer.dying import DeathError
from tests.installer.stages import Outside, run_stage
from tests.installer.test_bootstrap_stage import make_root, read_status
from tests.installer.test_prepare import CONTAINERFILE, FIELD, GENERATED, HEAD, TAIL, prepare
from tests.records import write_record
from treenail.installer.directory.install_files import InstallFiles

Run = Callable[[Path], object]


class PowerSwitch:
    """Cuts the power before the n-th change of the disk, and before each later one."""

    def __init__(self, cut_at: int) -> None:
        self.changes = 0
        self._cut_at = cut_at

    def pass_change(self, _: str) -> None:
        self.changes += 1
        if self.changes >= self._cut_at:
            raise DeathError


def record(parent: Path, run: Run, cut_at: int) -> tuple[Recorder, int]:
    """Run until the cut; return the recorder and the number of changes."""
    recorder, switch = Recorder(parent), PowerSwitch(cut_at)
    recorder.on_call = switch.pass_change
    with recorder.record():
        try:
            run(parent / "cluster")
        except DeathError:
            pass
        else:
            assert recorder.find_unseen_changes() == []
    return recorder, switch.changes


def write_tree(target: Path, tree: Tree) -> None:
    for path, entry in sorted(tree.items()):
        place = Path(f"{target}{path}")
        if entry.kind == DIRECTORY:
            place.mkdir(exist_ok=True)
            place.chmod(entry.version.mode)
        elif entry.kind == LINK:
            place.symlink_to(os.fsdecode(entry.version.content))
        else:
            place.write_bytes(entry.version.content)
            place.chmod(entry.version.mode)


def iter_disks(parent: Path, recorder: Recorder, count: int, seed: int) -> Iterator[Path]:
    """Yield install directories that the cut may leave."""
    disk = parent.parent / "disk"
    trees = [*recorder.model.list_trees(64, seed)]
    if len(trees) > count:
        # Nothing and everything that was not flushed, and some of the rest.
        trees = trees[:2] + random.Random(seed).sample(trees[2:], count - 2)
    for tree in trees:
        shutil.rmtree(disk, ignore_errors=True)
        write_tree(disk, tree)
        yield disk / "cluster"


def choose_cuts(changes: int, count: int, seed: int) -> list[int]:
    """Return the numbers of changes before which the power fails; all of them if they are few."""
    every = range(1, changes + 2)
    return sorted(random.Random(seed).sample(every, min(count, len(every))))


CASES = [(25, 3), pytest.param(10_000, 16, marks=[pytest.mark.long, pytest.mark.limit(3600)])]


@pytest.mark.parametrize(("cuts", "disks"), CASES)
def test_power_cut_of_the_stage_bootstrap_ends_in_the_same_cluster(
    tmp_path: Path, cuts: int, disks: int
) -> None:
    reference = Outside()
    run_stage(make_root(tmp_path / "reference"), reference, files=InstallFiles())
    expected, rendered = reference.read_result(), read_files(tmp_path / "reference", *OUTPUTS[:2])
    parent = tmp_path / "parent"

    def run(outside: Outside) -> Run:
        return lambda root: run_stage(root, outside, files=InstallFiles())

    def restart() -> None:
        shutil.rmtree(parent, ignore_errors=True)
        make_root(parent / "cluster")

    restart()
    _, changes = record(parent, run(Outside()), 1 << 30)
    assert changes > 100
    count = 0
    for cut in choose_cuts(changes, cuts, seed=7):
        restart()
        outside = Outside()
        recorder, _ = record(parent, run(outside), cut)
        for disk in iter_disks(parent, recorder, disks, seed=cut):
            count += 1
            after = copy.deepcopy(outside)
            run_stage(disk, after, files=InstallFiles())
            assert after.read_result() == expected, f"after a cut before change {cut}"
            assert len(after.builds) == 2, f"after a cut before change {cut}"
            assert read_files(disk, *OUTPUTS[:2]) == rendered
            assert read_status(disk)["phase"] == "complete"
    if cuts > changes:
        write_record(
            "crash",
            what="power cuts of install bootstrap before each change of its disk",
            count=count,
            result="the same cluster; no second build, no half-written file",
            command="make test-long ARGS=tests/installer/test_power_cuts.py",
        )


@pytest.mark.parametrize(("cuts", "disks"), [(10_000, 6)])
def test_power_cut_of_the_stage_prepare_leaves_what_the_next_run_completes(
    tmp_path: Path, cuts: int, disks: int
) -> None:
    parent = tmp_path / "parent"

    def restart() -> Path:
        shutil.rmtree(parent, ignore_errors=True)
        root = parent / "cluster"
        root.mkdir(parents=True)
        (root / "install-config.yaml").write_text(HEAD + FIELD + TAIL)
        (root / "Containerfile").write_text(CONTAINERFILE)
        return root

    def read(root: Path) -> list[bytes]:
        return [(root / name).read_bytes() for name in ("install-config.yaml", GENERATED)]

    root = restart()
    _, changes = record(parent, prepare, 1 << 30)
    expected = read(root)
    assert expected[0].decode() == HEAD + TAIL
    for cut in choose_cuts(changes, cuts, seed=7):
        restart()
        recorder, _ = record(parent, prepare, cut)
        for disk in iter_disks(parent, recorder, disks, seed=cut):
            prepare(disk)
            assert read(disk) == expected, f"after a cut before change {cut}"
