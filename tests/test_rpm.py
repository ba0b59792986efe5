"""The RPMs, built on Debian: files, dependencies, settings, and commands from an empty root."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from tools.manuals import list_pages
from treenail.daemon.agent_settings import AgentSettings, PartialSettings, merge_settings
from treenail.daemon.agent_settings import parse_settings as parse

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SPEC = (ROOT / "rpm/treenail.spec").read_text()
SETTINGS = (ROOT / "rpm/agent.toml").read_text()
UNCHECKED = 0b01
"""The flags of a compiled module that has its source's hash, and is not compared by it."""
NODE = ("python3-treenail", "treenail")
CONTROLLER = ("python3-treenail", "treenail-controller")
PACKAGES = (*NODE, "treenail-controller", "treenail-lab")
SITE_PACKAGES = "usr/lib/python3/dist-packages"

needs_rpmbuild = pytest.mark.skipif(shutil.which("rpmbuild") is None, reason="no rpmbuild here")


def run(*command: str | Path, **variables: str) -> str:
    """Run the command and return its output; its errors are the message of the assertion."""
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def rpms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rpms")
    quick = ("--without", "tests", "--define", "_binary_payload w0.gzdio")
    run("tools/rpm", folder, "rpm/macros.elsewhere", *quick)
    return folder


def find_package(folder: Path, package: str) -> Path:
    (found,) = folder.glob(f"RPMS/noarch/{package}-[0-9]*.rpm")
    return found


def list_modules(folder: Path, package: str) -> list[str]:
    """The Python files of the package, as they are named below agent/ and lab/."""
    listed = run("rpm", "--query", "--list", "--package", find_package(folder, package))
    return [
        path.removeprefix(f"/{SITE_PACKAGES}/")
        for path in listed.splitlines()
        if path.endswith(".py")
    ]


def row(path: str) -> str:
    return path.split("/")[1]


@pytest.mark.process
@needs_rpmbuild
def test_every_module_is_in_one_rpm(rpms: Path) -> None:
    owned = {package: list_modules(rpms, package) for package in PACKAGES}
    (source,) = rpms.glob("SOURCES/*.tar.gz")
    with tarfile.open(source) as archive:
        parts = [name.split("/", 2)[1:] for name in archive.getnames() if name.endswith(".py")]
    there = [path for folder, path in parts if folder in ("agent", "lab")]
    assert sorted(path for paths in owned.values() for path in paths) == sorted(there)
    of_controllers = {
        "builder", "controllers", "image", "installer", "manifests", "provisioning", "registry",
    }  # fmt: skip
    assert {row(path) for path in owned["treenail-controller"]} == of_controllers
    assert {path.split("/")[0] for path in owned["treenail-lab"]} == {"treenail_lab"}
    assert {row(path) for path in owned["treenail"]} == {"daemon", "host"}


@pytest.mark.process
@needs_rpmbuild
@pytest.mark.skipif(shutil.which("cpio") is None, reason="no cpio here")
def test_compiled_modules_are_unchecked_in_rpm(rpms: Path, tmp_path: Path) -> None:
    unpack(rpms, tmp_path, "treenail")
    compiled = list(tmp_path.rglob("*.pyc"))
    assert {int.from_bytes(path.read_bytes()[4:8], "little") for path in compiled} == {UNCHECKED}
    assert len(compiled) == len(list_modules(rpms, "treenail"))


def unpack(folder: Path, root: Path, *packages: str) -> None:
    script = 'rpm2cpio "$1" | cpio --extract --quiet --make-directories --directory="$2"'
    for package in packages:
        run("sh", "-c", script, "sh", find_package(folder, package), root)


@pytest.mark.process
@needs_rpmbuild
@pytest.mark.skipif(os.geteuid() != 0, reason="rpm needs root to install into another root")
@pytest.mark.parametrize(
    ("packages", "command"),
    [
        (NODE, ("treenail", "--version")),
        (NODE, ("treenail", "once", "--help")),
        (CONTROLLER, ("treenail-controller", "manifests", "--monitoring")),
        (CONTROLLER, ("kubectl-treenail", "--help")),
        (PACKAGES, ("treenail-lab", "demo", "--help")),
    ],
)
def test_commands_run_from_packages_in_an_empty_root(
    rpms: Path, tmp_path: Path, packages: tuple[str, ...], command: tuple[str, ...]
) -> None:
    files = [find_package(rpms, package) for package in packages]
    # An empty root has neither a shell for scripts nor the dependencies.
    run("rpm", "--root", tmp_path, "--install", "--nodeps", "--noscripts", *files)
    site = sysconfig.get_path("purelib")
    run(
        sys.executable, tmp_path / "usr/bin" / command[0], *command[1:],
        PYTHONPATH=f"{tmp_path / SITE_PACKAGES}:{site}", PYTHONDONTWRITEBYTECODE="1",
    )  # fmt: skip
    erased = [each.name.rsplit("-", 2)[0] for each in files]
    run("rpm", "--root", tmp_path, "--erase", "--noscripts", *erased)
    assert [path for path in tmp_path.rglob("*treenail*") if "/var/" not in str(path)] == []


