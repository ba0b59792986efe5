"""Random changes: treenail's target hash changes whenever HyperShift's own hash does.

The variable and the program are those of tests/controllers/hosted/plan/test_hash_of_hypershift.py.
"""

import json
import random
from collections import Counter
from typing import Any

import pytest

from tests.controllers.hosted.config import inputs
from tests.controllers.hosted.plan import test_hash_of_hypershift as differential
from tests.controllers.hosted.plan.test_hosted_plan import config_map, make_pool
from tests.fixtures import hosted
from treenail.api.hosted import nodepool
from treenail.controllers.hosted.config import generator
from treenail.controllers.hosted.config.pool_config import PoolConfig, PoolConfigError

Json = dict[str, Any]
OTHER_IMAGE = f"quay.io/example/os@sha256:{'5' * 64}"
# A document that writes what HyperShift writes by the proxy and the TLS profile.
SETTINGS = config_map(
    inputs.machine_config("60-settings", {"/etc/mco/proxy.env": "tlsSecurityProfile"}), name="s"
)


def make_releases() -> list[Json]:
    """The default stream of each version, and rhel-9, which is the default before 5.0."""
    found = []
    for version in differential.VERSIONS:
        own: Json = {"releaseVersion": version, "releaseImage": f"quay.io/r:{version}"}
        image = {"baseOSContainerImage": OTHER_IMAGE} if version >= "5" else {}
        found += inputs.make_release(**own)
        found += inputs.make_release(**own, osImageStream="rhel-9", **image)
    return found


RELEASES = make_releases()


def generate(state: list[Json]) -> PoolConfig | str:
    """Return the config of a state, or the reason why there is none."""
    pool, cluster, *maps = state
    by_name = {one["metadata"]["name"]: one for one in maps}
    facts = generator.ConfigInputs(
        nodepool.NodePool.from_json(pool),
        nodepool.HostedCluster.from_json(cluster),
        by_name,
        pool_config_maps=[SETTINGS],
        release_config_maps=RELEASES,
        pull_secret=inputs.PULL_SECRET,
        trust_bundle=inputs.BUNDLE,
        ssh_key=inputs.SSH_KEY,
    )
    try:
        return generator.generate_config(facts)
    except PoolConfigError as error:
        return error.reason


def test_target_hash_changes_whenever_hypershifts_hash_changes() -> None:
    if not (differential.HYPERSHIFT.read() / "hash").exists():
        pytest.skip(f"{differential.HYPERSHIFT.name}: the directory has no hash")
    choose, states = random.Random(36), list[list[Json]]()
    for _ in range(differential.COUNT):
        pool = make_pool(release={"image": f"quay.io/r:{choose.choice(differential.VERSIONS)}"})
        maps = [config_map(*differential.make_documents(choose), name=name) for name in "ab"]
        configuration = choose.choice(differential.CONFIGURATIONS)
        before = [pool, hosted.make_hosted_cluster(configuration=configuration), *maps]
        states += [before, differential.change_state(choose, before)]
    for *_, second in states:
        # Two documents of one name are an error here.
        second["data"]["config"] = second["data"]["config"].replace(" name: ", " name: b-")
    answers = differential.ask_hashes(states)
    made = [generate(state) for state in states]
    outcomes: Counter[str] = Counter()
    for number in range(0, len(states), 2):
        (was, now), (old, new) = answers[number : number + 2], made[number : number + 2]
        place = json.dumps(states[number : number + 2])
        if "error" in was or "error" in now or isinstance(old, str) or isinstance(new, str):
            outcomes["refused"] += 1
            continue
        if was["hash"] != now["hash"]:
            assert old.target_hash != new.target_hash, place
            outcomes["rolls" if old.rollout_hash != new.rollout_hash else "comment"] += 1
            continue
        # HyperShift hashes the TLS profile from 4.23 on.
        is_profile = "tlsSecurityProfile" in json.dumps([state[1] for state in states[number:][:2]])
        assert old.rollout_hash == new.rollout_hash or is_profile, place
        outcomes["nothing"] += 1
    assert outcomes["rolls"] > differential.COUNT / 10, outcomes
    assert outcomes["nothing"] > differential.COUNT / 10, outcomes
