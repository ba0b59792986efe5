"""An image with the self-contained tree of `tools/python_tree.py`: its own Python and packages."""

import os
from pathlib import Path

import pytest

from vmlab.image.layers import read_directory
from vmlab.site import Site

VARIABLE = "TREENAIL_VM_TREE"

pytestmark = pytest.mark.skipif(
    not os.environ.get(VARIABLE), reason=f"{VARIABLE} names no tree of tools/python_tree.py"
)


def test_agent_of_the_tree_updates_its_node(site: Site) -> None:
    tree = read_directory(Path(os.environ[VARIABLE]))
    layered = site.goal(site.image("2", tree))
    site.reach(layered)
    assert read_interpreter(site).startswith("/usr/lib/treenail/bin/python3")

    following = site.goal(site.image("3", tree))
    site.reach(following)
    assert [boot.digest for boot in site.story.boots] == [layered.digest, following.digest]
    assert "imported " in site.machine.sh("/usr/lib/treenail/check-treenail")


def read_interpreter(site: Site) -> str:
    """Return the program that runs the agent."""
    return site.machine.sh("readlink /proc/$(systemctl show -P MainPID treenail)/exe")
