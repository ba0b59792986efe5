"""The power is cut at random moments of updates: un-synced data is lost, and no rule is broken."""

import os
import random
from functools import partial

import pytest

from tests.records import write_record
from vmlab.site import Goal, Site
from vmlab.tools import say

CUTS = int(os.environ.get("TREENAIL_VM_CUTS", "50"))
SEED = int(os.environ.get("TREENAIL_VM_SEED", "1"))
CHANGES, CHANGE_S = 12, 10.0
"""How often an update tells the API server something, and about how long that takes each time."""


def cut_repeatedly(
    site: Site, cuts: int, test: pytest.Item, goals: tuple[Goal, Goal] | None = None
) -> None:
    """Update the node between two goals in turn, and cut the power at random moments.

    The node is at the first of ``goals``; without them they are two images. The table at the end
    tells of the test in which phases that was.
    """
    chance = random.Random(SEED)
    # What the kernel would write on its own within seconds stays unwritten: a lost sync shows.
    site.hold_back_writes()
    goals = goals or (site.first, site.goal(site.image("2")))
    goal: Goal = goals[0]
    for number in range(1, cuts + 1):
        if site.is_at(goal):
            goal = goals[1] if goal == goals[0] else goals[0]
            site.ask(goal)
        changes, delay_s = chance.randrange(CHANGES), chance.uniform(0.0, CHANGE_S)
        site.let_pass(changes, delay_s, until=partial(site.is_at, goal))
        phase = site.cut_power()
        say(f"power cut {number} of {cuts}, {phase}")
        assert site.story.violations == []
        test.user_properties.append(("cut", phase))
    site.settle(goal)


def test_many_power_cuts_reach_old_or_new_state(site: Site, request: pytest.FixtureRequest) -> None:
    result = "not finished"
    try:
        cut_repeatedly(site, CUTS, request.node)
        result = "the old or the new image each time, and no rule of vmlab/story.py broken"
    finally:
        variables = f"TREENAIL_VM_CUTS={CUTS} TREENAIL_VM_SEED={SEED}"
        write_record(
            "machines",
            what="power cuts at random moments of updates in a virtual machine",
            count=len(request.node.user_properties),
            result=result,
            command=f"{variables} make vm-test ARGS='-k many_power'",
        )
