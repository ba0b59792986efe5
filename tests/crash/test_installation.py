"""The state of an installation and the files of its steps, after every crash.

The real runner of the steps writes the state; each step here writes files as those of the stage
``bootstrap`` do. Every process may be killed at any call, and the power may go at any later one.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.crash.disk_model import FILE, Tree
from tests.crash.recorder import FLUSHES, RENAMES, Recorder, Site
from tests.crash.stored import write_tree
from tests.daemon import walk_budget
from tests.fakes.clock import FakeClock
from tests.records import write_record
from treenail.errors import TreenailError
from treenail.installer.directory.install_files import InstallDirectory, InstallFiles
from treenail.installer.directory.install_state import InstallState, StepState, hold_install_lock
from treenail.installer.install_steps import InstallStepRunner, Step, StepContext, StepLimit

OTHERS = {"manifests/user.yaml": b"of the user", ".others": b"of another program"}
OUTPUTS = {
    "render": {"machine-configs/rendered.yaml": b"config", "machine-pools/master.yaml": b"pool"},
    "build:master": {".treenail/builds/master/image.json": b"digest"},
}
LIMIT = 200


class KilledError(BaseException):
    """The process was killed."""


class WritingStep:
    """A step that writes its files, and resumes if they exist."""

    limit: StepLimit | None = None

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.title = f"write the files of {name}"
        self._root = root

    def compute_inputs(self) -> Mapping[str, str]:
        return {"user.yaml": "sha256:0"}

    def resume(self, result: Mapping[str, str]) -> bool:
        return all((self._root / path).exists() for path in result)

    def run(self, context: StepContext) -> Mapping[str, str]:
        for path, content in OUTPUTS[self.name].items():
            InstallFiles().write(self._root / path, content, mode=0o644)
        return dict.fromkeys(OUTPUTS[self.name], "written")


class SilentObserver:
    """Publishes nothing."""

    def begin_step(self, step: Step) -> None:
        pass

    def report(self, text: str) -> None:
        pass

    def end_step(self, step: Step) -> None:
        pass

    def fail_step(self, step: Step, error: TreenailError) -> None:
        raise error


def install(root: Path) -> InstallState:
    """Run the steps as the stage does; continue what an earlier process began."""
    directory, files, clock = InstallDirectory(root), InstallFiles(), FakeClock()
    with hold_install_lock(directory, files):
        state = InstallState(directory, files, clock)
        runner = InstallStepRunner(state, SilentObserver(), clock)
        for name in OUTPUTS:
            runner.run_step(WritingStep(name, root))
    return state


def make_directory(root: Path) -> None:
    for path, content in OTHERS.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


def find_wrong(tree: Tree, *, is_complete: bool, scratch: Path) -> list[str]:
    """Start on what a power cut left; ``is_complete``: the installation had ended before."""
    contents = {path[1:]: each.version.content for path, each in tree.items() if each.kind == FILE}
    outputs = {path: content for each in OUTPUTS.values() for path, content in each.items()}
    wrong = [
        f"{path} is torn"
        for path, content in outputs.items()
        if contents.get(path, content) != content
    ]
    scratch.mkdir()
    write_tree(scratch, tree)
    try:
        if (scratch / ".treenail/install.json").exists():
            found = InstallState(InstallDirectory(scratch), InstallFiles(), FakeClock()).record
            done = [each.name for each in found.steps if each.state is StepState.DONE]
        else:
            done = []
        wrong += [
            f"{name} is done without {path}"
            for name in done
            for path in OUTPUTS[name]
            if path not in contents
        ]
        if is_complete and done != list(OUTPUTS):
            wrong.append(f"only {done} are done after the end")
        state = install(scratch)
        wrong += [f"{each.name} is {each.state}" for each in state.record.steps
                  if each.state is not StepState.DONE]  # fmt: skip
        files = {path: (scratch / path).read_bytes() for path in (*OTHERS, *outputs)}
        if files != {**OTHERS, **outputs}:
            wrong.append(f"at the end: {files}")
        before = {path: path.read_bytes() for path in scratch.rglob("*") if path.is_file()}
        install(scratch)
        if before != {path: path.read_bytes() for path in scratch.rglob("*") if path.is_file()}:
            wrong.append("the second start changed something")
    except TreenailError as error:
        wrong.append(f"the start failed: {error}")
    return wrong


class Enumeration:
    """The states of one installation whose first process is killed at a call, or not at all."""

    def __init__(self, top: Path, omitted: frozenset[Site] = frozenset()) -> None:
        self.top = top
        self.omitted = omitted
        self.wrong: list[str] = []
        self.sites: set[Site] = set()
        self.calls = 0
        self._seen: set[object] = set()

    @property
    def states(self) -> int:
        return len(self._seen)

    def check(self, kill_at: int | None = None, *, limit: int = LIMIT) -> None:
        """Check each state from the kill on; without a kill from the beginning on."""
        root = self.top / f"root-{kill_at}"
        root.mkdir()
        make_directory(root)
        recorder = Recorder(root, omitted=self.omitted)
        is_killed = kill_at is None

        def visit(call: str, *, is_complete: bool = False) -> None:
            nonlocal is_killed
            if is_killed:
                with recorder.suspend():
                    self._check_trees(recorder, f"{call}, killed at {kill_at}", limit, is_complete)
            elif recorder.calls == kill_at:
                is_killed = True
                raise KilledError

        recorder.on_call = visit
        with recorder.record():
            for _ in range(1 if kill_at is None else 2):
                try:
                    install(root)
                except KilledError:
                    continue
            visit("end", is_complete=True)
        self.calls = recorder.calls
        self.sites |= recorder.sites.keys()

    def _check_trees(self, recorder: Recorder, story: str, limit: int, is_complete: bool) -> None:
        for tree in recorder.model.list_trees(limit, recorder.calls):
            content = {(path, each.kind, each.version) for path, each in tree.items()}
            name = is_complete, frozenset(content)
            if name not in self._seen:
                self._seen.add(name)
                scratch = self.top / f"state-{len(self._seen)}"
                found = find_wrong(tree, is_complete=is_complete, scratch=scratch)
                self.wrong += [f"{story}: {each}" for each in found]


def test_installation_continues_after_power_cut_at_any_call(tmp_path: Path) -> None:
    found = Enumeration(tmp_path)
    found.check(limit=4)
    assert found.states > 50
    assert found.wrong == []


@walk_budget.exhaustive
def test_installation_continues_after_kill_and_power_cut(tmp_path: Path) -> None:
    found = Enumeration(tmp_path)
    found.check(limit=1)
    for call in walk_budget.sample(range(found.calls)):
        found.check(call, limit=3)
    assert found.wrong == []


def test_directory_of_killed_process_outlives_power_cut(tmp_path: Path) -> None:
    root = tmp_path / "dry"
    root.mkdir()
    make_directory(root)
    calls: list[str] = []
    recorder = Recorder(root)
    recorder.on_call = calls.append
    with recorder.record():
        install(root)
    last = max(number for number, call in enumerate(calls) if call.startswith("mkdir "))
    found = Enumeration(tmp_path)
    found.check(last + 1, limit=2)
    assert found.wrong == []


@pytest.mark.long
@pytest.mark.limit(7200)
def test_every_crash_of_an_installation_is_recovered(tmp_path: Path) -> None:
    found = Enumeration(tmp_path)
    found.check()
    for call in range(found.calls):
        found.check(call, limit=20)
    assert found.wrong == []
    write_record(
        "crash",
        what="crash states of an installation",
        count=found.states,
        result="each start continues the installation",
        command="make test-long ARGS='tests/crash/test_installation.py'",
    )


def list_sites(top: Path) -> dict[tuple[str, ...], frozenset[Site]]:
    """Group the sites of flushes and renames by the functions that name it."""
    found = Enumeration(top)
    found.check(limit=1)
    grouped: dict[tuple[str, ...], frozenset[Site]] = {}
    for site in found.sites:
        if site.call in {*FLUSHES, *RENAMES}:
            inner = (site.call, *site.functions[-3:])
            grouped[inner] = grouped.get(inner, frozenset()) | {site}
    return dict(sorted(grouped.items()))


def is_noticed(top: Path, sites: frozenset[Site]) -> bool:
    top.mkdir()
    found = Enumeration(top, sites)
    try:
        found.check(limit=6)
    except (OSError, TreenailError):
        return True
    return bool(found.wrong)


@walk_budget.exhaustive
def test_omitted_flush_or_rename_of_the_installation_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    sites = list_sites(tmp_path / "sites")
    assert len(sites) > 3
    missed = [
        names
        for number, names in enumerate(walk_budget.sample(list(sites)))
        if not is_noticed(tmp_path / str(number), sites[names])
    ]
    assert missed == []