@pytest.mark.process
@needs_rpmbuild
@pytest.mark.skipif(shutil.which("rpmlint") is None, reason="no rpmlint here")
def test_rpmlint_finds_nothing_in_rpms(rpms: Path) -> None:
    found = run("rpmlint", "--config", "rpm/rpmlint.toml", rpms / "RPMS/noarch")
    assert " 0 errors, 0 warnings" in found, found


@pytest.mark.process
@needs_rpmbuild
def test_settings_and_checks_are_config_that_upgrades_keep(rpms: Path) -> None:
    package = find_package(rpms, "treenail")
    listed = run(
        "rpm", "-q", "--queryformat", "[%{FILENAMES} %{FILEFLAGS:fflags}\n]", "-p", package
    )
    flags = dict(line.rsplit(" ", 1) for line in listed.splitlines())
    assert {path for path, flag in flags.items() if flag == "cn"} == {
        "/etc/treenail/agent.toml",
        "/etc/treenail/health.d/data-volume.example",
    }
    # treenail runs executable files of health.d only.
    modes = run("rpm", "-q", "--queryformat", "[%{FILENAMES} %{FILEMODES:perms}\n]", "-p", package)
    assert "data-volume.example -rw-r--r--" in modes


def test_spec_requires_the_dependencies_of_each_package() -> None:
    def required(package: str) -> set[str]:
        section = SPEC.split(f"\n%package {package}\n")[1].split("\n%description")[0]
        return set(re.findall(r"^Requires: +python3dist\((\S+)\)$", section, re.MULTILINE))

    extras = PROJECT["optional-dependencies"]
    assert required("controller") == {normalize(each) for each in extras["controller"]}
    # treenail-lab requires treenail-controller.
    assert required("lab") == {normalize(each) for each in extras["lab"]} - required("controller")


def normalize(requirement: str) -> str:
    return re.split(r"[<>=!]", requirement)[0].lower().replace("_", "-")


def test_spec_has_url_of_project() -> None:
    assert f"\nURL:            {PROJECT['urls']['Homepage']}\n" in SPEC


def test_packit_builds_the_spec_from_tags_of_versions() -> None:
    packit = yaml.safe_load((ROOT / ".packit.yaml").read_text())
    assert (ROOT / packit["specfile_path"]).read_text() == SPEC
    assert packit["upstream_tag_template"] == "v{version}"
    for job in packit["jobs"]:
        # Fedora's builds use branches of dist-git, and Copr's use targets.
        assert ("targets" in job) == (job["job"] == "copr_build")
        assert ("dist_git_branches" in job) != ("targets" in job)


def test_changelog_of_spec_begins_with_the_version() -> None:
    entry = re.search(r"^%changelog\n\* .+ - (\S+)-1$", SPEC, re.MULTILINE)
    assert entry is not None
    assert entry[1] == PROJECT["version"]


@pytest.mark.process
@needs_rpmbuild
def test_manuals_in_rpms_are_the_generated_ones(rpms: Path) -> None:
    listed = {
        Path(line).name.removesuffix(".gz")
        for package in PACKAGES
        for line in run("rpm", "-qlp", find_package(rpms, package)).splitlines()
        if "/man/man" in line
    }
    assert listed == set(list_pages())


def test_packaged_settings_change_nothing() -> None:
    assert parse(SETTINGS.encode(), where="agent.toml") == PartialSettings()


def test_packaged_settings_name_every_key_with_its_default() -> None:
    # Prose has a space after the #.
    enabled = re.sub(r"^#(?=\w)", "", SETTINGS, flags=re.MULTILINE)
    tables = tomllib.loads(enabled)
    given = merge_settings(parse(enabled.encode(), where="agent.toml"), PartialSettings())
    # The default is what the machine has: a certificate, or a host name.
    assert given.node_name
    assert replace(given, node_name="") == merge_settings(PartialSettings(), PartialSettings())
    assert set(tables) == {field.name for field in fields(AgentSettings)}
    for name in ("limits", "health", "preflight", "firstboot", "drift"):
        assert set(tables[name]) == {field.name for field in fields(getattr(given, name))}
