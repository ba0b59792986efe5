"""The Containerfile, the locks and the files of a tree agree with the rest of the product."""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.images.locks import LOCKS, normalize, read_locked_versions
from tools import python_tree
from treenail.daemon.checks.preflight import KNOWN_AGENTS
from treenail.manifests.installation import InstallOptions, build_documents

ROOT = Path(__file__).parents[2]
CONTAINERFILE = (ROOT / "Containerfile").read_text()
FINISH = (ROOT / "tools/finish_layer").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILT_BY_NAME = {"rpm", "controller", "agent", "hosted", "layer", "layer-tree"}


def split_stages() -> dict[str, str]:
    """The instructions of each stage, by its name."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", CONTAINERFILE, flags=re.MULTILINE)
    return dict(zip(parts[2::3], parts[3::3], strict=True))


STAGES = split_stages()


def run(*command: str | Path) -> None:
    """Run the command; its errors are the message of the assertion."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_containerfile_has_documented_targets() -> None:
    comment = CONTAINERFILE.split("ARG", 1)[0]
    documented = set(re.findall(r"^#   (\S+)  ", comment, re.MULTILINE))
    assert documented == BUILT_BY_NAME
    assert documented <= STAGES.keys()


def test_every_copied_path_exists() -> None:
    copied = [
        path
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", CONTAINERFILE, re.MULTILINE)
        for path in shlex.split(line)
    ]
    mounted = re.findall(r"type=bind,source=([^,]+),", CONTAINERFILE)
    assert [path for path in (*copied, *mounted) if not (ROOT / path).exists()] == []


def test_document_names_release_of_fedora() -> None:
    release = re.search(r"^ARG FEDORA=(\d+)$", CONTAINERFILE, re.MULTILINE)
    assert release is not None
    assert f"builds on Fedora {release[1]}." in (ROOT / "docs/install.md").read_text()


def test_mounts_of_build_context_are_relabeled_for_selinux() -> None:
    mounts = re.findall(r"--mount=type=bind,(source=\S+)", CONTAINERFILE)
    assert mounts
    assert [mount for mount in mounts if "z" not in mount.split(",")] == []


@pytest.mark.parametrize("target", ["agent", "controller"])
def test_container_labels_name_version_and_license(target: str) -> None:
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]+)"', STAGES[target]))
    assert labels.keys() == {"title", "description", "version", "licenses"}
    assert (labels["version"], labels["licenses"]) == (PROJECT["version"], PROJECT["license"])


@pytest.mark.parametrize("target", ["layer", "layer-tree"])
def test_layer_keeps_labels_of_base(target: str) -> None:
    # bootc and rpm-ostree show org.opencontainers.image.version as the version of the OS.
    assert "LABEL" not in STAGES[target]


def test_controller_user_is_that_of_manifests() -> None:
    (deployment,) = (
        each for each in build_documents(InstallOptions()) if each["kind"] == "Deployment"
    )
    context = deployment["spec"]["template"]["spec"]["securityContext"]
    user = re.search(r"^USER (\d+):(\d+)$", STAGES["controller"], re.MULTILINE)
    assert user is not None
    assert (int(user[1]), int(user[2])) == (context["runAsUser"], context["runAsGroup"])


@pytest.mark.parametrize("target", ["layer-tree", "controller"])
def test_target_with_tree_needs_no_package_manager(target: str) -> None:
    assert not re.search(r"dnf|apt|rpm-ostree|base_packages", STAGES[target])
    assert "/usr/lib/treenail/check-treenail" in STAGES[target]


def test_node_has_neither_lab_nor_controllers() -> None:
    assert set(re.findall(r"/rpms/(\S+)\.rpm", STAGES["layer"])) == {
        "python3-treenail-*", "treenail-[0-9]*"
    }  # fmt: skip
    assert "COPY lab" not in STAGES["node-tree"]
    left_out = set(python_tree.PROGRAMS["node"].left_out)
    assert {"controllers", "provisioning", "installer", "manifests"} <= left_out


def test_layer_masks_every_known_update_agent() -> None:
    masked = re.search(r"^systemctl .+ mask (.+)$", FINISH, re.MULTILINE)
    assert masked is not None
    assert set(masked[1].split()) == set(KNOWN_AGENTS)


