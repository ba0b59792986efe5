"""The trees of deployments that were never booted."""

from dataclasses import replace
from pathlib import Path

import pytest

from treenail.errors import HostError
from treenail.host.filesystem.root_directory import Root
from treenail.host.ostree.deployments import OstreeDeployment
from treenail.host.ostree.sysroot import open_deployment_tree

STAGED = OstreeDeployment(
    id="fedora-coreos-abc.1", checksum="abc", version="", image="quay.io/os@sha256:1",
    digest="sha256:1", is_booted=False, is_staged=True, is_locked=True, is_pinned=False,
)  # fmt: skip


def test_tree_of_staged_deployment_has_etc_of_its_image(tmp_path: Path) -> None:
    place = tmp_path / "sysroot/ostree/deploy/fedora-coreos/deploy/abc.1"
    (place / "usr/etc").mkdir(parents=True)
    (place / "usr/etc/file").write_text("text")
    (place / "usr/etc/link").symlink_to("/etc/file")
    tree = open_deployment_tree(Root(tmp_path), STAGED)
    for path in ("/etc/file", "/etc/link", "/usr/etc/file"):
        assert tree.resolve_path(path) == place / "usr/etc/file"


@pytest.mark.parametrize("deployment", [STAGED, replace(STAGED, id="abc", checksum="")])
def test_deployment_without_tree_is_an_error(tmp_path: Path, deployment: OstreeDeployment) -> None:
    with pytest.raises(HostError, match="cannot read the content of quay"):
        open_deployment_tree(Root(tmp_path), deployment)
