"""The trees of the lab's deployments, and the /etc of each."""

from pathlib import Path

import pytest

from tests.lab.machine.ostree.test_sysroot import B, C
from treenail_lab.images import derive_image
from treenail_lab.machine import rootfs
from treenail_lab.machine.ostree.sysroot import Sysroot, SysrootDeployment, make_deployment

FIRST = derive_image(B, {"/etc/app.conf": "first", "/etc/gone": "x", "/usr/bin/tool": "1"})
SECOND = derive_image(C, {"/etc/app.conf": "second"}, {"/etc/link": "app.conf"})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    rootfs.install_root(tmp_path, FIRST)
    rootfs.boot_root(tmp_path)
    assert (tmp_path / "etc/app.conf").read_text() == "first"
    return tmp_path


def stage(root: Path) -> SysrootDeployment:
    deployment = make_deployment(SECOND, "ostree-unverified-registry:" + SECOND.pull_spec, ("rw",))
    Sysroot(root).stage_deployment(deployment, locked=False)
    return deployment


def test_staged_deployment_has_a_tree_without_etc(root: Path) -> None:
    tree = Sysroot(root).trees.find_tree(stage(root))
    assert (tree / "usr/etc/app.conf").read_text() == "second"
    assert (tree / "usr/lib/systemd/system/kubelet.service").exists()
    assert not (tree / "etc").exists()
    Sysroot(root).drop_staged()
    assert not tree.exists()


def test_boot_merges_local_changes_of_etc(root: Path) -> None:
    (root / "etc/local").write_text("local")
    stage(root)
    Sysroot(root).finalize_staged()
    rootfs.boot_root(root)
    assert (root / "etc/app.conf").read_text() == "second"
    assert (root / "etc/link").is_symlink()
    assert (root / "etc/local").read_text() == "local"
    assert not (root / "etc/gone").exists()
    assert not (root / "usr/bin/tool").exists()


def test_rollback_boots_etc_of_the_previous_deployment(root: Path) -> None:
    stage(root)
    Sysroot(root).finalize_staged()
    rootfs.boot_root(root)
    (root / "etc/app.conf").write_text("changed")
    rootfs.boot_root(root, 1)
    assert (root / "etc/app.conf").read_text() == "first"
    rootfs.boot_root(root)
    assert (root / "etc/app.conf").read_text() == "changed"
