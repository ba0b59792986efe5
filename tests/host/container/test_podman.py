"""Paths out of a pulled image: the script that copies them, with a podman that is a script."""

import os
from pathlib import Path

import pytest

from treenail.clocks import SystemClock
from treenail.errors import CommandError, HostError
from treenail.host.container.podman import Podman
from treenail.host.filesystem.root_directory import Root
from treenail.process import ProgramRunner

pytestmark = pytest.mark.process


@pytest.fixture
def podman(tmp_path: Path) -> Podman:
    """podman below a root, whose `image mount` prints the content of the file `mounted`."""
    program = tmp_path / "usr/bin/podman"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\n[ "$2" != mount ] || cat {tmp_path}/mounted\n')
    program.chmod(0o755)
    (tmp_path / "run/treenail").mkdir(parents=True)
    programs = ProgramRunner(SystemClock(), os.environ)
    return Podman(programs, programs, Root(tmp_path), SystemClock())  # type: ignore[arg-type]


def test_paths_are_copied_out_of_the_mounted_image(podman: Podman, tmp_path: Path) -> None:
    image = tmp_path / "image"
    (image / "etc").mkdir(parents=True)
    (image / "etc/motd").write_text("welcome")
    (tmp_path / "mounted").write_text(f"{image}\n")
    with podman.copy_from_image("image", ["/etc/motd", "/etc/none"]) as tree:
        assert tree.resolve_path("/etc/motd").read_text() == "welcome"
        assert not tree.resolve_path("/etc/none").exists()


@pytest.mark.parametrize("mounted", ["", "/nowhere\n"])
def test_image_that_is_not_mounted_is_no_empty_image(
    podman: Podman, tmp_path: Path, mounted: str
) -> None:
    # Without a mount the paths would be those of this machine.
    (tmp_path / "mounted").write_text(mounted)
    with pytest.raises((HostError, CommandError)), podman.copy_from_image("image", ["/etc/passwd"]):
        pass
