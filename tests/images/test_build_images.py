"""`tools/build_images` with a builder that fails where the test says so."""

import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARGUMENTS = ("--build-arg", "FEDORA=45")

# As podman: standard output has the steps, standard error the cause; the target follows --target.
BUILDER = """#!/bin/sh
echo "$3" >> "$BUILDS"
echo "STEP 1/2: FROM base"
for target in $FAILING; do
    [ "$3" != "$target" ] || { echo "Error: pinging registry: no such host" >&2; exit 125; }
done
echo "$@"
"""

pytestmark = pytest.mark.process


@dataclass(frozen=True)
class Builds:
    """The targets that the builder was requested to build, and the end of the script."""

    targets: list[str]
    code: int
    output: str
    errors: str


def run_script(
    folder: Path, failing: Iterable[str] = (), base: str = "", target: str = ""
) -> Builds:
    builder, record = folder / "podman", folder / "builds"
    builder.write_text(BUILDER)
    builder.chmod(0o755)
    environment = {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "BUILDS": str(record),
        "FAILING": " ".join(failing),
    }
    done = subprocess.run(
        [ROOT / "tools/build_images", base, target, *ARGUMENTS],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return Builds(record.read_text().split(), done.returncode, done.stdout, done.stderr)


def test_build_images_passes_options_to_every_target(tmp_path: Path) -> None:
    builds = run_script(tmp_path)
    assert (builds.code, builds.errors) == (0, "")
    assert builds.targets == ["rpm", "agent", "controller"]
    assert builds.output.count(" ".join(ARGUMENTS)) == 3
    assert "--target controller --build-arg FEDORA=45 --tag localhost/treenail-controller:" in (
        builds.output
    )


def test_build_images_without_fedora_builds_controller_and_fails(tmp_path: Path) -> None:
    builds = run_script(tmp_path, failing=("rpm", "agent"))
    assert builds.targets == ["rpm", "controller"]
    assert builds.code == 1
    # The builder's own line, then the summary.
    assert builds.errors.splitlines() == [
        "Error: pinging registry: no such host",
        "build_images: cannot build rpm: Error: pinging registry: no such host",
        "build_images: cannot build agent: it installs the packages of the target rpm",
        "build_images: built: controller; failed: rpm agent",
    ]


def test_build_images_with_every_target_failing_reports_nothing_built(tmp_path: Path) -> None:
    builds = run_script(tmp_path, failing=("rpm", "controller"))
    assert builds.code == 1
    assert builds.errors.endswith("build_images: built: nothing; failed: rpm agent controller\n")


def test_build_images_with_base_builds_node_only(tmp_path: Path) -> None:
    builds = run_script(tmp_path, base="example/os:1", target="layer-tree")
    assert (builds.code, builds.targets) == (0, ["layer-tree"])
    assert "--build-arg BASE=example/os:1 --build-arg FEDORA=45" in builds.output
