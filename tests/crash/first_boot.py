"""First boots of a machine that Ignition provisioned, with crashes at every call.

Ignition flushes nothing that it writes, so at the beginning its files are in memory only. A power
cut that loses them before the first boot has begun is not its matter: Ignition runs again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.crash.disk_model import DIRECTORY, Tree
from tests.crash.recorder import Recorder, Site, read_tree
from tests.crash.scenarios import Twist
from tests.crash.states import (
    CrashState,
    Outcome,
    Visible,
    differ,
    identify_state,
    list_states,
    open_directory,
    repeat_randomness,
)
from tests.crash.stored import (
    OTHERS,
    DirectoryDisk,
    NumberedDisk,
    StoredWorld,
    VisibleEntry,
    write_entries,
    write_tree,
)
from tests.daemon.test_firstboot import Host
from tests.daemon.test_firstboot_power import BOOTSTRAP, provision
from tests.daemon.test_firstboot_verifier import FILES, Provisioned
from tests.fakes.disk import Entry
from tests.fakes.host_machine import make_machine
from tests.fakes.world import WentDown
from tests.update.build import A, B
from treenail.api import annotations as key
from treenail.daemon.configuration.node_configuration import recover_interrupted
from treenail.daemon.configuration.step_runner import StepRunner
from treenail.daemon.firstboot import DONE_FILE, STATE_FILE, record_start
from treenail.errors import TreenailError
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.root_directory import Root

BOOTS = 8
_VOLATILE = "/run"
_MADE = "/etc/kubernetes"
"""The directory that Ignition makes."""


@dataclass(frozen=True, slots=True)
class FirstBoot:
    """A machine of the config server; ``prepare`` changes what Ignition wrote."""

    name: str
    prepare: Callable[[Provisioned], None] = lambda _: None
    vendor: tuple[tuple[str, str], ...] = ()
    """The files in /etc of the new image."""


def move_to_image(host: Provisioned) -> None:
    """Make the annotations name an image that has the config's file in /etc."""
    host.claim(image=B.image)


def leave_out_file(host: Provisioned) -> None:
    """Remove a file of the config, as if Ignition had not written it."""
    (host.root / "etc/motd").unlink()


FIRST_BOOTS = {
    each.name: each
    for each in (
        FirstBoot("first boot"),
        FirstBoot("first boot in image mode", move_to_image, (("motd", FILES["/etc/motd"]),)),
        FirstBoot("first boot with a repair", leave_out_file),
    )
}


class StoredHost(Host):
    """A machine with its files in a directory, and a world that can be copied."""

    def __init__(self, root: Path, world: StoredWorld, disk: Disk) -> None:
        super().__init__(root)
        self.world: StoredWorld = world
        self.disk = disk

    def boot(self) -> bool:
        """Run one process; return whether the machine may join."""
        self.again = record_start(HostFiles(Root(self.root), self.disk))
        try:
            return self.first_boot().run()
        except WentDown:
            self.world.reboot()
            return False


