"""An image with which the node is no good: it comes back by itself."""

from treenail.api import annotations as key
from vmlab.image.layers import Entry
from vmlab.site import Site

MASKED = {"usr/etc/systemd/system/kubelet.service": Entry(link="/dev/null")}


def test_an_image_whose_kubelet_is_masked_is_left_again(site: Site) -> None:
    bad = site.goal(site.image("bad", MASKED))
    site.ask(bad)
    site.wait(lambda: len(site.story.boots) == 2, "the node boots twice", 900.0)
    assert [boot.digest for boot in site.story.boots] == [bad.digest, site.first.digest]
    site.wait(lambda: not site.node()["spec"].get("unschedulable"), "the node serves again", 300.0)
    notes = site.notes()
    assert notes[key.STATE] == "Degraded"
    assert "kubelet" in notes[key.REASON]
    assert notes[key.CURRENT_CONFIG] == site.first.config
