"""API requests of a node: none at rest, and few writes for an update."""

from collections import Counter

import pytest

from tests.integration.site import USER, Options, Site
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

MOST_WRITES = 12
MOST_A_PHASE = 3
TURN_TRUE = [
    # Staged, and about to be drained.
    "ImagePulledFromRegistry",
    "UpdatePrepared",
    # Booted, and on trial.
    "AppliedFiles",
    "AppliedOSImage",
    "RebootedNode",
    "UpdateExecuted",
    # Verified, and about to serve.
    "Resumed",
    "UpdatePostActionComplete",
    "Updated",
]
WRITING = ("create", "update", "patch", "delete")


@pytest.fixture(scope="module", params=[True, False], ids=["conditions", "no conditions"])
def options(request: pytest.FixtureRequest) -> Options:
    """An agent that looks around ten times a second and says so."""
    settings = 'log_level = "debug"\n[limits]\nretry_first_s = 0.1\nresync_s = 0.1\n'
    return Options(agent_settings=settings, machine_config_nodes=request.param)


def requests(site: Site) -> dict[str, int]:
    """The agent's requests by verb."""
    counts = site.server.call_api(lambda api: api.requests.count_by_user())
    found: Counter[str] = Counter()
    for (user, verb, _), count in counts.items():
        if user == USER:
            found[verb] += count
    return dict(found)


def rest(site: Site) -> None:
    """Wait until the agent has looked around often, with nothing left to do or to tell."""
    looks = len(site.messages())
    wait_until(lambda: len(site.messages()) >= looks + 10)


def test_agent_at_rest_sends_no_requests(site: Site) -> None:
    rest(site)
    before = requests(site)
    rest(site)
    assert requests(site) == before
    assert site.transactions() == []


def test_update_needs_few_writes(site: Site, options: Options) -> None:
    rest(site)
    site.begin()
    before, turned = requests(site), len(site.witness.turned)
    site.reach(site.goal())
    rest(site)
    made = {verb: count - before.get(verb, 0) for verb, count in requests(site).items()}
    written = sum(made.get(verb, 0) for verb in WRITING)
    # An empty patch reads the MachineConfigNode: once after the boot, or, while there is none, with
    # each change of the conditions.
    empty = 1 if options.machine_config_nodes else 5
    assert written - empty == len(site.writes()), "the witness saw them all"
    assert written - empty <= MOST_WRITES
    assert made.get("update", 0) == made.get("delete", 0) == 0
    assert made["list"] == 2, "by the two watches, after the boot"
    phases = Counter(write.phase for write in site.writes())
    assert list(phases) == ["Working", "staging", "draining", "rebooting", "uncordoning", "Done"]
    assert max(phases.values()) <= MOST_A_PHASE, site.writes()
    assert site.witness.turned[turned:] == (TURN_TRUE if options.machine_config_nodes else [])
