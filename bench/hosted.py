"""Benchmarks of hosted clusters: controllers at rest, memory of an agent, two kinds of rollouts.

Each is a ratio within this run. The rollout by HyperShift's own upgrader is measured where
TREENAIL_TEST_HYPERSHIFT names it (`tests/hosted/programs.py`), with actors as daemons.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.node import LIVE_PATH, has_children, read_memory
from bench.result import Result
from bench.rollout import wait_for_rollout
from bench.scale import USER, is_at_rest, read_rss, running
from tests.controllers.hosted.owning import site as owned_site
from tests.controllers.hosted.owning.test_process import ENABLE, open_site
from tests.fixtures import hosted
from tests.fixtures.controllers import open_client
from tests.fixtures.objects import add_pool, install_kinds, make_object
from tests.hosted import conductor, programs
from tests.hosted.clusters import HostedClusters, InPlacePool, run_upgrader
from tests.hosted.daemons import NodeDaemons
from tests.integration.hosted_site import HostedLab, HostedSite, make_config, make_payload
from tests.integration.site import SETTINGS, Options, Site
from treenail.api import annotations as key
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import node_mode
from treenail.config import node_paths
from treenail.controllers.hosted.owning.controller import RECHECK_S
from treenail.kube.api_client import Client
from treenail.kube.resources import (
    HOSTEDCLUSTERS,
    MACHINECONFIGPOOLS,
    MACHINEDEPLOYMENTS,
    MACHINES,
    MACHINESETS,
    NODEPOOLS,
    NODES,
)
from treenail_lab.apiserver.serving.server import LabServer
from treenail_lab.cluster import Lab, LabPlan
from treenail_lab.images import make_image

Json = dict[str, Any]
CLUSTERS, POOL_TYPES = 100, ("Replace", "Replace", "InPlace")
MEMORY_TARGET, REQUESTS_TARGET, AGENT_TARGET = 2.5, 2.0, 1.1
CONDUCTED_TARGET, IN_PLACE_TARGET = 1.2, 2.0
CONDUCTED_NODES, CONDUCTED_LIMIT = 20, 4
ROUNDS = 3
NODE_NAMES = ("n1", "n2", "n3")
POOL = "np"


def measure(_seconds: float) -> Iterator[Result]:
    yield from measure_rest()
    yield from measure_agents()
    yield from measure_in_place()
    if os.environ.get(programs.HYPERSHIFT.name):
        yield from measure_conducted()


@contextmanager
def make_directory() -> Iterator[Path]:
    # The path of a Unix socket has at most 107 characters (unix(7)).
    with tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder:
        yield Path(folder)


def measure_rest() -> Iterator[Result]:
    """Compare the controllers with clusters and without."""
    without_mib, _ = run_controllers(0)
    used_mib, rate = run_controllers(CLUSTERS)
    what = f"{CLUSTERS} hosted clusters of {len(POOL_TYPES)} pools at rest"
    yield Result("controllers without hosted clusters: RSS", "MiB", without_mib)
    yield Result(f"{what}: RSS", "MiB", used_mib)
    yield Result("  compared with none", "times", used_mib / without_mib, MEMORY_TARGET)
    yield Result("  requests of a pool", "1/min", rate, REQUESTS_TARGET)


def run_controllers(count: int) -> tuple[float, float]:
    """Return the memory with so many clusters, and the requests of a pool in a minute.

    The requests are counted until all pools have read their sources again.
    """
    with (
        make_directory() as directory,
        LabServer(directory) as server,
        open_client(server.admin_kubeconfig) as client,
    ):
        install_kinds(client)
        owned_site.install_kinds(client)
        sites = [open_cluster(client, number) for number in range(count)]
        with running(server, *ENABLE) as process:
            wait_for_rollout(lambda: server.count_requests(user=USER) > 0)
            for site in sites:
                wait_for_rollout(lambda site=site: len(list_owners(site)) == len(POOL_TYPES))
                add_machines(site)
            wait_for_rollout(lambda: is_at_rest(server))
            if not sites:
                return read_rss(process.pid), 0.0
            before = server.count_requests(user=USER)
            time.sleep(RECHECK_S)
            made = server.count_requests(user=USER) - before
            rate = made / (RECHECK_S / 60) / (count * len(POOL_TYPES))
            return read_rss(process.pid), rate


def open_cluster(client: Client, number: int) -> owned_site.OwnedSite:
    """Create a hosted cluster with its pools; they differ in their last digit."""
    site = open_site(client, POOL_TYPES[0], number)
    for other, kind in enumerate(POOL_TYPES[1:], 1):
        site.pool["metadata"]["name"] = f"np-{other}"
        site.pool["spec"]["management"]["upgradeType"] = kind
        site.create_pool()
    return site


def list_owners(site: owned_site.OwnedSite) -> list[Json]:
    return site.list(MACHINEDEPLOYMENTS) + site.list(MACHINESETS)


def add_machines(site: owned_site.OwnedSite) -> None:
    """Let Cluster API create two machines of each pool, which join."""
    for owner in list_owners(site):
        name, template = owner["metadata"]["name"], owner["spec"]["template"]
        for number in range(owner["spec"]["replicas"]):
            machine = make_object(
                MACHINES, f"{name}-{number}", template["spec"], namespace=site.plane,
                annotations=template["metadata"]["annotations"],
            )  # fmt: skip
            status = {"phase": "Running", "nodeRef": {"name": f"{name}-{number}"}}
            hosted.add_object(site.client, MACHINES, machine | {"status": status})


def measure_agents() -> Iterator[Result]:
    """Compare the memory of agents of both kinds, each at rest after an update."""
    files = {f"{LIVE_PATH}-{each}": "1" for each in range(20)}
    options = Options(agent_settings=f'image_files = "write"\n{SETTINGS}')
    with ExitStack() as exits:
        site = Site(options)
        exits.callback(site.stop)
        site.lab.add_config(make_config("live", files))
        site.annotate({key.DESIRED_CONFIG: "live", key.DESIRED_OS_IMAGE: site.current.pull_spec})
        wait_for_rollout(lambda: site.notes().get(key.CURRENT_CONFIG) == "live" and site.calm())
        ordinary = read_agent(site)
    with ExitStack() as exits:
        hosted_site = HostedSite({})
        exits.callback(hosted_site.stop)
        hosted_site.update("1" * 16, files)
        hosted_site.wait_done("1" * 16)
        used = read_agent(hosted_site)
    yield Result("agent of a hosted node after an update: RSS", "MiB", used)
    yield Result("  compared with an ordinary one", "times", used / ordinary, AGENT_TARGET)


def read_agent(site: Site) -> float:
    pid = site.machine.agent.pid
    wait_for_rollout(lambda: not has_children(pid))
    time.sleep(12.0)  # it releases memory after the end of its child
    return read_memory(pid, "Rss")


def measure_in_place() -> Iterator[Result]:
    """Compare the rollouts of a file that needs no reboot, each node after the other."""
    image = make_image("os", "1", 1_000_000)
    plan = LabPlan(NODE_NAMES, (image,), agent_settings=SETTINGS, has_machine_config_nodes=False)
    with make_directory() as directory, ExitStack() as exits:
        lab = Lab(directory, plan)
        exits.callback(lab.stop)
        lab.start()
        for number in range(ROUNDS + 1):
            lab.add_config(build_live(f"c-{number}", number))
        add_pool(lab.client, "worker", "c-0", maxUnavailable=1)
        with running(lab.server, "--enable=rollout,drain"):
            wait_for_rollout(lambda: are_done(lab, "c-0"))

            def roll(number: int) -> None:
                body: Json = {"spec": {"configuration": {"name": f"c-{number}"}}}
                lab.client.patch(MACHINECONFIGPOOLS, "worker", body)

            ordinary_s = measure_rollouts(roll, lambda each: are_done(lab, f"c-{each}"))
    hosted_s = measure_hosted_rollouts(plan)
    yield Result(f"rollout without reboot, {len(NODE_NAMES)} nodes", "s", ordinary_s)
    yield Result("  the same in place by treenail in a hosted cluster", "s", hosted_s)
    yield Result("  compared", "times", hosted_s / ordinary_s, IN_PLACE_TARGET)


def measure_hosted_rollouts(plan: LabPlan) -> float:
    namespace = node_mode.name_upgrade_namespace(POOL)
    mode = node_mode.HostedMode(POOL, namespace, hosted_key.HOSTED_DRAIN)
    served = json.dumps(build_live("served", 0))
    files = {node_mode.PATH: json.dumps(mode.to_json()), node_paths.SERVED_CONFIG: served}
    with ExitStack() as exits:
        directory = exits.enter_context(make_directory())
        guest = HostedLab(directory / "guest", plan, files, agent=())
        exits.callback(guest.stop)
        guest.start()
        clusters = open_clusters(exits, directory, guest.server, guest.client)
        scope: Json = {"metadata": {"annotations": {hosted_key.SCOPE: "treenail"}}}
        place = {"namespace": hosted.NAMESPACE}
        clusters.management.patch(HOSTEDCLUSTERS, hosted.CLUSTER, scope, **place)
        document = hosted.make_node_pool(POOL, "InPlace", replicas=len(NODE_NAMES))
        hosted.add_object(clusters.management, NODEPOOLS, document)
        pool = InPlacePool(clusters, POOL, [])
        pool.create(limit="1")
        for name in NODE_NAMES:
            pool.add_machine(name, hosted.OLD_HASH)

        def roll(number: int) -> None:
            payload = make_payload(build_live("served", number)).encode()
            value = f"{number:016}"
            pool.set_target(value, payload=payload)
            notes = {hosted_key.TARGET_CONFIG: value}
            notes |= {} if number else {hosted_key.UPDATED_CONFIG: value}
            secret = {"bootstrap": {"dataSecretName": f"user-data-{POOL}-{value}"}}
            spec = {"replicas": len(NODE_NAMES), "template": {"spec": secret}}
            body: Json = {"metadata": {"annotations": notes}, "spec": spec}
            plane = {"namespace": hosted.CONTROL_PLANE}
            clusters.management.patch(MACHINESETS, POOL, body, **plane)

        roll(0)
        options = ("--enable=hosted", "--scope=treenail")
        exits.enter_context(running(clusters.management_server, *options))  # type: ignore[arg-type]
        return measure_rollouts(roll, lambda each: are_done(guest, f"{each:016}"))


def measure_rollouts(roll: Callable[[int], None], is_over: Callable[[int], bool]) -> float:
    """Return the median of the seconds of some rollouts, one after the other."""
    durations_s = []
    for number in range(1, ROUNDS + 1):
        begun = time.monotonic()
        roll(number)
        wait_for_rollout(lambda number=number: is_over(number))
        durations_s.append(time.monotonic() - begun)
        time.sleep(5.0)  # what follows the last node
    return median(durations_s)


def build_live(name: str, number: int) -> Json:
    files = {f"{LIVE_PATH}-{each}": str(number) for each in range(20)}
    return make_config(name, files)


def are_done(lab: Lab, config: str) -> bool:
    """Whether all nodes have the config and are in service."""
    found: Any = lab.client.list(NODES).items
    states = []
    for node in found:
        notes = node["metadata"].get("annotations") or {}
        states.append((notes.get(key.CURRENT_CONFIG), notes.get(key.STATE)))
    is_out = any(node.get("spec", {}).get("unschedulable") for node in found)
    return not is_out and states == [(config, key.NodeState.DONE)] * len(NODE_NAMES)


def open_clusters(
    exits: ExitStack, directory: Path, guest: LabServer, guest_client: Client
) -> HostedClusters:
    """Start a management cluster of a hosted one."""
    management = exits.enter_context(LabServer(directory / "management"))
    client = exits.enter_context(open_client(management.admin_kubeconfig))
    clusters = HostedClusters(
        management, management.admin_kubeconfig, guest.admin_kubeconfig, client, guest_client
    )
    clusters.create_control_plane()
    conductor.create_objects(clusters)
    return clusters


def measure_conducted() -> Iterator[Result]:
    """Compare rollouts by HyperShift's upgrader alone with those that treenail conducts."""
    with ExitStack() as exits:
        directory = exits.enter_context(make_directory())
        guest = exits.enter_context(LabServer(directory / "guest"))
        guest_client = exits.enter_context(open_client(guest.admin_kubeconfig))
        clusters = open_clusters(exits, directory, guest, guest_client)
        limits = {"own": str(CONDUCTED_LIMIT), "conducted": "-1"}
        pools = {
            name: InPlacePool(clusters, name, [f"{name}-{n}" for n in range(CONDUCTED_NODES)])
            for name in limits
        }
        for name, pool in pools.items():
            pool.create(limit=limits[name])
        management = {"inPlace": {"maxUnavailable": -1}}
        conductor.create_pool(
            clusters, "conducted", "InPlace", CONDUCTED_LIMIT, {},
            management=management, replicas=CONDUCTED_NODES,
        )  # fmt: skip
        exits.enter_context(NodeDaemons(clusters))
        exits.enter_context(run_upgrader(clusters, directory))
        exits.enter_context(conductor.run_conductor(clusters, directory))
        durations_s: dict[str, list[float]] = {name: [] for name in limits}
        for number in range(ROUNDS):
            # In turns, so that other load affects both alike.
            for name, pool in pools.items():
                begun = time.monotonic()
                pool.set_target(value := f"{number:08}")
                wait_for_rollout(
                    lambda pool=pool, value=value: pool.read_machine_set().current_hash == value
                )
                durations_s[name].append(time.monotonic() - begun)
    own_s, conducted_s = (median(each) for each in durations_s.values())
    yield Result(f"rollout by HyperShift, {CONDUCTED_NODES} nodes", "s", own_s)
    yield Result("  the same, conducted", "s", conducted_s)
    yield Result("  compared", "times", conducted_s / own_s, CONDUCTED_TARGET)
