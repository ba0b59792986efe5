"""An upgrade pod installs the agent on a host without treenail, and can be killed anywhere."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from treenail.api.hosted.node_mode import INSTALLED_PATH, PATH, HostedMode
from treenail.cli.node.main import adapt_arguments, create_parser
from treenail.cli.node.run import is_update_over
from treenail.daemon import upgrade_pod
from treenail.daemon.cluster.hosted_client import read_mode
from treenail.errors import UsageError
from treenail.host.filesystem import selinux
from treenail.host.filesystem.atomic_files import FileSpec, HostFiles
from treenail.host.filesystem.root_directory import Root

SOURCE = Path(__file__).parents[2]
MODE = HostedMode("np", "np-upgrade")
OPTIONS = "--node-name n1 --kubeconfig /var/lib/kubelet/kubeconfig"
PROGRAM, UNIT = "usr/bin/treenail", f"etc/systemd/system/{upgrade_pod.UNIT}"


class KilledError(Exception):
    """The pod was killed."""


class Kill:
    """Kills the pod at this point; the first one is 1. A step has one before and one after it."""

    def __init__(self, point: int = 0) -> None:
        self.left = point

    def reach(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KilledError

    @contextmanager
    def step(self) -> Iterator[None]:
        self.reach()
        yield
        self.reach()


class PodFiles(HostFiles):
    """The files of the host, as a pod that may be killed writes them."""

    def __init__(self, root: Root, kill: Kill) -> None:
        super().__init__(root)
        self._kill = kill

    def write_files(self, files: Sequence[FileSpec]) -> tuple[str, ...]:
        with self._kill.step():
            return super().write_files(files)

    def make_symlink(self, path: str, target: str) -> bool:
        with self._kill.step():
            return super().make_symlink(path, target)


class PodPolicy(selinux.SelinuxPolicy):
    """A policy without labels; the pod may be killed in the middle of the copy."""

    def __init__(self, kill: Kill) -> None:
        self._kill = kill
        self.paths: list[str] = []

    def find_default_label(self, path: str, mode: int) -> bytes:
        self.paths.append(path)
        if path == f"/{PROGRAM}":
            self._kill.reach()
        return b""


class HostSystemd:
    """The units of the host; a start runs what the unit file and the tree are then."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._loaded = ""
        self.running = ""
        """The unit and the program that run."""
        self.starts = 0
        self.has_own_agent = False
        self.kill = Kill()

    def list_units(self, *names: str) -> tuple[Any, ...]:
        active = {upgrade_pod.UNIT: bool(self.running), "treenail.service": self.has_own_agent}
        states = ("inactive", "active")
        return tuple(SimpleNamespace(active_state=states[active[name]]) for name in names)

    def reload_daemon(self) -> None:
        with self.kill.step():
            self._loaded = (self._root / UNIT).read_text()

    def restart_unit(self, name: str) -> None:
        assert name == upgrade_pod.UNIT
        with self.kill.step():
            program = self._root / upgrade_pod.CURRENT[1:] / PROGRAM
            self.running = self._loaded + program.read_text()
            self.starts += 1


