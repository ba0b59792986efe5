"""API requests of a node: none at rest, and few writes for an update."""

from collections import Counter

import pytest

from tests.granted_verbs import iter_granted_verbs
from tests.integration.site import USER, Options, Site
from tests.records import write_record
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.manifests.installation import build_node_access
from treenail_lab.cluster import build_rendered_config

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


@pytest.mark.long("no conditions")
def test_agent_uses_each_verb_of_its_role(site: Site, options: Options) -> None:
    # A changed file needs the disruption policy of the cluster.
    files = [{"path": "/etc/app.conf", "contents": {"source": "data:,x"}}]
    config = {"ignition": {"version": "3.5.0"}, "storage": {"files": files}}
    name = site.lab.add_config(build_rendered_config("rendered-with-a-file", {"config": config}))
    site.annotate({key.DESIRED_CONFIG: name})
    site.wait_note(key.CURRENT_CONFIG, name)
    rest(site)
    counts = site.server.call_api(lambda api: api.requests.count_by_user())
    used = {(resource, verb) for user, verb, resource in counts if user == USER}
    granted = {
        (resource.partition(".")[0], verb)
        for document in build_node_access()
        for resource, verb in iter_granted_verbs(document.get("rules", ()))  # type: ignore[arg-type]  # JSON
    }
    # The server counts a change of an Event when the same one happens again.
    unused = {("events", "patch"), ("pinnedimagesets", "get")}  # No set is for this node.
    if not options.machine_config_nodes:
        unused = unused | {("machineconfignodes/status", "patch")}
    assert granted - used <= unused
    latest = site.server.call_api(lambda api: api.requests.list_latest())
    assert [each for each in latest if each.user == USER and each.code == 403] == []
    write_record(
        "privilege",
        what="verbs that the manifests grant the agent, against its requests in an update",
        count=len(granted),
        result="each is used, repeats an Event, or reads pinned images",
        command="make test ARGS=tests/integration/test_api_calls.py",
    )
