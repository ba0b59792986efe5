"""Reading what a config needs of the tree of a deployment."""

from pathlib import Path

import pytest

from tests.fakes.host_machine import make_machine
from treenail.api.ignition.model import Contents
from treenail.config.image_content import compare_with_image
from treenail.config.wanted_state import WantedFile, WantedState, WantedUnit
from treenail.daemon.configuration.image_content import list_tree_paths, read_image_content
from treenail.daemon.configuration.node_configuration import MachineInspector
from treenail.host.filesystem.root_directory import Root, open_booted_tree
from treenail.update.steps.plan import plan_steps
from treenail.update.steps.step_types import WriteFile

UNIT, TEXT = "app.service", "[Install]\nWantedBy=multi-user.target\n"
WANTED = WantedState(
    files={
        path: WantedFile(path, Contents("data:,text"), user="app")
        for path in ("/etc/app.conf", "/usr/local/bin/tool")
    },
    units={UNIT: WantedUnit(UNIT, TEXT, enabled=True)},
)


def build_tree(tree: Path) -> None:
    uid = tree.stat().st_uid
    for path, text in {
        "usr/etc/app.conf": "text",
        "usr/etc/passwd": f"app:x:{uid}:0::/:/bin/sh\n",
        f"usr/lib/systemd/system/{UNIT}": TEXT,
    }.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
        (tree / path).chmod(0o644)
    wants = tree / "usr/etc/systemd/system/multi-user.target.wants"
    wants.mkdir(parents=True)
    (wants / UNIT).symlink_to(f"/usr/lib/systemd/system/{UNIT}")
    (tree / "usr/local").symlink_to("../var/usrlocal")


def test_tree_of_an_image_is_compared_with_its_accounts_links_and_units(tmp_path: Path) -> None:
    build_tree(tmp_path)
    split = compare_with_image(WANTED, read_image_content(Root(tmp_path, has_usr_etc=True), WANTED))
    assert split.missing == ()
    assert split.provided == {"/etc/app.conf", UNIT, f"/etc/systemd/system/{UNIT}"}
    assert split.wanted.units[UNIT].contents == ""


def test_booted_image_is_read_without_local_changes(tmp_path: Path) -> None:
    build_tree(tmp_path)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/app.conf").write_text("changed by a user")
    split = compare_with_image(WANTED, read_image_content(open_booted_tree(Root(tmp_path)), WANTED))
    assert "/etc/app.conf" in split.provided


def test_listed_paths_have_whole_directories_of_units() -> None:
    paths = list_tree_paths(WANTED)
    assert {"/etc/app.conf", "/etc/systemd/system/", "/usr/lib/passwd"} <= {*paths}
    assert f"/usr/lib/systemd/system/{UNIT}.d/" in paths


@pytest.mark.parametrize("booted", ["other", None])
def test_file_below_usr_of_the_next_image_needs_no_step(tmp_path: Path, booted: str | None) -> None:
    path = "/usr/share/app.conf"
    (tmp_path / "usr/share").mkdir(parents=True)
    if booted:
        (tmp_path / "usr/share/app.conf").write_text(booted)
    wanted = WantedState(files={path: WantedFile(path, Contents("data:,text"))})
    inspector, provided = MachineInspector(make_machine(Root(tmp_path))), frozenset({path})
    owned = inspector.read_ownership()
    inventory = inspector.inspect_machine(owned, wanted, provided)
    steps = plan_steps(owned, wanted, inventory, config="next", provided=provided).steps
    assert [step for step in steps if isinstance(step, WriteFile)] == []
