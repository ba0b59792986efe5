"""Enumerates the states that crashes leave, and starts the agent on each of them."""

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pytest

from tests.crash.disk_model import Tree
from tests.crash.ledger_checks import find_wrong_ledger, read_ledger
from tests.crash.recorder import Recorder, Site, read_tree
from tests.crash.scenarios import BAKED_FILE, DEGRADED, OLD, Scenario, Twist, make_world, request
from tests.crash.stored import (
    STATUS_PATH,
    DirectoryDisk,
    StoredNode,
    StoredWorld,
    VisibleEntry,
    make_directory,
    select_state,
    select_visible,
    write_tree,
)
from treenail.api import annotations as key
from treenail.errors import TreenailError
from treenail.host.rollback.undo_log import UNDO_DIRECTORY
from treenail.host.system.state_file import LEDGER_PATH
from treenail.update.state.ledger_record import LedgerRecord

TURNS_LIMIT = 80
Visible = dict[str, VisibleEntry]


@dataclass(frozen=True, slots=True)
class CrashState:
    """The machine that the next start of the agent finds."""

    tree: Tree
    world: StoredWorld
    clock: float
    is_power_cut: bool
    """False: only the process was killed."""
    story: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run without a crash."""

    before: Visible
    after: Visible
    state: Visible
    """The state of treenail at the end."""
    world: StoredWorld
    sites: dict[Site, int]
    ledger_calls: tuple[str, ...]
    """The phase of the update in each ledger write, and the functions that lead to it."""
    states: frozenset[object]
    """The identities of the states that were passed on."""
    ledger: LedgerRecord = field(default_factory=LedgerRecord)
    """The ledger at the end."""


class CrashRun(Protocol):
    """Runs one change of a machine, and checks the states that crashes in it leave."""

    outcome: Outcome
    twists: tuple[Twist, ...]

    def run(
        self,
        handle: Callable[[CrashState], None] | None = None,
        *,
        limit: int = 0,
        omitted: frozenset[Site] = frozenset(),
        omitted_write: int = -1,
        known: frozenset[object] = frozenset(),
    ) -> Outcome: ...

    def check_state(
        self, state: CrashState, *, until_rest: bool = True, twist: Twist | None = None
    ) -> list[str]: ...


class ScenarioRun:
    """Runs one scenario in directories below ``top``."""

    def __init__(self, scenario: Scenario, top: Path) -> None:
        self.scenario = scenario
        self.twists = scenario.twists
        self._top = top
        self._base = top / "base"
        self._base.mkdir()
        make_directory(self._base)
        world = make_world(scenario.before)
        world.attach(DirectoryDisk(self._base))
        node = StoredNode(world)
        self._settle(node, lambda: world.annotations.get(key.STATE) == "Done")
        scenario.prepare(self._base)
        self._world, self._clock = world.take_snapshot(), node.clock.now()
        self._base_tree = read_tree(self._base)
        self._runs = 0
        self._good: dict[Twist | None, set[object]] = {}
        self._passed: Visible = {}
        """The tree of a target that fails at its last step or in its boot trial."""
        self._passed_digest = ""
        if scenario.passed is not None:
            below = top / "passed"
            below.mkdir()
            passed = Scenario("passed", request(scenario.passed), scenario.passed)
            outcome = ScenarioRun(passed, below).outcome
            self._passed, self._passed_digest = outcome.after, outcome.world.system.digest
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
        """Make the change, and pass each state that a crash may leave to ``handle``.

        At each call at most ``limit`` states of a power cut are made, and one of a kill. States
        before the first omitted call, and those whose identity is ``known``, are left out.
        """
        is_mutated = bool(omitted) or omitted_write >= 0
        with (
            open_directory(self._top, "recorded", self._base_tree) as (root, _),
            repeat_randomness(),
        ):
            world = self._world.take_snapshot()
            recorder = Recorder(root, omitted=omitted)
            world.attach(DirectoryDisk(root, pause=recorder.pause, numbers=recorder.numbers))
            world.omitted_write = omitted_write
            node = StoredNode(world)
            node.clock.move(self._clock - node.clock.now())
            self.scenario.change(world, root)
            recorder.forget_history()
            before = select_visible(read_tree(root))
            seen = set(known)

            def visit(call: str) -> None:
                has_begun = recorder.omitted_calls or 0 <= omitted_write < world.ledger_writes
                if handle is None or (is_mutated and not has_begun):
                    return
                for state in list_states(recorder, world, node.clock.now(), call, limit):
                    name = identify_state(state)
                    if name not in seen:
                        seen.add(name)
                        with recorder.suspend():
                            handle(state)

            recorder.on_call = visit
            world.fault_point = visit
            with recorder.record():
                self._settle(node, lambda: self._is_settled(world))
                visit("end")
            unseen = recorder.find_unseen_changes()
            assert unseen == [], unseen
            tree = read_tree(root)
            return Outcome(
                before,
                select_visible(tree),
                select_state(tree),
                world.take_snapshot(),
                recorder.sites,
                tuple(world.ledger_calls),
                frozenset(seen - known),
                read_ledger(_read_json(root / LEDGER_PATH[1:])),
            )

    def _is_settled(self, world: StoredWorld) -> bool:
        return world.annotations.get(key.STATE) == self.scenario.state and (
            self.scenario.state != "Done"
            or world.annotations[key.CURRENT_CONFIG] == world.annotations[key.DESIRED_CONFIG]
        )

    def _settle(self, node: StoredNode, is_settled: Callable[[], bool]) -> None:
        calm, before = 0, ""
        for _ in range(TURNS_LIMIT):
            assert isinstance(node.world, StoredWorld)
            node.world.drain_controller()
            self.scenario.during(node.world)
            node.turn()
            now = node.world.describe()
            calm = calm + 1 if now == before and is_settled() and node.process else 0
            if calm == self.scenario.turns:
                return
            before = now
        raise AssertionError(f"does not come to rest: {node.world.annotations}")

    # The check of a state.

    def check_state(
        self, state: CrashState, *, until_rest: bool = True, twist: Twist | None = None
    ) -> list[str]:
        """Start the agent on the state, by default until it is at rest; return what is wrong.

        A start on a machine that was well before ends the check. With a ``twist`` the machine may
        come to rest at either target, but not between them.
        """
        wrong = self._find_torn(state)
        good = self._good.setdefault(twist, set())
        with open_directory(self._top, self._name_next(), state.tree) as (root, numbers):
            world = state.world.take_snapshot()
            world.attach(DirectoryDisk(root, numbers=numbers))
            if state.is_power_cut:
                world.power_cut()
            if twist is not None:
                twist.change(world)
            starts: set[object] = set()

            def check_start() -> None:
                tree = read_tree(root)
                is_new_boot = state.is_power_cut or world.boots != state.world.boots
                wrong.extend(self._find_mixed(root, tree, world, is_new_boot=is_new_boot))
                starts.add(name := (world.describe(), _describe_tree(tree)))
                if name in good or not until_rest:
                    raise _KnownError

            node = StoredNode(world, check_start)
            node.clock.move(state.clock - node.clock.now())
            try:
                if twist is None:
                    self._settle_checked(node, root, wrong, is_power_cut=state.is_power_cut)
                else:
                    self._settle_at_either(node, root, wrong)
            except _KnownError:
                pass
            except (AssertionError, TreenailError) as error:
                wrong.append(f"{type(error).__name__}: {error}")
            if until_rest and not wrong:
                good |= starts
        return wrong

    def _settle_checked(
        self, node: StoredNode, root: Path, wrong: list[str], *, is_power_cut: bool
    ) -> None:
        world = node.world
        assert isinstance(world, StoredWorld)

        def is_settled() -> bool:
            wrong.extend(self._find_untrue(root, world))
            return self._is_settled(world)

        self._settle(node, is_settled)
        wrong += self._find_wrong_end(root, world)
        ledger = read_ledger(_read_json(root / LEDGER_PATH[1:]))
        wrong += find_wrong_ledger(
            ledger, self.outcome.ledger, world.pins, is_power_cut=is_power_cut
        )
        ended = read_tree(root), dict(world.annotations), world.system
        node.process = None
        for _ in range(2):
            node.turn()
        tree = read_tree(root)
        again = tree, dict(world.annotations), world.system
        if (again[1:], _select_compared(again[0])) != (ended[1:], _select_compared(ended[0])):
            paths = differ(_select_compared(again[0]), _select_compared(ended[0]))
            wrong.append(f"the second start changed something: {paths}")

    def _settle_at_either(self, node: StoredNode, root: Path, wrong: list[str]) -> None:
        """Check that the machine has all of one target, and keeps it in a reboot."""
        world = node.world
        assert isinstance(world, StoredWorld)

        def is_settled() -> bool:
            wrong.extend(self._find_untrue(root, world))
            is_over = read_ledger(_read_json(root / LEDGER_PATH[1:])).update is None
            return is_over and world.annotations.get(key.STATE) in {"Done", DEGRADED}

        for cause in ("", "after a reboot "):
            self._settle(node, is_settled)
            reported = world.annotations[key.CURRENT_CONFIG]
            expected, digest = self._get_expected(reported)
            tree = read_tree(root)
            if differing := differ(select_visible(tree), expected):
                wrong.append(f"{cause}at rest at {reported}: {differing}")
            if world.system.digest != digest or world.staging or world.unschedulable:
                wrong.append(f"{cause}at rest at {reported}: {world.system}, {world.staging}")
            wrong += _find_hidden(tree)
            node.process = None
            world.reboot()

    def _find_torn(self, state: CrashState) -> list[str]:
        """Find entries that are neither old nor new, which programs see that start earlier."""
        before, after = self._outcomes()
        found = select_visible(state.tree)
        return [
            f"{path} is torn: {found.get(path)}"
            for path in differ(found, before)
            if found.get(path) != after.get(path)
            and found.get(path) != self._passed.get(path)
            # A new directory may still be without its mode, and systemd's links go apart.
            and not (path not in before and (after | self._passed)[path].kind == "directory")
            and not (path not in found and ".wants/" in path)
        ]

    def _outcomes(self) -> tuple[Visible, Visible]:
        return self.outcome.before, self.outcome.after

    def _find_mixed(
        self, root: Path, tree: Tree, world: StoredWorld, *, is_new_boot: bool
    ) -> list[str]:
        """Check the tree that the kubelet finds: all old or all new, and as the Node says."""
        now, digest = select_visible(tree), world.system.digest
        allowed = self._list_allowed(world, is_new_boot=is_new_boot)
        if now not in [each for each, _ in allowed]:
            nearest = min((differ(now, each) for each, _ in allowed), key=len)
            return [f"after the start neither old nor new: {nearest}"]
        if (now, digest) not in allowed:
            return [f"after the start the tree of another image: {digest}"]
        return self._find_untrue(root, world)

    def _list_allowed(self, world: StoredWorld, *, is_new_boot: bool) -> list[tuple[Visible, str]]:
        """Return the trees that a start may leave, each with the digest of its image."""
        before, after = self._outcomes()
        old, new = self._world.system.digest, self.outcome.world.system.digest
        allowed = [(before, old), (after, new)]
        if self.scenario.passed_starts:
            allowed.append((self._passed, self._passed_digest))
        if world.unschedulable and not is_new_boot:
            # Out of service, the files come before the reboot into their image.
            allowed += [(each, old) for each, _ in allowed]
        if world.unschedulable and BAKED_FILE in after:
            # Out of service, the image's file comes with the reboot, and the agent's before it.
            without = {path: each for path, each in after.items() if path != BAKED_FILE}
            allowed += [(without, old), (before | {BAKED_FILE: after[BAKED_FILE]}, new)]
        return allowed

    def _find_untrue(self, root: Path, world: StoredWorld) -> list[str]:
        """Find statements of Node and status file that are not true."""
        if world.violations:
            return [f"violation: {world.violations}"]
        wrong: list[str] = []
        reported = world.annotations.get(key.CURRENT_CONFIG)
        if world.annotations.get(key.STATE) == "Done" and self.scenario.change_is_update:
            now = select_visible(read_tree(root))
            expected, digest = self._get_expected(str(reported))
            if now != expected:
                wrong.append(f"Done at {reported} is reported: {differ(now, expected)}")
            if world.system.digest != digest:
                wrong.append(f"Done at {reported} is reported with {world.system.digest[:12]}")
        status = _read_json(root / STATUS_PATH[1:])
        ledger = _read_json(root / LEDGER_PATH[1:])
        shown, kept = _get_current(status), _get_current(ledger)
        if shown and shown != kept:
            wrong.append(f"the status shows {shown}, the ledger has {kept}")
        return wrong

    def _get_expected(self, config: str) -> tuple[Visible, str]:
        """Return the tree of the target with this config, and the digest of its image."""
        before, after = self._outcomes()
        if config == self.scenario.before.config:
            return before, self._world.system.digest
        if self.scenario.passed is not None and config == self.scenario.passed.config:
            return self._passed, self._passed_digest
        return after, self.outcome.world.system.digest

    def _find_wrong_end(self, root: Path, world: StoredWorld) -> list[str]:
        tree, end = read_tree(root), self.outcome.world
        wrong = []
        if select_visible(tree) != self.outcome.after:
            wrong.append(f"at the end: {differ(select_visible(tree), self.outcome.after)}")
        differing = differ(select_state(tree), self.outcome.state)
        # The next update prunes the cache again.
        if differing := [path for path in differing if not path.startswith(_OLD_CACHE)]:
            wrong.append(f"treenail's state: {differing}")
        wrong += _find_hidden(tree)
        names = (key.STATE, key.CURRENT_CONFIG, key.CURRENT_OS_IMAGE)
        wrong += [
            f"{name} is {world.annotations.get(name)}"
            for name in names
            if world.annotations.get(name) != end.annotations.get(name)
        ]
        if world.drains > end.drains:
            wrong.append(f"drained {world.drains} times, expected {end.drains}")
        if world.system.digest != end.system.digest or world.staging or world.unschedulable:
            wrong.append(f"OS: {world.system}, {world.staging}, cordoned {world.unschedulable}")
        return wrong

    def _name_next(self) -> str:
        self._runs += 1
        return str(self._runs)


def list_states(
    recorder: Recorder, world: StoredWorld, now: float, call: str, limit: int
) -> Iterator[CrashState]:
    """Yield what a kill and a power cut before the call may leave."""
    recorder.model.flush_below("/run")
    snapshot = world.take_snapshot()
    story = f"call {recorder.calls}, before {call}"
    yield CrashState(recorder.model.read_tree(), snapshot, now, False, f"killed at {story}")
    for tree in recorder.model.list_trees(limit, recorder.calls):
        # /run is in memory.
        kept = {path: each for path, each in tree.items() if not path.startswith("/run/")}
        yield CrashState(kept, snapshot, now, True, f"power cut at {story}")


@contextmanager
def open_directory(top: Path, name: str, tree: Tree) -> Iterator[tuple[Path, dict[int, int]]]:
    """Write the tree to a directory, which is removed at the end; also yield its inode numbers."""
    root = top / name
    root.mkdir()
    try:
        yield root, write_tree(root, tree)
    finally:
        shutil.rmtree(root)


@contextmanager
def repeat_randomness() -> Iterator[None]:
    """Repeat the IDs of updates and the delays of retries, so that two runs can be compared."""
    ids = itertools.count(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secrets.token_hex", lambda size: f"{next(ids):0{2 * size}x}")
        patch.setattr("random.uniform", lambda low, high: (low + high) / 2)
        yield


_OLD_CACHE = f"/var/lib/treenail/configs/{OLD.config}."
_TIMES = re.compile(r"\b[0-9]+[.][0-9]+\b|crc32:[0-9a-f]+|\b[0-9a-f]{32}\b")


class _KnownError(BaseException):
    """The agent was started on the same machine before, and all was well."""


def identify_state(state: CrashState) -> object:
    numbers = any(path.startswith(f"{UNDO_DIRECTORY}/") for path in state.tree)
    content = frozenset(
        (path, kind, version, number if numbers else 0)
        for path, (kind, version, number) in state.tree.items()
    )
    return state.is_power_cut, hash(content), state.world.describe()


def _describe_tree(tree: Tree) -> str:
    """Describe what a start depends on: all but times, and inode numbers without an undo log."""
    needs_numbers = any(path.startswith(f"{UNDO_DIRECTORY}/") for path in tree)
    described = sorted(
        # The next write removes a temporary file, whatever it contains.
        (
            path,
            each.kind,
            "" if "/.treenail-" in path else each.version,
            each.number if needs_numbers else 0,
        )
        for path, each in tree.items()
        if not path.startswith("/run/")
    )
    return _TIMES.sub("", repr(described))


def _select_compared(tree: Tree) -> Visible:
    return select_visible(tree) | select_state(tree)


def differ(one: Visible, other: Visible) -> list[str]:
    return sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))


def _get_current(document: dict[str, object] | None) -> str:
    """Return the current config of a status file or ledger; empty without one."""
    current = (document or {}).get("current")
    return str(current.get("config", "")) if isinstance(current, dict) else ""


def _find_hidden(tree: Tree) -> list[str]:
    hidden = [path for path in tree if "/.treenail" in path or f"{UNDO_DIRECTORY}/" in path]
    return [f"left over: {hidden}"] * bool(hidden)


def _read_json(path: Path) -> dict[str, object] | None:
    try:
        found: dict[str, object] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found
