"""Deployments on the disk of a machine."""

from dataclasses import replace
from pathlib import Path

from treenail_lab.images import make_image
from treenail_lab.machine import rootfs
from treenail_lab.machine.ostree.sysroot import Sysroot, SysrootDeployment, make_deployment

A = make_image("os/node", "41.1", 1000)
B = make_image("os/node", "41.2", 1000)
C = make_image("os/node", "41.3", 1000)


def booted(root: Path) -> Sysroot:
    rootfs.install_root(root, A)
    rootfs.boot_root(root)
    return Sysroot(root)


def of_b(sysroot: Sysroot) -> SysrootDeployment:
    return make_deployment(B, "ostree-unverified-registry:" + B.pull_spec, ("rw",))


def versions(deployments: tuple[SysrootDeployment, ...]) -> list[str]:
    return [deployment.version for deployment in deployments]


def test_finalization_keeps_the_booted_and_the_pinned_and_drops_the_rest(tmp_path: Path) -> None:
    sysroot = booted(tmp_path)
    (a,) = sysroot.read_written()
    pinned = replace(of_b(sysroot), serial=7, pinned=True)
    sysroot.write_deployments((a, of_b(sysroot), pinned))
    new = make_deployment(C, "ostree-unverified-registry:" + C.pull_spec, ("rw",))
    sysroot.stage_deployment(new, locked=False)
    sysroot.finalize_staged()
    assert sysroot.read_written() == (new, a, pinned)


def test_further_deployment_of_a_commit_has_the_next_serial(tmp_path: Path) -> None:
    sysroot = booted(tmp_path)
    assert sysroot.compute_next_serial(B.commit) == 0
    sysroot.stage_deployment(of_b(sysroot), locked=False)
    assert sysroot.compute_next_serial(B.commit) == 1


def test_layers_stay_until_unused(tmp_path: Path) -> None:
    sysroot = booted(tmp_path)
    for layer in B.layers:
        sysroot.import_layer(layer.digest)
    sysroot.stage_deployment(of_b(sysroot), locked=False)
    assert sysroot.prune_layers() == 0
    sysroot.drop_staged()
    assert sysroot.prune_layers() == len(B.layers)
    assert sysroot.list_layers() == {layer.digest for layer in A.layers}


def test_installing_over_a_machine_changes_nothing(tmp_path: Path) -> None:
    sysroot = booted(tmp_path)
    before = sysroot.list_deployments()
    rootfs.install_root(tmp_path, B)
    assert sysroot.list_deployments() == before
