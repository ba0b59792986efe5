"""Rendered configs on disk: cached when read, and used while the API server is unreachable."""

import stat
from pathlib import Path

import pytest

from treenail.api.machineconfig import MachineConfig
from treenail.api.object_meta import ObjectMeta
from treenail.daemon.configuration.config_cache import DIRECTORY, ConfigCache
from treenail.errors import NotFoundError, UnreachableError
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.root_directory import Root

ONE = MachineConfig(ObjectMeta(name="one"), kernel_arguments=("a",))


class Cluster:
    """Has one config, while it answers."""

    def __init__(self) -> None:
        self.up = True
        self.requests = 0

    def fetch_machine_config(self, name: str) -> MachineConfig:
        self.requests += 1
        if not self.up:
            raise UnreachableError("no answer")
        if name != ONE.name:
            raise NotFoundError(f"there is no {name}")
        return ONE


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def configs(tmp_path: Path, cluster: Cluster) -> ConfigCache:
    return ConfigCache(HostFiles(Root(tmp_path)), cluster.fetch_machine_config)


def test_config_read_before_is_cached_for_unreachable_cluster(
    configs: ConfigCache, cluster: Cluster
) -> None:
    assert configs.fetch_config("one").config == ONE
    cluster.up = False
    assert configs.fetch_config("one").config == ONE
    assert configs.find_config("one").config == ONE


def test_cached_config_has_mode_0600(configs: ConfigCache, tmp_path: Path) -> None:
    configs.fetch_config("one")
    directory = tmp_path / DIRECTORY[1:]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()] == [0o600]


def test_config_deleted_from_cluster_is_not_read_from_cache(
    configs: ConfigCache, tmp_path: Path
) -> None:
    with pytest.raises(NotFoundError):
        configs.fetch_config("two")
    assert configs.find_config("two") is None
    assert configs.find_config("") is None
    assert not (tmp_path / DIRECTORY[1:]).exists()


def test_config_not_cached_fails_while_cluster_is_unreachable(
    configs: ConfigCache, cluster: Cluster
) -> None:
    cluster.up = False
    with pytest.raises(UnreachableError):
        configs.fetch_config("one")
    with pytest.raises(UnreachableError):
        configs.find_config("one")


def test_damaged_cache_is_fetched_again(
    configs: ConfigCache, cluster: Cluster, tmp_path: Path
) -> None:
    configs.fetch_config("one")
    (tmp_path / DIRECTORY[1:] / "one.json").write_text('{"kind": "Mach')
    assert configs.read_cached("one") is None
    assert configs.find_config("one").config == ONE
    assert cluster.requests == 2


def test_prune_cache_keeps_only_named_configs(configs: ConfigCache, tmp_path: Path) -> None:
    configs.fetch_config("one")
    configs.prune_cache(["one"])
    assert configs.read_cached("one").config == ONE
    configs.prune_cache(["two"])
    assert list((tmp_path / DIRECTORY[1:]).iterdir()) == []
