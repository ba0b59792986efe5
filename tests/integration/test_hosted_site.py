"""A hosted cluster that treenail owns, end to end: real processes, real agents, no HyperShift.

Cluster API and its provider are an actor of the lab. All else runs with the printed permissions.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.controllers.installed import denied
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.clocks import SystemClock
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.kube.resources import MACHINES, NODES
from treenail.kube.watch import WatchScope
from treenail_lab.controllers import CONTROLLER_COMMAND
from treenail_lab.hosted.site import HostedSite, name_release
from treenail_lab.images import Credential, make_image
from treenail_lab.lifetime.fork_server import run_process
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine.settings import MachineSettings

pytestmark = pytest.mark.integration
Json = dict[str, Any]
LOGIN = Credential("lab", "let-me-pull")
OLD, NEW = (
    make_image("os/node", version, 50_000_000, credential=LOGIN) for version in ("4.22.1", "4.22.2")
)
LIMIT_S = 120.0
MOTD, PULL_SECRET = "/etc/motd", "/var/lib/kubelet/config.json"


class NodeHistory:
    """The targets that each node was given, in order, and how many were out of service at once."""

    def __init__(self, site: HostedSite) -> None:
        self.targets: dict[str, list[str]] = {}
        self.cordons = 0
        self.most_cordoned = 0
        self._cordoned: set[str] = set()
        self.informers = InformerSet(site.guest.client, SystemClock())
        view = self.informers.add_view(WatchScope(NODES), lambda document: document)
        view.add_handler(self._note)
        self.informers.start()

    def _note(self, name: str, _before: Json | None, after: Json | None) -> None:
        if after is None:
            self._cordoned.discard(name)
            return
        notes = after["metadata"].get("annotations", {})
        seen = self.targets.setdefault(name, [])
        desired = notes.get(key.DESIRED_CONFIG, "")
        if desired and seen[-1:] != [desired]:
            seen.append(desired)
        if not after.get("spec", {}).get("unschedulable"):
            self._cordoned.discard(name)
        elif name not in self._cordoned:
            self._cordoned.add(name)
            self.cordons += 1
        self.most_cordoned = max(self.most_cordoned, len(self._cordoned))


def read_status(site: HostedSite) -> dict[str, Json]:
    """Run ``status --hosted`` as a user; return its rows by the name of the pool."""
    kubeconfig = site.management.server.admin_kubeconfig
    done = run_process(
        [*CONTROLLER_COMMAND, "status", "--hosted", "-o", "json", f"--kubeconfig={kubeconfig}"],
        env={**os.environ, **owner.mark_environment()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60.0,
    )
    assert done.returncode == 0, done.stderr
    return {pool["name"]: pool for pool in json.loads(done.stdout)["pools"]}


def wait_updated(site: HostedSite, **machines: int) -> dict[str, Json]:
    """Wait until the pools have the numbers of machines, and are updated."""

    def find() -> dict[str, Json] | None:
        rows = read_status(site)
        done = all(
            rows[name]["state"] == "Updated" and rows[name]["counts"] == {"updated": count}
            for name, count in machines.items()
        )
        agents = [site.guest.read_annotations(name).get(key.STATE) for name in list_nodes(site)]
        return rows if done and set(agents) == {"Done"} else None

    return wait_until(find, limit_s=LIMIT_S)


def list_nodes(site: HostedSite) -> list[str]:
    found: Any = site.guest.client.list(NODES).items
    return sorted(node["metadata"]["name"] for node in found)


def read_files(site: HostedSite, pool: str, path: str) -> set[str]:
    machines = site.guest.machines
    return {
        (machines[name].root / path[1:]).read_text() for name in machines if name.startswith(pool)
    }


def read_boots(site: HostedSite, pool: str) -> dict[str, int]:
    machines = site.guest.machines.items()
    return {name: machine.boot_count for name, machine in machines if name.startswith(pool)}


def read_versions(site: HostedSite, pool: str) -> set[str]:
    booted = [
        machine.booted_deployment
        for name, machine in site.guest.machines.items()
        if name.startswith(pool)
    ]
    return {deployment.version for deployment in booted if deployment}


def restart_controllers(site: HostedSite) -> None:
    """Kill the controllers with SIGKILL, and start them again."""
    assert site.controllers is not None
    site.controllers.kill_replica()
    site.controllers.start_replica()


@pytest.fixture
def site() -> Iterator[HostedSite]:
    with owner.temporary_directory() as directory:
        found = HostedSite(
            directory, (OLD, NEW), machine_settings=MachineSettings(pull_bytes_per_s=1e9)
        )
        with found:
            yield found
            assert found.controllers is not None
            print(found.controllers.find_log().read_text()[-8000:])  # noqa: T201  # if it failed
            print(found.ignition.log.read_text()[-3000:])  # noqa: T201  # if it failed


def test_in_place_pool_is_updated_node_by_node_through_kills(site: HostedSite) -> None:
    history = NodeHistory(site)
    site.put_config("np", {MOTD: "1"})
    site.create_pool("np", "InPlace", 3, inPlace={"maxUnavailable": 1})
    wait_updated(site, np=3)
    assert set(read_boots(site, "np").values()) == {1}
    assert read_files(site, "np", MOTD) == {"1"}

    # New config; the controllers are killed when the first node has it.
    site.put_config("np", {MOTD: "2"})
    wait_until(lambda: history.cordons, limit_s=LIMIT_S)
    assert read_status(site)["np"]["state"] == "Updating"
    restart_controllers(site)
    wait_updated(site, np=3)
    assert read_files(site, "np", MOTD) == {"2"}
    assert set(read_boots(site, "np").values()) == {2}
    assert history.cordons == 3

    # New release, and another target during its rollout.
    site.patch_pool("np", {"release": {"image": name_release(NEW)}})
    wait_until(lambda: history.cordons > 3, limit_s=LIMIT_S)
    site.put_config("np", {MOTD: "3"})
    rows = wait_updated(site, np=3)
    assert rows["np"]["version"]["current"] == NEW.version
    assert read_files(site, "np", MOTD) == {"3"}
    assert read_versions(site, "np") == {NEW.version}

    # Scaling: the new machine boots the image of the release before it joins.
    site.patch_pool("np", {"replicas": 4})
    wait_updated(site, np=4)
    assert read_versions(site, "np") == {NEW.version}
    site.patch_pool("np", {"replicas": 3})
    wait_updated(site, np=3)

    # Another pull secret reaches nodes without a drain or a reboot.
    boots, cordons = read_boots(site, "np"), history.cordons
    secret = json.dumps(
        {
            "auths": {
                **json.loads(site.guest.build_pull_secret())["auths"],
                "x.example": {"auth": "eDp5"},
            }
        }
    )
    site.put_pull_secret(secret)
    wait_until(lambda: read_files(site, "np", PULL_SECRET) == {secret}, limit_s=LIMIT_S)
    wait_updated(site, np=3)
    assert (read_boots(site, "np"), history.cordons) == (boots, cordons)

    assert history.most_cordoned == 1
    for name, targets in history.targets.items():
        assert len(targets) == len(set(targets)), (name, targets)
    assert denied(site.management.server) == frozenset()
    history.informers.stop()


@pytest.mark.long
def test_replace_pool_gets_new_machines_through_kills(site: HostedSite) -> None:
    site.put_config("rp", {MOTD: "1"})
    site.create_pool(
        "rp", "Replace", 2, replace={"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    )
    wait_updated(site, rp=2)
    first = list_nodes(site)

    site.put_config("rp", {MOTD: "2"})
    wait_until(lambda: len(site.list_objects(MACHINES)) > 2, limit_s=LIMIT_S)
    restart_controllers(site)
    wait_updated(site, rp=2)
    second = list_nodes(site)
    assert not {*first} & {*second}
    assert read_files(site, "rp", MOTD) == {"2"}

    site.patch_pool("rp", {"release": {"image": name_release(NEW)}, "replicas": 1})
    rows = wait_updated(site, rp=1)
    assert rows["rp"]["version"]["current"] == NEW.version
    assert read_versions(site, "rp") == {NEW.version}

    # Another pull secret replaces no machine, and reaches the next one.
    third = list_nodes(site)
    secret = json.dumps(
        {
            "auths": {
                **json.loads(site.guest.build_pull_secret())["auths"],
                "x.example": {"auth": "eDp5"},
            }
        }
    )
    site.put_pull_secret(secret)
    site.patch_pool("rp", {"replicas": 2})
    wait_updated(site, rp=2)
    [new] = {*list_nodes(site)} - {*third}
    assert (site.guest.machines[new].root / PULL_SECRET[1:]).read_text() == secret
    assert denied(site.management.server) == frozenset()
