"""Unit files on the disk; systemctl itself says what is right, where it is installed."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.files import read_links, write_files
from treenail_lab.machine.bus.objects import MethodError
from treenail_lab.machine.unit_files import (
    FILE_NOT_FOUND,
    INVALID_ARGUMENTS,
    NO_SUCH_UNIT,
    UNIT_EXISTS,
    UNIT_LINKED,
    UNIT_MASKED,
    UnitFileTree,
)

UNITS = {
    "usr/lib/systemd/system/a.service": (
        "[Service]\nExecStart=/bin/true\n"
        "[Install]\nWantedBy=multi-user.target\nAlias=aa.service\nAlso=b.socket\n"
    ),
    "usr/lib/systemd/system/b.socket": (
        "[Socket]\nListenStream=/run/b\n[Install]\nWantedBy=sockets.target\n"
    ),
    "usr/lib/systemd/system/s.service": "[Service]\nExecStart=/bin/true\n",
    "usr/lib/systemd/system/t@.service": (
        "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"
        "DefaultInstance=one\n"
    ),
    "etc/systemd/system/own.service": (
        "[Service]\nExecStart=/bin/true\n[Install]\nRequiredBy=multi-user.target\n"
    ),
    "usr/lib/systemd/system/multi-user.target": "[Unit]\n",
    "usr/lib/systemd/system/sockets.target": "[Unit]\n",
    "usr/lib/systemd/system-preset/10.preset": "disable own.service\nenable a.service\n",
    "etc/systemd/system-preset/00.preset": "# ours\ndisable s*.service\n",
}


STORIES = {
    "enable": ["enable a.service"],
    "enable own": ["enable own.service"],
    "enable static": ["enable s.service"],
    "enable instance": ["enable t@two.service"],
    "enable template": ["enable t@.service"],
    "enable then disable": ["enable a.service", "disable a.service"],
    "disable one of two": ["enable a.service", "enable own.service", "disable own.service"],
    "mask": ["mask s.service"],
    "mask what is not there": ["mask no.service"],
    "mask then unmask": ["mask a.service", "unmask a.service"],
    "preset": ["enable own.service", "preset own.service a.service"],
}
"""Commands of systemctl."""


def run_command(files: UnitFileTree, verb: str, *names: str) -> object:
    operation = getattr(files, f"{verb}_units")
    force = {"force": False} if verb == "mask" else {}
    return operation(list(names), runtime=False, **force)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_files(tmp_path / "root", UNITS)


@pytest.mark.process
@pytest.mark.skipif(shutil.which("systemctl") is None, reason="systemctl is not installed")
@pytest.mark.parametrize("story", STORIES)
def test_enable_makes_links_and_states_of_systemctl(root: Path, tmp_path: Path, story: str) -> None:
    reference = tmp_path / "reference"
    shutil.copytree(root, reference)
    files = UnitFileTree(root)
    for command in STORIES[story]:
        systemctl(reference, *command.split())
        run_command(files, *command.split())
    assert read_links(root) == read_links(reference)
    for name in ("a.service", "aa.service", "b.socket", "s.service", "own.service"):
        expected = systemctl(reference, "is-enabled", name).strip()
        assert state(files, name) == expected, name


def systemctl(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["systemctl", f"--root={root}", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=20,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "err"},
    )
    return done.stdout


def state(files: UnitFileTree, name: str) -> str:
    try:
        return files.read_state(name)
    except MethodError:
        return ""


def refused(operation: Callable[..., object], *arguments: object, **options: object) -> str:
    with pytest.raises(MethodError) as refusal:
        operation(*arguments, **options)
    return refusal.value.name


def test_changes_are_reported_with_paths_inside_machine(root: Path) -> None:
    done = run_command(UnitFileTree(root), "enable", "own.service")
    link = "/etc/systemd/system/multi-user.target.requires/own.service"
    assert done.changes == [("symlink", link, "/etc/systemd/system/own.service")]
    assert done.has_install_info


def test_enabling_twice_changes_nothing_the_second_time(root: Path) -> None:
    files = UnitFileTree(root)
    run_command(files, "enable", "a.service")
    assert run_command(files, "enable", "a.service").changes == []


def test_unit_without_install_section_is_reported(root: Path) -> None:
    done = run_command(UnitFileTree(root), "enable", "s.service")
    assert (done.changes, done.has_install_info) == ([], False)


def test_operation_on_missing_unit_is_refused(root: Path) -> None:
    files = UnitFileTree(root)
    assert refused(files.read_state, "no.service") == FILE_NOT_FOUND
    enable = refused(run_command, files, "enable", "no.service")
    disable = refused(run_command, files, "disable", "no.service")
    preset = refused(run_command, files, "preset", "no.service")
    assert (enable, disable, preset) == (NO_SUCH_UNIT,) * 3


def test_mask_of_unit_with_file_in_etc_is_refused(root: Path) -> None:
    files = UnitFileTree(root)
    for force in (False, True):
        name = refused(files.mask_units, ["own.service"], runtime=False, force=force)
        assert name == UNIT_EXISTS


def test_enable_of_masked_unit_is_refused(root: Path) -> None:
    files = UnitFileTree(root)
    run_command(files, "mask", "a.service")
    enable = refused(run_command, files, "enable", "a.service")
    assert enable == UNIT_MASKED


def test_enable_of_alias_is_refused(root: Path) -> None:
    files = UnitFileTree(root)
    run_command(files, "enable", "a.service")
    enable = refused(run_command, files, "enable", "aa.service")
    assert enable == UNIT_LINKED


def test_enable_over_foreign_link_is_refused(root: Path) -> None:
    link = root / "etc/systemd/system/aa.service"
    link.symlink_to("/usr/lib/systemd/system/s.service")
    assert refused(run_command, UnitFileTree(root), "enable", "a.service") == UNIT_EXISTS
    assert str(link.readlink()) == "/usr/lib/systemd/system/s.service"


def test_enable_of_template_without_instance_is_refused(root: Path) -> None:
    template = root / "usr/lib/systemd/system/n@.service"
    template.write_text("[Install]\nWantedBy=multi-user.target\n")
    enable = refused(run_command, UnitFileTree(root), "enable", "n@.service")
    assert enable == INVALID_ARGUMENTS


def test_runtime_links_are_below_run(root: Path) -> None:
    files = UnitFileTree(root)
    files.enable_units(["own.service"], runtime=True)
    assert files.read_state("own.service") == "enabled-runtime"
    files.mask_units(["s.service"], runtime=True, force=False)
    assert files.read_state("s.service") == "masked-runtime"


def test_drop_in_with_wanted_by_is_honoured(root: Path) -> None:
    drop_in = root / "etc/systemd/system/s.service.d/10-install.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Install]\nWantedBy=multi-user.target\n")
    assert UnitFileTree(root).read_state("s.service") == "disabled"


def test_wanted_units_are_those_that_start_at_boot(root: Path) -> None:
    files = UnitFileTree(root)
    run_command(files, "enable", "a.service", "own.service")
    run_command(files, "mask", "b.socket")
    assert files.list_wanted() == ["a.service", "own.service"]
