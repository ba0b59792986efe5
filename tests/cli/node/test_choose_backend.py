"""Which back end is taken, and why."""

from pathlib import Path

import pytest

from treenail.cli.node.backend import BackendChoice, choose_backend
from treenail.host.filesystem.root_directory import Root
from treenail.host.ostree.backend_settings import BackendSetting

RPM_OSTREED = "usr/lib/systemd/system/rpm-ostreed.service"
BOOTC = "usr/bin/bootc"


@pytest.mark.parametrize(
    ("installed", "wanted", "choice"),
    [
        ([RPM_OSTREED, BOOTC], BackendSetting.AUTO,
         BackendChoice(BackendSetting.RPM_OSTREE,
                "installed, and can also change kernel arguments and packages")),
        ([BOOTC], BackendSetting.AUTO,
         BackendChoice(BackendSetting.BOOTC, "installed, without rpm-ostree")),
        ([], BackendSetting.AUTO,
         BackendChoice(BackendSetting.RPM_OSTREE,
                "default: neither /usr/lib/systemd/system/rpm-ostreed.service "
                "nor /usr/bin/bootc exists")),
        ([RPM_OSTREED, BOOTC], BackendSetting.BOOTC,
         BackendChoice(BackendSetting.BOOTC, "selected by the setting backend")),
    ],
)  # fmt: skip
def test_backend_without_setting_prefers_rpm_ostree(
    tmp_path: Path, installed: list[str], wanted: BackendSetting, choice: BackendChoice
) -> None:
    for name in installed:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert choose_backend(wanted, Root(tmp_path)) == choice
