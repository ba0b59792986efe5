"""``treenail-lab demo --build``: a Containerfile reaches the nodes of a pool."""

import json
from pathlib import Path

import pytest

from tests.integration.commands import treenail_lab
from treenail_lab.image_builds import find_build_refusal

pytestmark = pytest.mark.integration

_REFUSAL = find_build_refusal()[0]
needs_builds = pytest.mark.skipif(bool(_REFUSAL), reason=_REFUSAL)


@needs_builds
def test_containerfile_reaches_three_nodes_through_build_push_and_pull() -> None:
    completed = treenail_lab("demo", "--build", "--json", limit_s=240.0)
    assert completed.returncode == 0, completed.stderr
    document = json.loads(completed.stdout)
    assert document["updated"] == ["worker-0", "worker-1", "worker-2"]
    assert document["maxOutOfService"] == 1
    assert document["failed"] == {}
    assert document["image"].startswith("127.0.0.1:")
    # The table shows the phases of the build while nodes wait for the image.
    assert "worker: image build: Building" in completed.stderr
    assert "worker: image build: Succeeded" in completed.stderr


@needs_builds
def test_containerfile_that_fails_names_its_line_and_moves_no_node(tmp_path: Path) -> None:
    file = tmp_path / "Containerfile"
    file.write_text("FROM configs AS final\nRUN true\nRUN echo the cause >&2; exit 3\n", "utf-8")
    completed = treenail_lab("demo", "--build", str(file), "--nodes", "1", "--json", limit_s=100.0)
    assert completed.returncode == 1
    document = json.loads(completed.stdout)
    assert document["updated"] == []
    assert document["cordoned"] == []
    assert "line 3" in document["failed"]["worker"]
    assert "the cause" in document["failed"]["worker"]


def test_build_cannot_be_combined_with_an_image() -> None:
    completed = treenail_lab("demo", "--build", "--image", "registry.example/os")
    assert completed.returncode == 2
    assert "cannot use --build with --fail, --image or -f" in completed.stderr


def test_host_without_buildah_is_told_the_package(tmp_path: Path) -> None:
    completed = treenail_lab("demo", "--build", path=str(tmp_path))
    assert completed.returncode == 1
    assert "cannot build an OS image: buildah is not installed" in completed.stderr
    assert "install the package buildah" in completed.stderr