class FirstBootRun:
    """Runs one first boot in directories below ``top``; see `ScenarioRun`."""

    twists: tuple[Twist, ...] = ()

    def __init__(self, scenario: FirstBoot, top: Path) -> None:
        self._top = top
        self._runs = 0
        self._world = StoredWorld(booted=A.digest)
        # No node is in service yet.
        self._world.unschedulable = True
        self._world.annotations[key.LAST_APPLIED_DRAIN] = "drain-x"
        self._world.vendor[B.digest] = {
            path: Entry("file", 0o644, text.encode()) for path, text in scenario.vendor
        }
        with open_directory(top, "provisioned", {}) as (root, _):
            scenario.prepare(provision(root))
            write_entries(root, {path: each for path, each in OTHERS.items() if path != "/run"})
            self._tree = read_tree(root)
        self._before_tree = {
            path: entry
            for path, entry in self._tree.items()
            if path in OTHERS or (entry.kind == DIRECTORY and not path.startswith(_MADE))
        }
        self.outcome: Outcome = self.run()

    def run(
        self,
        handle: Callable[[CrashState], None] | None = None,
        *,
        limit: int = 0,
        omitted: frozenset[Site] = frozenset(),
        omitted_write: int = -1,
        known: frozenset[object] = frozenset(),
    ) -> Outcome:
        """Boot until the machine may join; see `ScenarioRun.run`.

        States on which Ignition runs again are left out.
        """
        assert omitted_write < 0, "a first boot writes no ledger"
        with self._open_recorded() as (root, recorder), repeat_randomness():
            recorder.omitted = omitted
            world = self._world.take_snapshot()
            world.attach(DirectoryDisk(root, pause=recorder.pause, numbers=recorder.numbers))
            host = StoredHost(root, world, NumberedDisk(recorder.numbers))
            before = select_kept(read_tree(root))
            seen = set(known)

            def visit(call: str) -> None:
                if handle is None or (omitted and not recorder.omitted_calls):
                    return
                for state in list_states(recorder, world, 0.0, call, limit):
                    name = identify_state(state)
                    if name not in seen:
                        seen.add(name)
                        if self._is_before_first_boot(state):
                            continue
                        with recorder.suspend():
                            handle(state)

            recorder.on_call = visit
            world.fault_point = visit
            with recorder.record():
                assert any(host.boot() for _ in range(BOOTS)), "the machine does not join"
                visit("end")
            assert recorder.find_unseen_changes() == []
            after = select_kept(read_tree(root))
            return Outcome(
                before,
                after,
                {},
                world.take_snapshot(),
                recorder.sites,
                (),
                frozenset(seen - known),
            )

    @contextmanager
    def _open_recorded(self) -> Iterator[tuple[Path, Recorder]]:
        """Make the machine as Ignition leaves it: its files are not flushed."""
        with open_directory(self._top, "recorded", self._before_tree) as (root, _):
            recorder = Recorder(root)
            of_ignition = self._tree.keys() - self._before_tree.keys()
            write_tree(root, {path: self._tree[path] for path in of_ignition})
            recorder.take_as_unflushed()
            yield root, recorder

    def check_state(
        self, state: CrashState, *, until_rest: bool = True, twist: Twist | None = None
    ) -> list[str]:
        """Boot the machine until it joins, and start once more; return what is wrong."""
        assert twist is None, "nothing else happens in a first boot"
        wrong = self._find_lost(state.tree)
        with open_directory(self._top, self._name_next(), state.tree) as (root, numbers):
            world = state.world.take_snapshot()
            world.attach(DirectoryDisk(root, numbers=numbers))
            if state.is_power_cut:
                world.power_cut()
            elif world.is_going_down:
                # The process died between its two requests of the reboot.
                world.reboot()
            host = StoredHost(root, world, NumberedDisk(numbers))
            try:
                wrong += self._check_boots(host, until_rest=until_rest)
            except TreenailError as error:
                wrong.append(f"{type(error).__name__}: {error}")
        return wrong

    def _check_boots(self, host: StoredHost, *, until_rest: bool) -> list[str]:
        for _ in range(BOOTS):
            joined = host.boot()
            marked = (host.root / DONE_FILE[1:]).exists()
            if joined:
                break
            if marked and host.world.booted != B.digest:
                return [f"{DONE_FILE} exists before the image is booted"]
            if not until_rest and marked:
                return []
        else:
            return [f"the machine does not join: {host.statuses[-1]!r:.200}"]
        # The first action of the agent, which starts now: a committed change may leave its log.
        recover_interrupted(StepRunner(make_machine(Root(host.root), host.disk)))
        tree = read_tree(host.root)
        wrong = [f"joined with {host.world.booted}"] * (host.world.booted != B.digest)
        wrong += [] if marked else [f"joined without {DONE_FILE}"]
        if differing := differ(select_kept(tree), self.outcome.after):
            wrong.append(f"at the end: {differing}")
        hidden = [path for path in tree if "/.treenail" in path or "/undo/" in path]
        if hidden:
            wrong.append(f"left over: {hidden}")
        if until_rest:
            host.boot()
            if differing := differ(select_kept(read_tree(host.root)), select_kept(tree)):
                wrong.append(f"the second start changed something: {differing}")
        return wrong

    def _find_lost(self, tree: Tree) -> list[str]:
        """Find files of Ignition that are lost; no later start can write the bootstrap ones."""
        contents = {path: entry.version.content.decode() for path, entry in tree.items()}
        expected = {path: text for path, text in (FILES | BOOTSTRAP).items() if path in self._tree}
        return [f"{path} is lost" for path, text in expected.items() if contents.get(path) != text]

    def _is_before_first_boot(self, state: CrashState) -> bool:
        """Return whether Ignition runs again: its files are lost, and nothing else is durable."""
        marks = {DONE_FILE, STATE_FILE}
        return (
            state.is_power_cut
            and state.world.boots == 1
            and marks.isdisjoint(state.tree)
            and any(
                state.tree.get(path, entry).version != entry.version or path not in state.tree
                for path, entry in self._tree.items()
                if path not in self._before_tree
            )
        )

    def _name_next(self) -> str:
        self._runs += 1
        return str(self._runs)


def select_kept(tree: Tree) -> Visible:
    """Return all that outlives a boot, but for the state of the first boot itself."""
    left_out = {STATE_FILE, "/var/lib/treenail/lock", "/etc/.pwd.lock"}
    return {
        path: VisibleEntry(entry.kind, entry.version)
        for path, entry in tree.items()
        if not path.startswith(_VOLATILE) and path not in left_out and "/.treenail-" not in path
    }
