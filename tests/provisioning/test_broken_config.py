"""New machines do not receive a config that breaks nodes, and receive the one that repairs them.

With the real controllers and simulated agents.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controllers.clusters import LIMIT_S, Place
from tests.controllers.rollout.agents import Agents
from tests.fixtures.controllers import CLOCK
from tests.provisioning.samples import make_file
from tests.provisioning.serving import IGNITION, Response, Serving, serve
from tests.waiting import wait_until
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.provisioning.content.cluster_source import ClusterSource
from treenail.provisioning.content.source import SourceSettings

pytestmark = [pytest.mark.integration]


@pytest.fixture
def place(kubeconfig: Path, tmp_path: Path) -> Iterator[Place]:
    found = Place(kubeconfig, tmp_path, ("render", "rollout", "drain"))
    try:
        found.install()
        yield found
    finally:
        found.remove()


def fetch_own_files(serving: Serving, pool: str) -> list[str]:
    """Return the files of MachineConfigs that a new machine receives; none before a config."""

    def fetch() -> Response | None:
        response = serving.get(f"/config/{pool}", f"Accept: {IGNITION.format('3.5.0')}")
        # Ignition tries again, too: the pool may name a config that the server sees later.
        return None if response.status == 503 else response

    found = wait_until(fetch, limit_s=LIMIT_S)
    if found.status != 200:
        return []
    paths = [each["path"] for each in found.json["storage"]["files"]]
    return [path for path in paths if path.startswith("/etc/own-")]


def test_config_that_breaks_a_node_reaches_no_new_machine(place: Place, tmp_path: Path) -> None:
    nodes = {place.node(name) for name in ("n1", "n2")}
    pool, good, broken = place.prefix, set[str](), set[str]()

    def change(path: str) -> None:
        files = {"files": [make_file(path)]}
        place.config("00", config={"ignition": {"version": "3.5.0"}, "storage": files})

    change("/etc/own-1")
    place.pool()
    informers = InformerSet(place.client, CLOCK)
    source = ClusterSource(informers, SourceSettings(), place.client)
    informers.start()
    (tmp_path / "server").mkdir()
    with (
        Agents(
            place.client,
            drains=True,
            selector=pool,
            is_bad=lambda desired: (
                desired.config in broken if broken else bool(good) and desired.config not in good
            ),
        ),
        place.controllers(),
        serve(tmp_path / "server", source=source) as serving,
    ):
        wait_until(lambda: place.at(place.rendered()) == nodes, limit_s=LIMIT_S)
        wait_until(lambda: fetch_own_files(serving, pool) == ["/etc/own-1"], limit_s=LIMIT_S)
        # The status names the config that all nodes had.
        wait_until(lambda: place.condition("Updated").get("status") == "True", limit_s=LIMIT_S)
        before = place.rendered()
        good.add(before)

        change("/etc/own-2")
        wait_until(lambda: place.rendered() != before, limit_s=LIMIT_S)
        # Until the broken config has degraded a node, and after that.

        def has_degraded_node() -> bool:
            is_degraded = place.condition("NodeDegraded").get("status") == "True"
            assert fetch_own_files(serving, pool) == ["/etc/own-1"]
            return is_degraded

        wait_until(has_degraded_node, limit_s=LIMIT_S)
        assert fetch_own_files(serving, pool) == ["/etc/own-1"]

        # A config that repairs the nodes reaches them and new machines.
        broken.add(place.rendered())
        change("/etc/own-3")
        wait_until(lambda: place.rendered() not in {before, *broken}, limit_s=LIMIT_S)
        wait_until(lambda: fetch_own_files(serving, pool) == ["/etc/own-3"], limit_s=LIMIT_S)
        wait_until(lambda: place.at(place.rendered()) == nodes, limit_s=LIMIT_S)
    informers.stop()
