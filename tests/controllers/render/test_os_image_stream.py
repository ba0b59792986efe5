"""OS image streams: which images a pool follows, and the status that names the stream."""

import re
from typing import Any

import pytest
import yaml

from tests.controllers.render.test_controller import add_config, add_pool, degraded, running
from tests.fixtures.objects import make_config, make_object, make_pool
from tests.waiting import wait_until
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.cli.controller.rollout import read_rollouts
from treenail.config.merge import DefaultImages
from treenail.controllers.pools import os_image
from treenail.controllers.render import render
from treenail.controllers.status.rollout_result import RolloutOutcome
from treenail.errors import ConfigError, InvalidError
from treenail.kube.api_client import Client
from treenail.kube.resources import MACHINECONFIGPOOLS, MACHINECONFIGS, OSIMAGESTREAMS
from treenail_lab.apiserver.serving.server import LabServer

Json = dict[str, Any]
IMAGES = {
    name: f"registry.example.com/os@sha256:{digit * 64}"
    for name, digit in zip("abc", "123", strict=True)
}
EXTENSIONS = f"registry.example.com/extensions@sha256:{'4' * 64}"
BASE = DefaultImages("base", "base-extensions")


def make_status(default: str, *names: str) -> Json:
    streams = [
        {"name": name, "osImage": IMAGES[name], "osExtensionsImage": EXTENSIONS} for name in names
    ]
    return {"defaultStream": default, "availableStreams": streams}


def make_stream(spec: str, status: Json | None, name: str = "cluster") -> Json:
    return make_object(OSIMAGESTREAMS, name, {"defaultStream": spec}, top={"status": status})


def read_pool(name: str, stream: str = "") -> MachineConfigPool:
    spec = {"osImageStream": {"name": stream}} if stream else {}
    return MachineConfigPool.from_json(make_pool(name, **spec))


NO_STREAMS = "OSImageStream cluster does not exist"
NO_STATUS = "OSImageStream cluster has no status.availableStreams"


@pytest.mark.parametrize(
    ("pool", "streams", "chosen"),
    [
        # As in GetEffectiveOSImageStreamName and GetOSImageStreamSetByName of the MCO.
        (("worker", "b"), "a a ab", "b"),
        (("worker", ""), "a a ab", "a"),
        (("infra", "b"), "a a abc", "b"),
        (("infra", ""), "a a abc", "c"),
        (("master", ""), "a a abc", "a"),
        (("arbiter", ""), "a a abc", "a"),
        (("worker", "x"), "a a ab", "stream x of pool worker: OSImageStream cluster has a, b"),
        # A changed spec.defaultStream applies before the MCO has copied it, and without one.
        (("master", ""), "b a ab", "b"),
        (("master", ""), "x a ab", "a"),
        (("worker", "a"), "a", NO_STATUS),
        (("master", ""), "a", NO_STATUS),
        (("master", ""), "", "base"),
        (("master", "a"), "", NO_STREAMS),
        (("infra", ""), "", NO_STREAMS),
    ],
)
def test_pool_follows_its_stream_or_that_of_worker_or_the_default(
    pool: tuple[str, str], streams: str, chosen: str
) -> None:
    """``streams`` are the default streams of spec and status, and the available ones."""
    stream = None
    if streams:
        default, *words = streams.split()
        status = make_status(*words[:1], *words[1]) if words else None
        stream = os_image.OSImageStream.from_json(make_stream(default, status))
    found = read_pool(*pool)
    pools = {"worker": read_pool("worker", "c") if pool[0] == "infra" else found}
    choice = os_image.describe_stream(found, pools, stream)
    if chosen == "base":
        assert os_image.select_base_images(found, pools, stream, BASE) == BASE
        assert choice == ""
    elif chosen in IMAGES:
        images = os_image.select_base_images(found, pools, stream, BASE)
        assert images == DefaultImages(IMAGES[chosen], EXTENSIONS)
        assert IMAGES[chosen] in choice
    else:
        with pytest.raises(ConfigError, match=re.escape(chosen)) as raised:
            os_image.select_base_images(found, pools, stream, BASE)
        assert raised.value.remedy
        assert choice


def test_custom_pool_without_pool_worker_follows_the_default() -> None:
    stream = os_image.OSImageStream.from_json(make_stream("a", make_status("a", "a")))
    images = os_image.select_base_images(read_pool("infra"), {}, stream, BASE)
    assert images.os == IMAGES["a"]


def render_files(*documents: Json) -> render.RenderedConfig:
    manifests = render.read_manifests([("all.yaml", yaml.safe_dump_all(documents))])
    rendered, errors = render.render_pools(manifests, "worker")
    if errors:
        raise errors[0]
    return rendered[0]


SELECTOR = {"matchLabels": {"machineconfiguration.openshift.io/role": "worker"}}
FILES = [
    make_pool("worker", machineConfigSelector=SELECTOR, osImageStream={"name": "b"}),
    make_config("00-base", role="worker"),
]