@pytest.mark.process
def test_finished_layer_keeps_its_units_at_first_boot_of_fedora_coreos(tmp_path: Path) -> None:
    units, presets = tmp_path / "usr/lib/systemd/system", tmp_path / "usr/lib/systemd/system-preset"
    for folder in (units, presets):
        folder.mkdir(parents=True)
    # The bootstrap host is no node.
    of_nodes = [
        path for path in (ROOT / "systemd").glob("*.service") if "bootstrap" not in path.name
    ]
    for path in of_nodes:
        shutil.copy(path, units)
    (units / "zincati.service").write_text("[Install]\nWantedBy=multi-user.target\n")
    (presets / "40-coreos.preset").write_text("enable zincati.service\n")
    (presets / "99-default-disable.preset").write_text("disable *\n")
    run(ROOT / "tools/finish_layer", tmp_path)
    run("systemctl", f"--root={tmp_path}", "preset-all", "--preset-mode=full")
    links = tmp_path / "etc/systemd/system"
    enabled = {path.name for path in links.glob("*.*/*")}
    assert enabled == {path.name for path in of_nodes}
    assert (links / "zincati.service").readlink() == Path("/dev/null")


def test_locks_name_the_tested_versions() -> None:
    tested = {
        normalize(name): version
        for name, version in re.findall(
            r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
        )
    }
    locked = read_locked_versions("node") | read_locked_versions("controller")
    assert {name: tested.get(name) for name in locked} == locked


def test_locks_of_node_differ_in_pygobject_only() -> None:
    old, new = (dict(read_locked_versions(each)) for each in ("node", "node-girepository-2.0"))
    versions = [tuple(map(int, each.pop("pygobject").split("."))) for each in (old, new)]
    assert versions[0] < (3, 51) < versions[1]
    assert old == new


def test_locks_name_every_requirement() -> None:
    def names(requirements: list[str]) -> set[str]:
        return {normalize(re.split(r"[<>=!]", each)[0]) for each in requirements}

    node = names(PROJECT["dependencies"])
    controller = names(PROJECT["optional-dependencies"]["controller"])
    assert node | {"pygobject"} == read_locked_versions("node").keys()
    of_node_only = {"pydbus", "psutil"}
    assert controller | node - of_node_only <= read_locked_versions("controller").keys()
    assert not of_node_only & read_locked_versions("controller").keys()


@pytest.mark.parametrize("lock", LOCKS)
def test_every_locked_package_has_a_hash(lock: str) -> None:
    entries = re.split(r"^(?=\w)", LOCKS[lock], flags=re.MULTILINE)[1:]
    assert len(entries) == len(read_locked_versions(lock))
    assert [each for each in entries if "--hash=sha256:" not in each] == []


def test_tree_has_files_of_rpm() -> None:
    spec = (ROOT / "rpm/treenail.spec").read_text()
    macros = dict(
        re.findall(r"^%_(\w+) (/\S+)$", (ROOT / "rpm/macros.elsewhere").read_text(), re.MULTILINE)
    )
    macros |= {"sysconfdir": "/etc", "mandir": "/usr/share/man", "bindir": "/usr/bin"}
    section = re.search(r"^%files\n(.+?)\n\n", spec, re.MULTILINE | re.DOTALL)
    assert section is not None
    packaged = {
        re.sub(r"%\{_(\w+)\}", lambda found: macros[found[1]], line.split()[-1]).rstrip("*")
        for line in section[1].splitlines()
        if "python3_sitelib" not in line and not line.startswith(("%dir", "%license", "#"))
    }
    node = python_tree.PROGRAMS["node"]
    commands = {f"/usr/bin/{name}" for name in node.commands}
    manuals = {f"/usr/share/man/man{page[-1]}/{page}" for page in node.manuals}
    files = {f"/{path}" for path in node.files.values() if "licenses" not in path}
    trees = files | manuals | commands
    completions = {path for path in packaged if "complet" in path}
    assert packaged - completions == trees


@pytest.mark.parametrize("program", python_tree.PROGRAMS)
def test_tree_modules_import_nothing_that_is_left_out(program: str, tmp_path: Path) -> None:
    python_tree.copy_treenail(python_tree.PROGRAMS[program], tmp_path)
    packages = python_tree.below(tmp_path, python_tree.PACKAGES)
    missing = {
        f"{path.relative_to(packages)}: {name}"
        for path in packages.rglob("*.py")
        # It loads the program that it runs, and no other.
        if path != packages / "treenail/cli/entry.py"
        for name in find_own_imports(path)
        if not exists_below(packages, name)
    }
    assert missing == set()


def find_own_imports(path: Path) -> list[str]:
    """The modules of treenail that a module imports, also within a function."""
    return re.findall(r"^ *(?:from|import) (treenail[\w.]*)", path.read_text(), re.MULTILINE)


def exists_below(packages: Path, module: str) -> bool:
    place = packages / module.replace(".", "/")
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists()
