"""Each config of an update is parsed once, and no parsed config stays in memory at rest."""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

import pytest

from tests.daemon.configuration.test_config_walks import APP, CONFIGS, STOCK, config, world_at
from tests.daemon.nodes import Node, Process, assert_at_rest
from tests.fakes.clock import FakeClock
from tests.fakes.world import World
from tests.update.build import B
from treenail.api.disruptionpolicy import (
    ClusterDisruptionPolicy,
    DisruptionPolicy,
    DrainPolicyAction,
    FileDisruptionPolicy,
    RestartPolicyAction,
)
from treenail.api.ignition.parser import parse_ignition
from treenail.daemon.reconcile.loop import Wakeup
from treenail.update.state.ledger_record import Target

KUBELET_FILE = "/etc/kubelet.conf"
LIVE = Target("live")
PAUSES = 20


@contextmanager
def count_parses() -> Iterator[list[str]]:
    """Collect the location of each call of `parse_ignition`, by whatever name it is called."""
    calls: list[str] = []

    def note_call(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code is parse_ignition.__code__:
            calls.append(frame.f_locals["location"])

    sys.setprofile(note_call)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def make_resting_node(world: World) -> Node:
    node = Node(world)
    node.settle()
    assert node.process is not None
    node.process.config_cache.drop_parsed()
    return node


def request_live_update(world: World) -> None:
    """Request a config that drains the node and restarts the kubelet, without a reboot."""
    stock = next(each for each in CONFIGS if each.name == STOCK.config)
    storage = {**stock.config["storage"]}
    storage["files"] = [
        *storage["files"],
        {"path": KUBELET_FILE, "contents": {"source": "data:,x"}},
    ]
    world.configs[LIVE.config] = replace(
        stock,
        metadata=replace(stock.metadata, name=LIVE.config),
        config={**stock.config, "storage": storage},
    )
    actions = (DrainPolicyAction(), RestartPolicyAction("kubelet.service"))
    files = (FileDisruptionPolicy(KUBELET_FILE, actions),)
    world.policy = ClusterDisruptionPolicy(DisruptionPolicy(files=files))
    world.request_target(LIVE)


def test_update_without_reboot_parses_origin_and_target_once() -> None:
    world = world_at(STOCK)
    node = make_resting_node(world)
    process, boots = node.process, world.boots
    request_live_update(world)
    with count_parses() as calls:
        node.settle()
        node.clock.move(601.0)  # a full check for drift is due
        node.turn()
    assert (node.process, world.boots) == (process, boots)
    assert len(calls) == 2
    assert_at_rest(world, LIVE)


@pytest.mark.parametrize("target", [B, Target("next")])
def test_update_with_reboot_parses_origin_before_and_target_on_both_sides(target: Target) -> None:
    world = world_at(STOCK)
    node = make_resting_node(world)
    boots = world.boots
    world.request_target(target)
    with count_parses() as before_reboot:
        while world.boots == boots:
            world.drain_controller()
            node.turn()
    with count_parses() as after_reboot:
        node.settle()
    assert (len(before_reboot), len(after_reboot)) == (2, 1)
    assert_at_rest(world, target)


def test_config_with_another_content_is_parsed_again() -> None:
    world = world_at(STOCK)
    cache = Process(world, FakeClock()).config_cache
    world.configs["one"] = config("one", {APP: "1"})
    first = cache.fetch_config("one")
    assert cache.fetch_config("one") is first
    assert cache.read_cached("one") is first
    world.configs["one"] = config("one", {APP: "2"})
    second = cache.fetch_config("one")
    assert second.wanted != first.wanted
    assert cache.read_cached("one") is second


def test_third_config_takes_the_place_of_the_one_used_longest_ago() -> None:
    world = world_at(STOCK)
    cache = Process(world, FakeClock()).config_cache
    first, second = cache.fetch_config(STOCK.config), cache.fetch_config("next")
    assert cache.read_cached(STOCK.config) is first
    third = cache.fetch_config("freely")
    assert cache.read_cached("freely") is third
    assert cache.read_cached(STOCK.config) is first
    assert cache.read_cached("next") is not second


class RestingWakeup(Wakeup):
    """A wakeup that nothing triggers; time passes at once."""

    def __init__(self, clock: FakeClock, stop: Callable[[], None]) -> None:
        super().__init__()
        self._clock = clock
        self._stop = stop
        self._pauses = 0

    def wait(self, seconds: float) -> frozenset[str]:
        self._clock.move(seconds)
        self._pauses += 1
        if self._pauses == PAUSES:
            self._stop()
        return frozenset()


class RestingProcess(Process):
    """An agent whose `run` returns after some time at rest."""

    def make_wakeup(self, clock: FakeClock) -> Wakeup:
        return RestingWakeup(clock, self.stop.set)


def test_agent_at_rest_holds_no_parsed_config() -> None:
    process = RestingProcess(world_at(STOCK), FakeClock())
    process.cluster.see()
    process.loop.reconcile_once()
    parsed = weakref.ref(process.config_cache.fetch_config(STOCK.config))
    assert parsed() is not None
    process.loop.run()
    assert parsed() is None