def test_files_render_with_the_stream_of_the_pool() -> None:
    rendered = render_files(*FILES, make_stream("a", make_status("a", "a", "b")))
    assert rendered.config.os_image_url == IMAGES["b"]
    assert rendered.config.extensions_image == EXTENSIONS
    assert not rendered.has_os_image_override


TAGGED = {"defaultStream": "a", "availableStreams": [{"name": "a", "osImage": "r.example/os:1"}]}
WRONG = {
    "all.yaml, document 1: pool worker follows the OS image stream b, but MachineConfig 10-image "
    "sets spec.osImageURL": make_config("10-image", role="worker", osImageURL=IMAGES["c"]),
    "all.yaml, document 4, OSImageStream other: metadata.name: expected cluster, found other": (
        make_stream("a", make_status("a", "b"), "other")
    ),
    "all.yaml, document 4, OSImageStream cluster: status.availableStreams[0].osImage is "
    "'r.example/os:1', but it names a tag": make_stream("a", TAGGED),
}


@pytest.mark.parametrize(("sentence", "document"), WRONG.items())
def test_wrong_stream_in_a_file_is_named(sentence: str, document: Json) -> None:
    is_stream = document["kind"] == "OSImageStream"
    other = (
        make_config("20", role="infra") if is_stream else make_stream("a", make_status("a", "b"))
    )
    with pytest.raises(ConfigError) as raised:
        render_files(*FILES, other, document)
    assert str(raised.value).startswith(sentence)


def test_new_image_of_a_stream_is_rolled_out_and_the_status_names_the_stream(
    server: LabServer, client: Client
) -> None:
    add_config(client, "00-base")
    add_config(client, "00-infra", role="infra")
    add_pool(client)
    add_pool(client, "infra")
    client.create(OSIMAGESTREAMS, make_object(OSIMAGESTREAMS, "cluster", {"defaultStream": "a"}))

    def write_streams(status: Json | None) -> None:
        client.patch(OSIMAGESTREAMS, "cluster", {"status": status}, subresource="status")

    def get_image(pool: str) -> str:
        found: Any = client.get(MACHINECONFIGPOOLS, pool)
        name = found["spec"].get("configuration", {}).get("name", "")
        config: Any = client.get(MACHINECONFIGS, name) if name else {"spec": {}}
        return str(config["spec"].get("osImageURL", ""))

    def read_outcomes() -> set[RolloutOutcome]:
        return {result.outcome for result in read_rollouts(client, [])}

    def finish_rollout(pool: str) -> None:
        found: Any = client.get(MACHINECONFIGPOOLS, pool)
        status = {
            "configuration": found["spec"]["configuration"],
            "observedGeneration": found["metadata"]["generation"],
            "conditions": [
                *found["status"]["conditions"],
                {"type": "Updated", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
            ],
        }
        client.patch(MACHINECONFIGPOOLS, pool, {"status": status}, subresource="status")

    def get_reported(pool: str) -> str:
        found: Any = client.get(MACHINECONFIGPOOLS, pool)
        return str(found["status"].get("osImageStream", {}).get("name", ""))

    with running(server):
        wait_until(lambda: NO_STATUS in degraded(client)[2])
        write_streams(make_status("a", "a", "b"))
        for pool in ("worker", "infra"):
            wait_until(lambda pool=pool: get_image(pool) == IMAGES["a"])
            wait_until(lambda pool=pool: degraded(client, pool)[0] == "False")
            assert get_reported(pool) == ""
            finish_rollout(pool)
            wait_until(lambda pool=pool: get_reported(pool) == "a")
        wait_until(lambda: read_outcomes() == {RolloutOutcome.COMPLETE})
    # Nothing renders: clients see that the change is not observed.
    client.patch(MACHINECONFIGPOOLS, "worker", {"spec": {"osImageStream": {"name": "b"}}})
    assert read_outcomes() == {RolloutOutcome.IN_PROGRESS}
    with running(server):
        wait_until(lambda: get_image("worker") == IMAGES["b"])
        # It follows pool worker.
        wait_until(lambda: get_image("infra") == IMAGES["b"])
        wait_until(lambda: get_reported("worker") == get_reported("infra") == "")
        changed = make_status("a", "a", "b")
        changed["availableStreams"][1]["osImage"] = IMAGES["c"]
        write_streams(changed)
        wait_until(lambda: get_image("worker") == IMAGES["c"])


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ({"defaultStream": "a", "availableStreams": []}, "availableStreams"),
        (TAGGED, "osImage"),
    ],
)
def test_wrong_status_is_rejected_by_the_crd(client: Client, status: Json, message: str) -> None:
    client.create(OSIMAGESTREAMS, make_object(OSIMAGESTREAMS, "cluster", {"defaultStream": "a"}))
    with pytest.raises(InvalidError, match=message):
        client.patch(OSIMAGESTREAMS, "cluster", {"status": status}, subresource="status")
