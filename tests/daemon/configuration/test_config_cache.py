"""Rendered configs on disk: kept when they were read, read when nobody answers."""

import stat
from pathlib import Path

import pytest

from treenail.api.machineconfig import MachineConfig
from treenail.api.meta import ObjectMeta
from treenail.daemon.configuration.config_cache import DIRECTORY, Configs
from treenail.errors import NotFound, Unreachable
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.root import Root

ONE = MachineConfig(ObjectMeta(name="one"), kernel_arguments=("a",))


class Cluster:
    """Has one config, while it answers."""

    def __init__(self) -> None:
        self.up = True
        self.asked = 0

    def machine_config(self, name: str) -> MachineConfig:
        self.asked += 1
        if not self.up:
            raise Unreachable("nobody answers")
        if name != ONE.name:
            raise NotFound(f"there is no {name}")
        return ONE


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def configs(tmp_path: Path, cluster: Cluster) -> Configs:
    return Configs(Files(Root(tmp_path)), cluster)


def test_a_config_that_was_read_is_there_when_nobody_answers(
    configs: Configs, cluster: Cluster
) -> None:
    assert configs.fetch("one") == ONE
    cluster.up = False
    assert configs.fetch("one") == ONE
    assert configs.known("one") == ONE


def test_what_is_kept_is_for_its_owner_alone(configs: Configs, tmp_path: Path) -> None:
    configs.fetch("one")
    directory = tmp_path / DIRECTORY[1:]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()] == [0o600]


def test_a_config_that_is_gone_is_not_taken_from_disk_for_an_update(
    configs: Configs, tmp_path: Path
) -> None:
    with pytest.raises(NotFound):
        configs.fetch("two")
    assert configs.known("two") is None
    assert configs.known("") is None
    assert not (tmp_path / DIRECTORY[1:]).exists()


def test_a_config_that_never_was_read_waits_for_an_answer(
    configs: Configs, cluster: Cluster
) -> None:
    cluster.up = False
    with pytest.raises(Unreachable):
        configs.fetch("one")
    with pytest.raises(Unreachable):
        configs.known("one")


def test_a_damaged_copy_is_asked_for_again(
    configs: Configs, cluster: Cluster, tmp_path: Path
) -> None:
    configs.fetch("one")
    (tmp_path / DIRECTORY[1:] / "one.json").write_text('{"kind": "Mach')
    assert configs.kept("one") is None
    assert configs.known("one") == ONE
    assert cluster.asked == 2


def test_only_what_is_named_stays(configs: Configs, tmp_path: Path) -> None:
    configs.fetch("one")
    configs.keep_only(["one"])
    assert configs.kept("one") == ONE
    configs.keep_only(["two"])
    assert list((tmp_path / DIRECTORY[1:]).iterdir()) == []
