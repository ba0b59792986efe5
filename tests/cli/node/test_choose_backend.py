"""Which back end is taken, and why."""

from pathlib import Path

import pytest

from treenail.cli.node.choose_backend import BackendChoice, choose_backend
from treenail.daemon.settings.settings import BackendSetting
from treenail.host.filesystem.root import Root

RPM_OSTREED = "usr/lib/systemd/system/rpm-ostreed.service"
BOOTC = "usr/bin/bootc"


@pytest.mark.parametrize(
    ("installed", "wanted", "choice"),
    [
        ([RPM_OSTREED, BOOTC], BackendSetting.AUTO,
         BackendChoice(BackendSetting.RPM_OSTREE,
                "it is installed, and changes kernel arguments and packages too")),
        ([BOOTC], BackendSetting.AUTO,
         BackendChoice(BackendSetting.BOOTC, "it is installed, and rpm-ostree is not")),
        ([], BackendSetting.AUTO,
         BackendChoice(BackendSetting.RPM_OSTREE,
                "there is neither /usr/lib/systemd/system/rpm-ostreed.service nor /usr/bin/bootc")),
        ([RPM_OSTREED, BOOTC], BackendSetting.BOOTC,
         BackendChoice(BackendSetting.BOOTC, "the setting backend says so")),
    ],
)  # fmt: skip
def test_back_end_is_the_one_set_or_the_one_that_can_do_most(
    tmp_path: Path, installed: list[str], wanted: BackendSetting, choice: BackendChoice
) -> None:
    for name in installed:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert choose_backend(wanted, Root(tmp_path)) == choice
