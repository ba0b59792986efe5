"""Rules of the virtual machines' story about what a Node says before an update is verified."""

import pytest

from treenail.api import annotations as key
from treenail_lab.apiserver.store import StoreEvent
from vmlab.story import Story

OLD, NEW = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def tell_boot(current_image: str, target_image: str) -> list[str]:
    """Return the violations of a boot while the target is not verified."""
    story = Story("node", OLD)
    notes = {
        key.CURRENT_CONFIG: "rendered-1",
        key.DESIRED_DRAIN: "drain-1",
        key.LAST_APPLIED_DRAIN: "drain-1",
    }
    if current_image:
        notes[key.CURRENT_OS_IMAGE] = current_image
    node = {"metadata": {"name": "node", "annotations": notes}, "spec": {"unschedulable": True}}
    story.see(("", "nodes"), StoreEvent("MODIFIED", 1, node, None))
    target = {"config": "rendered-1", "image": target_image}
    update = {"phase": "rebooting", "drainToken": "drain-1", "target": target}
    story.booted({"digest": NEW, "ledger": {"update": update}})
    return story.violations


@pytest.mark.parametrize(
    ("current", "target"),
    [
        (f"example.com/os@{OLD}", ""),
        ("", f"example.com/os@{NEW}"),
        (f"example.com/os@{OLD}", f"example.com/os@{NEW}"),
    ],
)
def test_config_of_the_target_may_be_that_of_the_node_before(current: str, target: str) -> None:
    assert tell_boot(current, target) == []


@pytest.mark.parametrize("image", ["", f"example.com/os@{OLD}"])
def test_target_that_is_reported_before_it_is_verified_is_a_violation(image: str) -> None:
    assert "rendered-1 was reported, and the ledger says rebooting" in tell_boot(image, image)


@pytest.mark.parametrize(("reboots", "complaints"), [(0, 0), (1, 1)])
def test_verified_config_needs_a_drain_after_a_reboot_only(reboots: int, complaints: int) -> None:
    story = Story("node", OLD)
    node = {"metadata": {"name": "node", "annotations": {key.CURRENT_CONFIG: "old"}}, "spec": {}}
    story.see(("", "nodes"), StoreEvent("MODIFIED", 1, node, None))
    target = {"config": "new", "image": ""}
    update = {"phase": "verifying", "drainToken": "", "target": target, "rebootCount": reboots}
    story.booted({"digest": OLD, "ledger": {"update": update}})
    assert len(story.violations) == complaints