class Host:
    """A host; ``kill`` ends the pod that installs on it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "etc/systemd/system/multi-user.target.wants").mkdir(parents=True)
        (directory / "var/lib/treenail").mkdir(parents=True)
        self.root = Root(directory)
        self.systemd = HostSystemd(directory)

    def install(self, tree: Path, kill: Kill | None = None) -> None:
        self.systemd.kill = kill = kill or Kill()
        files = PodFiles(self.root, kill)
        machine: Any = SimpleNamespace(root=self.root, files=files, systemd=self.systemd)

        self.policy = PodPolicy(kill)
        upgrade_pod.install_agent(machine, tree, MODE, OPTIONS, self.policy)

    def list_content(self) -> dict[str, str]:
        """Return every file and link of the host."""
        return {
            str(path.relative_to(self.directory)): str(path.readlink())
            if path.is_symlink()
            else path.read_text()
            for path in sorted(self.directory.rglob("*"))
            if path.is_symlink() or path.is_file()
        }


@pytest.fixture
def make_tree(tmp_path: Path) -> Callable[[str], Path]:
    """Make a tree of a version, as the image of the pod has it."""

    def make(version: str) -> Path:
        tree = tmp_path / f"tree-{version}"
        packaged = (SOURCE / "systemd/treenail.service").read_text()
        texts = {
            PROGRAM: f"#!treenail {version}",
            "usr/lib/treenail/packages/a.py": version,
            "usr/lib/systemd/system/treenail.service": packaged,
        }
        for path, text in texts.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text)
        return tree

    return make


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "host")


MakeTree = Callable[[str], Path]


def test_install_starts_the_agent_once(host: Host, make_tree: MakeTree) -> None:
    host.install(make_tree("1"))
    assert read_mode(host.root) == MODE
    unit = (host.directory / UNIT).read_text()
    assert f"ExecStart={upgrade_pod.CURRENT}/usr/bin/treenail run --until-done {OPTIONS}\n" in unit
    assert "Before=crio.service kubelet.service" in unit
    assert "ExecStart=/usr/bin/treenail" not in unit
    content = host.list_content()
    host.install(make_tree("1"))
    assert (host.systemd.starts, host.list_content()) == (1, content)


def test_another_version_replaces_the_tree(host: Host, make_tree: MakeTree) -> None:
    host.install(make_tree("1"))
    host.install(make_tree("2"))
    assert host.systemd.starts == 2
    assert host.systemd.running.endswith("#!treenail 2")
    trees = [path for path in host.list_content() if path.endswith(PROGRAM)]
    assert len(trees) == 1


@pytest.mark.parametrize("is_upgrade", [False, True])
def test_killed_pod_is_continued_by_the_next(
    tmp_path: Path, make_tree: MakeTree, *, is_upgrade: bool
) -> None:
    undisturbed = Host(tmp_path / "undisturbed")
    if is_upgrade:
        undisturbed.install(make_tree("1"))
    undisturbed.install(make_tree("2"))
    kills = 0
    for point in range(1, 20):
        host = Host(tmp_path / f"host-{point}")
        if is_upgrade:
            host.install(make_tree("1"))
        try:
            host.install(make_tree("2"), Kill(point))
        except KilledError:
            kills += 1
        host.install(make_tree("2"))
        assert host.list_content() == undisturbed.list_content(), point
        assert host.systemd.running == undisturbed.systemd.running, point
    assert kills == 13


def test_host_with_an_agent_needs_the_mode_only(host: Host, make_tree: MakeTree) -> None:
    host.systemd.has_own_agent = True
    host.install(make_tree("1"))
    assert list(host.list_content()) == [INSTALLED_PATH[1:]]
    assert host.systemd.starts == 0


def test_labels_are_those_of_the_paths_below_the_root(host: Host, make_tree: MakeTree) -> None:
    tree = make_tree("1")
    host.install(tree)
    paths = [f"/{path.relative_to(tree)}" for path in sorted(tree.rglob("*"))]
    assert host.policy.paths == paths


def test_host_policy_is_that_below_the_root(tmp_path: Path) -> None:
    root = Root(tmp_path)
    assert selinux.load_host_policy(root) is None
    (tmp_path / "etc/selinux").mkdir(parents=True)
    (tmp_path / "etc/selinux/config").write_text("SELINUX=enforcing\nSELINUXTYPE=mls\n")
    assert selinux.load_host_policy(root) is None


# Exit status of the agent, and what its unit leaves.
ENDS = [("6", False), ("203", False), ("0", True), ("1", True), ("KILL", True)]


@pytest.mark.parametrize(("status", "stays"), ENDS)
def test_unit_removes_itself_and_the_tree_when_done(
    host: Host, make_tree: MakeTree, status: str, *, stays: bool
) -> None:
    host.install(make_tree("1"))
    unit = (host.directory / UNIT).read_text()
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStopPost=")]
    script = line.partition("-c '")[2].removesuffix("'").replace("$$", "$")
    for path in (upgrade_pod.DIRECTORY, "/etc/systemd/system"):
        script = script.replace(path, f"{host.directory}{path}")
    program = host.directory / "systemctl"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    variables = {"EXIT_STATUS": status, "PATH": f"{host.directory}:{os.defpath}"}
    assert os.spawnle(os.P_WAIT, "/bin/sh", "sh", "-c", script, variables) == 0
    program.unlink()
    assert (host.list_content() != {}) == stays


@pytest.mark.parametrize(
    ("namespace", "mode"),
    [("np-upgrade\n", MODE), ("a-upgrade-upgrade", HostedMode("a-upgrade", "a-upgrade-upgrade"))],
)
def test_mode_of_hypershifts_pod_is_its_namespace(
    tmp_path: Path, namespace: str, mode: HostedMode
) -> None:
    place = tmp_path / "namespace"
    place.write_text(namespace)
    assert upgrade_pod.read_mode(None, place) == mode


def test_mode_without_a_namespace_is_an_error(tmp_path: Path) -> None:
    place = tmp_path / "namespace"
    with pytest.raises(UsageError, match="expected a namespace POOL-upgrade, found none"):
        upgrade_pod.read_mode(None, place)
    place.write_text("default")
    with pytest.raises(UsageError, match="found default"):
        upgrade_pod.read_mode(None, place)
    assert upgrade_pod.read_mode(json.dumps(MODE.to_json()), place) == MODE


def test_installed_mode_has_precedence(tmp_path: Path) -> None:
    for path, pool in ((PATH, "a"), (INSTALLED_PATH, "b")):
        place = tmp_path / path[1:]
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps(HostedMode(pool, "x").to_json()))
    found = read_mode(Root(tmp_path))
    assert found is not None
    assert found.node_pool == "b"


def test_program_of_the_daemons_name_takes_its_arguments() -> None:
    argv = ["/usr/bin/machine-config-daemon", "start", "--node-name=n1", "--root-mount=/rootfs"]
    argv += ["--kubeconfig=/k", "--desired-configmap=/etc/machine-config-daemon-desired-config"]
    found = create_parser().parse_command_line(adapt_arguments(argv))
    assert found.module == upgrade_pod.__name__
    assert (found.node_name, found.root_mount, found.kubeconfig) == ("n1", "/rootfs", "/k")
    assert adapt_arguments(["/usr/bin/treenail", "start"]) == ["start"]


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"{}"])
def test_damaged_status_of_the_agent_is_no_activity(content: bytes | None) -> None:
    assert upgrade_pod.read_activity(content) == ""
    assert upgrade_pod.read_activity(b'{"activity": "draining"}') == "draining"


NOTES = {"state": "Done", "currentConfig": "h", "desiredConfig": "h"}
OVER = [
    (NOTES, True),
    (NOTES | {"desiredDrain": "uncordon-h", "lastAppliedDrain": "uncordon-h"}, True),
    (NOTES | {"desiredDrain": "uncordon-h", "lastAppliedDrain": "drain-h"}, False),
    (NOTES | {"state": "Working"}, False),
    (NOTES | {"desiredConfig": "i"}, False),
    # It was never updated, and waits for its selection.
    ({"state": "Done"}, False),
    ({"state": "Done", "currentConfig": "", "desiredConfig": ""}, False),
]


@pytest.mark.parametrize(("notes", "is_over"), OVER)
def test_agent_of_a_pod_ends_as_the_pod_does(notes: dict[str, str], *, is_over: bool) -> None:
    prefix = "machineconfiguration.openshift.io/"
    assert is_update_over({prefix + name: value for name, value in notes.items()}) is is_over
