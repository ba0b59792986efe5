"""Random configs leave the tree of ``treenail once`` as the real machine-config-daemon leaves it.

TREENAIL_TEST_MCO_TREES is the number of configs (default: 200), TREENAIL_TEST_MCO_FIRST_TREE the
seed of the first one. The daemon needs root, for its namespaces.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.mco import programs
from tests.mco.daemon_root import make_root, read_tree, remove_root, run_daemon
from tests.mco.random_files import VENDOR_UNITS, RandomFiles
from treenail_lab.lifetime.owner import owner

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(os.geteuid() != 0, reason="the daemon needs root"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed"),
    pytest.mark.limit(850),
]

COUNT, FIRST = "TREENAIL_TEST_MCO_TREES", "TREENAIL_TEST_MCO_FIRST_TREE"
# State of either program, and of the rpm that the daemon runs where there is one.
STATES = ("etc/machine-config-daemon", "var/lib/treenail", "etc/treenail", "root/.rpmdb")
# usermod keeps copies and its lock, and writes the day of the change.
ACCOUNT_FILES = ("etc/passwd-", "etc/shadow-", "etc/.pwd.lock", "etc/shadow", "etc/subuid-")

SEEDS = programs.split_seeds(programs.read_count(FIRST, 0), programs.read_count(COUNT, 200), 50)

Tree = dict[str, tuple[object, ...]]


@pytest.mark.parametrize("seeds", SEEDS, ids=programs.name_seeds)
def test_random_configs_leave_equal_trees(seeds: range) -> None:
    program = programs.DAEMON.read()
    tally: Counter[str] = Counter()
    differences = {}
    for seed in seeds:
        with owner.temporary_directory() as directory:
            result, found = compare(program, directory, seed)
        tally[result] += 1
        if found:
            differences[seed] = found
    sys.stdout.write(f"{dict(tally)}\n")
    assert differences == {}
    assert tally["equal"] > 0.7 * sum(tally.values()), tally


def compare(program: Path, directory: Path, seed: int) -> tuple[str, object]:
    """Return how the results compare, and what differs."""
    made = RandomFiles(seed)
    config, before = made.make_config(), made.make_before()
    document = {
        "apiVersion": "machineconfiguration.openshift.io/v1",
        "kind": "MachineConfig",
        "metadata": {"name": "rendered-test"},
        "spec": {"config": config},
    }
    text = json.dumps(document)
    ours, theirs = directory / "ours", directory / "theirs"
    for root in (ours, theirs):
        make_root(root, VENDOR_UNITS, before)
    file = directory / "config.json"
    file.write_text(text, "utf-8")
    command = [sys.executable, "-P", "-m", "treenail", "once", "--root", str(ours), str(file)]
    mine = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    other = run_daemon(program, theirs, text)
    is_written = mine.returncode in {0, 3}
    try:
        match is_written, other.returncode == 0:
            case False, False:
                return "both refuse", None
            case True, False:
                return "the daemon refuses", (mine.stdout, other.stderr[-1500:])
            case False, True:
                return "treenail refuses", mine.stderr
        found = find_differences(read_tree(ours), read_tree(theirs))
        return ("differ", found) if found else ("equal", None)
    finally:
        for root in (ours, theirs):
            remove_root(root)


def find_differences(ours: Tree, theirs: Tree) -> dict[str, object]:
    """Return what is ours and theirs at each path that differs."""
    paths = {path for path in ours | theirs if not path.startswith((*STATES, *ACCOUNT_FILES))}
    found: dict[str, object] = {
        path: (ours.get(path), theirs.get(path))
        for path in sorted(paths)
        if ours.get(path) != theirs.get(path)
    }
    hashes = [read_hash(tree) for tree in (ours, theirs)]
    if hashes[0] != hashes[1]:
        found["password"] = hashes
    return found


def read_hash(tree: Tree) -> str:
    """Return the password hash of core; ``!`` and ``*`` both mean that there is none."""
    content = tree["etc/shadow"][-1]
    assert isinstance(content, bytes)
    line = next(each for each in content.decode().splitlines() if each.startswith("core:"))
    return line.split(":")[1].replace("!", "*")
