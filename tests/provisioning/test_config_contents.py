"""Contents of MachineConfigs that the server keeps in memory."""

import pytest

from tests.provisioning.samples import Json, make_config, make_file
from treenail.errors import NotFoundError
from treenail.provisioning.content.cluster_source import ConfigContents
from treenail.provisioning.content.source import PackedConfig, SourceUnreadyError

NAMES = ("a", "b", "c", "d")


class Configs:
    """The MachineConfigs of an API server, and the pools that name some of them."""

    def __init__(self) -> None:
        self.documents: dict[str, Json] = {}
        self.named: set[str] = set()
        self.requests: list[str] = []
        size = len(PackedConfig.from_json(make("a")).content)
        self.contents = ConfigContents(self.fetch, lambda: self.named, unused_limit=5 * size // 2)

    def fetch(self, name: str) -> Json:
        self.requests.append(name)
        if name not in self.documents:
            raise NotFoundError(name)
        return self.documents[name]

    def put(self, document: Json) -> PackedConfig:
        self.documents[document["metadata"]["name"]] = document
        return self.contents.pack_config(document)


def make(name: str, content: str = "x") -> Json:
    return make_config(name, make_file("/etc/motd", content))


@pytest.fixture
def configs() -> Configs:
    return Configs()


def test_all_contents_stay_before_the_pools_are_known(configs: Configs) -> None:
    for each in [configs.put(make(name)) for name in NAMES]:
        assert not each.content
        assert configs.contents.load_config(each).content
    assert configs.requests == []


def test_contents_that_no_pool_names_are_read_again(configs: Configs) -> None:
    configs.named = {"a"}
    packed = {name: configs.put(make(name)) for name in NAMES}
    configs.contents.begin_dropping()
    packed["e"] = configs.put(make("e"))
    for name in ("a", "e", "d", "c"):  # a pool names it; the newest one; two within the limit
        assert configs.contents.load_config(packed[name]).name == name
    assert configs.requests == []
    found = configs.contents.load_config(packed["b"])
    assert configs.requests == ["b"]
    assert found == PackedConfig.from_json(make("b"))
    configs.contents.load_config(packed["b"])
    assert configs.requests == ["b"]


def test_newest_contents_stay_above_the_limit(configs: Configs) -> None:
    configs.contents.begin_dropping()
    large = configs.put(make("a", "".join(map(chr, range(0x100, 0x1000)))))
    assert configs.contents.load_config(large).size > 10_000
    assert configs.requests == []


def test_config_that_has_changed_since_is_not_ready(configs: Configs) -> None:
    old = configs.put(make("a"))
    new = configs.put(make("a", "y"))
    with pytest.raises(SourceUnreadyError, match="MachineConfig a has just changed"):
        configs.contents.load_config(old)
    assert configs.contents.load_config(new).version == new.version


def test_deleted_config_is_forgotten(configs: Configs) -> None:
    packed = configs.put(make("a"))
    configs.contents.forget_config("a")
    del configs.documents["a"]
    with pytest.raises(NotFoundError):
        configs.contents.load_config(packed)
