"""The lab's bootc keeps to the contract of the real program."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.contract.bootc_program import BootcProgramContract
from treenail_lab import images
from treenail_lab.images import ImageCatalogue, make_image
from treenail_lab.machine import rootfs, settings
from treenail_lab.machine.programs import commands
from treenail_lab.machine.settings import MachineSettings

pytestmark = pytest.mark.process

HERE = make_image("os/node", "1.0", 1_000_000)
THERE = make_image("os/node", "2.0", 1_000_000, layers=1)
LIMIT_S = 30


class LabHost:
    here = HERE.pull_spec
    there = THERE.pull_spec

    def __init__(self, directory: Path) -> None:
        self._root = directory / "root"
        catalogue, settings_file = directory / "images.json", directory / "settings.json"
        images.save_catalogue(ImageCatalogue((HERE, THERE)), catalogue)
        settings.save_settings(MachineSettings(staging_s=0.01), settings_file)
        rootfs.install_root(self._root, HERE)
        rootfs.boot_root(self._root)
        commands.install_programs(self._root, catalogue, settings_file)

    def sh(self, script: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join((str(self._root / "usr/bin"), os.environ["PATH"]))
        return subprocess.run(
            ["/bin/sh", "-c", script],
            env={**os.environ, "PATH": path},
            check=False, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip

    def path(self, path: str) -> str:
        return f"{self._root}{path}"


class TestLabBootc(BootcProgramContract):
    @pytest.fixture
    def host(self, tmp_path: Path) -> LabHost:
        return LabHost(tmp_path)
