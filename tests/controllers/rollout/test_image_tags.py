"""Pools whose image is a tag, in virtual time: digests, windows, tags that move back or go."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any

import pytest

from tests.controllers.rollout.world import Killed, World, build_reconciler
from tests.fakes.tag_source import FakeTagSource
from treenail.api import annotations as key
from treenail.api.machineconfigpool import MachineConfigPool, reject_unknown_pool_fields
from treenail.clocks import parse_rfc3339
from treenail.controllers.pools.image_tags import CHECK_INTERVAL_S, UNRESOLVED_CHECK_S
from treenail.controllers.pools.registry_requests import TagMetrics
from treenail.controllers.rollout.image_tag_updater import TagDependencies
from treenail.controllers.runtime.controller_metrics import ControllerMetrics
from treenail.errors import ConfigError, UnreachableError
from treenail.image.build_result import BuildReason

TAG = "registry.example.com/os/node:stable"
IMAGES = [f"registry.example.com/os/node@sha256:{digit * 64}" for digit in "abc"]
WINDOW = "{windows: [{days: [Sun], start: '02:00', duration: 4h, timeZone: UTC}]}"
SUNDAY = parse_rfc3339("2026-11-22T03:00:00Z") or 0.0
MONDAY = SUNDAY + 86400


class InlineExecutor(Executor):
    """Runs work at once, on the same thread."""

    def submit(self, fn: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        found: Future[Any] = Future()
        found.set_result(fn(*arguments, **named))
        return found


class Site:
    """A pool of one node whose image is a tag."""

    def __init__(self, policy: str | None = None, **tag: object) -> None:
        self.world = World()
        self.world.seconds = MONDAY
        self.world.add_node("n0", "old")
        spec = {"name": TAG, "follow": True, **tag}
        self.world.set_pool("worker", "old", policy, osImageTag=spec)
        self.source = FakeTagSource({TAG: IMAGES[0]})
        self.metrics = ControllerMetrics()
        self.notified: list[str] = []
        self.restart()

    def restart(self) -> None:
        metrics = TagMetrics(ControllerMetrics(), "pool_image")
        if not self.notified:
            metrics = TagMetrics(self.metrics, "pool_image")
        parts = TagDependencies(self.source, InlineExecutor(), self.notified.append, metrics)
        self.reconciler = build_reconciler(self.world, tags=parts)

    def turn(self, after_s: float = 0.0) -> float | None:
        """Pass time; reconcile until the registry is no longer asked. Return the delay."""
        self.world.pass_time(after_s)
        self.source.now = self.world.seconds
        while True:
            self.world.deliver()
            count = len(self.notified)
            delay = self.reconciler.sync_pool("worker")
            if len(self.notified) == count:
                return delay

    def settle(self) -> None:
        """Let the node reach its target."""
        for _ in range(40):
            self.turn(60)

    def image(self) -> str | None:
        """The image that the node is assigned."""
        notes = self.world.objects["nodes"]["n0"]["metadata"]["annotations"]
        return notes.get(key.DESIRED_OS_IMAGE)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.world.objects["machineconfigpools"]["worker"]
        return found.get("status", {})

    def condition(self, kind: str) -> tuple[str, str, str]:
        for each in self.status()["conditions"]:
            if each["type"] == kind:
                return each["status"], each["reason"], each["message"]
        return "", "", ""


def test_tag_is_resolved_and_nodes_get_the_digest() -> None:
    site = Site()
    site.turn()
    site.turn(60)
    assert site.image() == IMAGES[0]
    assert site.status()["osImageTag"] == {
        "tag": TAG,
        "image": IMAGES[0],
        "resolvedAt": "2026-11-23T03:00:00Z",
        "earlier": [],
    }
    assert site.condition("OSImageResolved")[:2] == ("True", "Resolved")
    assert site.source.asked == [(TAG, frozenset({"amd64"}), "")]


def test_unreadable_controllerconfig_is_reported_by_the_resolution() -> None:
    site = Site()
    site.source.access_error = ConfigError("additionalTrustBundle: expected base64")
    site.turn()
    assert site.source.asked


def test_new_digest_is_assigned_and_reported() -> None:
    site = Site()
    site.settle()
    site.source.images[TAG] = IMAGES[1]
    site.turn(CHECK_INTERVAL_S)
    site.turn(60)
    assert site.image() == IMAGES[1]
    assert site.status()["osImageTag"]["earlier"] == [IMAGES[0]]
    said = ("worker", "ImageTagMoved", f"{TAG} moved from {IMAGES[0]} to {IMAGES[1]}")
    assert site.world.notices == [said]
    name = "treenail_controller_pool_image_tag_changes_total"
    line = f'{name}{{pool="worker",reason="ImageTagMoved"}} 1.0'
    assert line in site.metrics.render_text().splitlines()


def test_tag_without_follow_is_resolved_once() -> None:
    site = Site(follow=False)
    site.settle()
    site.source.images[TAG] = IMAGES[1]
    site.turn(30 * 86400)
    site.turn(60)
    assert site.image() == IMAGES[0]
    assert len(site.source.asked) == 1


def test_new_digest_waits_for_a_window_of_the_policy() -> None:
    site = Site(WINDOW)
    site.turn()
    site.turn(60)
    # Known at once, because the pool has no image without it; the node waits for the window.
    assert site.status()["osImageTag"]["image"] == IMAGES[0]
    assert site.image() is None
    site.source.images[TAG] = IMAGES[1]
    site.turn(3600)
    assert site.status()["osImageTag"]["image"] == IMAGES[0]
    site.turn(SUNDAY + 7 * 86400 - site.world.seconds)
    site.turn(60)
    assert site.image() == IMAGES[1]


@pytest.mark.parametrize(
    ("image", "reason", "words"),
    [
        (IMAGES[0], "TagMovedBack", f"{TAG} moved back to {IMAGES[0]}, which preceded "),
        (None, "TagNotFound", f"cannot resolve {TAG}: "),
    ],
)
def test_tag_that_moves_back_or_disappears_is_reported_and_not_followed(
    image: str | None, reason: str, words: str
) -> None:
    site = Site()
    site.settle()
    site.source.images[TAG] = IMAGES[1]
    site.settle()
    site.source.images = {TAG: image} if image else {}
    site.settle()
    assert site.image() == IMAGES[1]
    status, found, message = site.condition("OSImageResolved")
    assert (status, found) == ("False", reason)
    assert message.startswith(words)
    assert f"nodes keep {IMAGES[1] if image is None else 'the latter'}" in message
    # The nodes are as requested: the pool is not degraded, and warned once.
    assert site.condition("Degraded")[0] == "False"
    assert site.condition("Updated")[0] == "True"
    assert [each[1] for each in site.world.warnings] == [reason]
    site.source.images[TAG] = IMAGES[2]
    site.settle()
    assert site.image() == IMAGES[2]
    assert site.condition("OSImageResolved")[:2] == ("True", "Resolved")


def test_restart_keeps_the_image_and_asks_again() -> None:
    site = Site(follow=False)
    site.settle()
    site.source.images[TAG] = IMAGES[1]
    site.restart()
    site.settle()
    assert site.image() == IMAGES[0]
    assert len(site.source.asked) == 1


@pytest.mark.parametrize("fault", ["kill before", "kill after", "lost", "conflict"])
@pytest.mark.parametrize("write", range(4))
def test_death_at_each_write_leads_to_one_image(fault: str, write: int) -> None:
    site = Site(follow=False)
    count = 0

    def count_write(*_: object) -> None:
        nonlocal count
        count += 1
        if count == write:
            site.world.next_fault = fault

    site.world.on_write = count_write
    if not write:
        site.world.next_fault = fault
    with suppress(Killed, UnreachableError):
        site.settle()
    known = site.status().get("osImageTag", {}).get("image")
    # Moved meanwhile: what was recorded stays, because the tag is not followed.
    site.source.images[TAG] = IMAGES[1]
    site.restart()
    site.settle()
    assert site.image() == (known or IMAGES[1])
    assert site.condition("Updated")[0] == "True"


def test_unknown_image_degrades_the_pool_until_the_login_changes() -> None:
    site = Site(pullSecret="registry")
    site.source.failure = BuildReason.BASE_LOGIN_REFUSED
    delay = site.turn()
    assert delay == UNRESOLVED_CHECK_S
    assert site.image() is None
    status, reason, message = site.condition("Degraded")
    assert (status, reason) == ("True", "BaseLoginRefused")
    assert message.startswith(f"cannot resolve {TAG}: the registry failed; ")
    assert site.status()["osImageTag"]["reason"] == "BaseLoginRefused"
    site.turn(UNRESOLVED_CHECK_S)
    assert len(site.source.asked) == 1
    site.source.failure, site.source.version = None, "2"
    site.turn(1)
    site.turn(60)
    assert site.image() == IMAGES[0]
    assert site.condition("Degraded")[0] == "False"
    assert "reason" not in site.status()["osImageTag"]
    assert site.source.asked[-1][2] == "registry"


def test_image_must_have_the_architectures_of_all_nodes() -> None:
    site = Site()
    for name, architecture in (("n0", "amd64"), ("n1", "arm64")):
        if name not in site.world.objects["nodes"]:
            site.world.add_node(name, "old")
        reported = {"status": {"nodeInfo": {"architecture": architecture}}}
        site.world.change("nodes", name, reported)
    site.turn()
    assert site.source.asked == [(TAG, frozenset({"amd64", "arm64"}), "")]
    assert site.condition("Degraded")[1] == "TagNotFound"


def test_digest_in_place_of_the_tag_removes_the_record() -> None:
    site = Site()
    site.settle()
    site.world.set_pool("worker", "old", osImage=IMAGES[2])
    site.settle()
    assert site.image() == IMAGES[2]
    assert "osImageTag" not in site.status()
    assert site.condition("OSImageResolved")[:2] == ("True", "NoTag")


def test_another_tag_is_resolved_and_nodes_wait_for_it() -> None:
    site = Site()
    site.settle()
    other = "registry.example.com/os/node:next"
    site.world.set_pool("worker", "old", osImageTag={"name": other, "follow": True})
    site.turn()
    assert site.image() == IMAGES[0]
    assert site.condition("Degraded")[1] == "TagNotFound"
    site.source.images[other] = IMAGES[1]
    site.settle()
    assert site.image() == IMAGES[1]
    assert site.status()["osImageTag"]["earlier"] == []


@pytest.mark.parametrize("name", ["os:stable", IMAGES[0], "registry.example.com/os"])
def test_invalid_tag_is_a_condition_and_no_question(name: str) -> None:
    site = Site(name=name)
    site.turn()
    assert site.source.asked == []
    status, _, message = site.condition("Degraded")
    assert status == "True"
    assert "spec.osImageTag.name of pool worker" in message


def test_digest_and_tag_together_are_refused() -> None:
    site = Site()
    site.world.set_pool("worker", "old", osImageTag={"name": TAG}, osImage=IMAGES[1])
    site.turn()
    assert site.condition("Degraded")[:2] == ("True", "InvalidConfiguration")
    assert site.image() is None


def test_unknown_field_of_a_tag_in_a_file_is_refused() -> None:
    document = {"metadata": {"name": "a"}, "spec": {"osImageTag": {"name": TAG, "folow": True}}}
    assert MachineConfigPool.from_json(document).os_image_tag is not None
    with pytest.raises(ConfigError, match="folow"):
        reject_unknown_pool_fields(document)
