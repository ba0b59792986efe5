"""``treenail-lab install``: a cluster in image mode from an empty directory."""

import json
from pathlib import Path

import pytest

from tests.integration.commands import treenail_lab
from treenail_lab.image_builds import find_build_refusal
from treenail_lab.machine.ignition import ignition

_REFUSAL = find_build_refusal()[0] or ignition.find_refusal()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(_REFUSAL), reason=_REFUSAL or "none"),
]


def test_cluster_installs_in_image_mode_with_one_reboot_of_each_machine(tmp_path: Path) -> None:
    root = tmp_path / "cluster"
    done = treenail_lab("install", "--dir", str(root), "--json", limit_s=280.0)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["problems"] == []
    nodes = {each["name"]: each for each in document["nodes"]}
    assert set(nodes) == {"master-0", "master-1", "master-2", "worker-0", "worker-1"}
    # A stock node boots once: Ignition runs in its first boot.
    assert {each["boots"] for each in nodes.values()} == {2}
    assert {each["state"] for each in nodes.values()} == {"Done"}
    images = {name: each["image"] for name, each in nodes.items()}
    assert {images[f"master-{number}"] for number in range(3)} == {document["installed"]}
    assert images["worker-0"] == images["worker-1"] != document["installed"]
    for each in nodes.values():
        assert each["reportedImage"].endswith(f"@{each['image']}")
        assert not each["hasBootstrapRegistry"]
    # The first sync of the cluster changed nothing: one config and one build for each pool.
    assert [name.split("-")[1] for name in document["rendered"]] == ["master", "worker"]
    assert sorted(name.split("-")[0] for name in document["builds"]) == ["master", "worker"]
    assert "imageMode" not in (root / "install-config.yaml").read_text()
    # Only files of the user's stay readable by others.
    assert (root / ".treenail").stat().st_mode & 0o077 == 0


def test_install_in_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    done = treenail_lab("install", "--dir", str(tmp_path))
    assert done.returncode == 2
    assert "it has precious" in done.stderr


def test_install_demo_cannot_be_combined_with_an_image() -> None:
    done = treenail_lab("demo", "--install", "--image", "registry.example/os")
    assert done.returncode == 2
    assert "cannot use --install with --build, --fail, --image or -f" in done.stderr
