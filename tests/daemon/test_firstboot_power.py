"""Power cuts in a first boot, and after Ignition, which flushes nothing that it writes."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon.test_firstboot_verifier import FILES, NAME, Provisioned
from tests.daemon.walk_budget import seeds, walk
from tests.fakes import disk, world
from tests.fakes.disk import Entry, MemoryDisk, Tree
from tests.update.build import A, B
from treenail.config import node_paths
from treenail.daemon.firstboot import DONE_FILE, STATE_FILE

BOOTSTRAP = {node_paths.KUBECONFIG: "the bootstrap credential", "/var/lib/kubelet.env": "A=1"}
"""Files of the config server for this machine only; no config can restore them."""


CUTS = 6
"""Power cuts per machine, at most."""
STATES = 16


def make_disk(root: Path, tree: Tree, *, flushed: bool) -> MemoryDisk:
    """Make a disk with these entries, with /var on another file system."""

    class VarMounted(MemoryDisk):
        mounts = (f"{root}/var",)

    found = VarMounted(tree, flushed=flushed)
    found.chunk = 1 << 20
    return found


def list_states(disk: MemoryDisk, root: Path, path: str) -> list[dict[str, bytes]]:
    """Return states that a power cut may leave, by path, of those that have this path."""
    states = (
        {name.removeprefix(str(root)): entry.content for name, entry in tree.items()}
        for tree in disk.after_power_cut(200)
    )
    return [state for state in states if path in state]


def read_tree(root: Path) -> Tree:
    """Read a directory with its parents."""
    places = [*reversed(root.parents[:-1]), root, *root.rglob("*")]
    return {
        str(place): Entry("file", place.stat().st_mode & 0o7777, place.read_bytes())
        if place.is_file()
        else Entry("directory", 0o755, b"")
        for place in places
    }


def provision(root: Path) -> Provisioned:
    """A machine whose files are in memory only, as right after Ignition."""
    host = Provisioned(root)
    (root / "etc/kubernetes").mkdir()
    for path, text in BOOTSTRAP.items():
        host.write(path, text)
    return host


def assert_provisioned(states: list[dict[str, bytes]]) -> None:
    assert states
    for state in states:
        found = {path: state.get(path, b"").decode() for path in FILES | BOOTSTRAP}
        assert found == FILES | BOOTSTRAP
        assert NAME.encode() in state[node_paths.FIRST_BOOT_ANNOTATIONS]


@pytest.mark.parametrize("is_at_target", [True, False])
def test_power_cut_after_first_boot_keeps_the_files_of_ignition(
    tmp_path: Path, is_at_target: bool
) -> None:
    host = provision(tmp_path)
    if is_at_target:
        host.encapsulate(osImageURL=A.image)
    memory = host.disk = make_disk(tmp_path, read_tree(tmp_path), flushed=False)
    assert host.boot() is is_at_target
    mark = DONE_FILE if is_at_target else STATE_FILE
    assert_provisioned(list_states(memory, tmp_path, mark))


class UnstablePower:
    """Cuts the power of a machine at a random effect or call of the disk, a few times."""

    def __init__(self, host: Provisioned, memory: MemoryDisk, chance: random.Random) -> None:
        self.cuts = 0
        self._host = host
        self._memory = memory
        self._chance = chance
        self._is_cut = False

    def boot(self) -> bool:
        """Boot once; return whether the machine may join."""
        self._is_cut = False
        self._plan_cut()
        try:
            joined = self._host.boot()
        except disk.PowerCut:
            self._is_cut, joined = True, False
            self._host.world.power_cut()
        self._memory.calls_left = None
        if not joined:
            self._lose_memory()
        return joined

    def _plan_cut(self) -> None:
        self._host.world.fault_point = lambda _step: None
        if self.cuts == CUTS:
            return
        if self._chance.random() < 0.5:
            self._memory.calls_left = self._chance.randrange(60)
        else:
            self._host.world.fault_point = self._cut_at(self._chance.randrange(10))

    def _cut_at(self, number: int) -> Callable[[str], None]:
        countdown = iter(range(number + 1))

        def fault_point(_step: str) -> None:
            if next(countdown, None) == number:
                self._is_cut = True
                raise world.PowerCut

        return fault_point

    def _lose_memory(self) -> None:
        self.cuts += self._is_cut
        states = list(self._memory.after_power_cut(STATES)) if self._is_cut else []
        tree = self._chance.choice(states) if states else self._memory.tree()
        run = f"{self._host.root}/run/"
        self._memory.replace_by(
            {path: entry for path, entry in tree.items() if not path.startswith(run)}
        )


def provision_in_image_mode(root: Path) -> Provisioned:
    host = provision(root)
    host.claim(image=B.image)
    host.bake(B, motd=FILES["/etc/motd"])
    return host


@walk
@pytest.mark.parametrize("make", [provision, provision_in_image_mode])
def test_random_power_cuts_in_first_boot_end_at_the_target(
    tmp_path: Path, make: Callable[[Path], Provisioned], part: int
) -> None:
    for seed in seeds(part):
        root = tmp_path / str(seed)
        root.mkdir()
        host = make(root)
        memory = host.disk = make_disk(root, read_tree(root), flushed=True)
        power = UnstablePower(host, memory, random.Random(seed))
        assert any(power.boot() for _ in range(CUTS + 4)), seed
        assert host.world.booted == B.digest, seed
        assert_provisioned(list_states(memory, root, DONE_FILE))
        left = [path for path in node_paths.IGNITION_FILES if memory.content(f"{root}{path}")]
        assert left == [], seed
