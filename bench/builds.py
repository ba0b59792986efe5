"""Benchmark of the build controller: many MachineOSConfigs at rest.

One pass looks at every MachineOSConfig once, in a process of its own against the lab's API server.
Nothing has changed since the pass before, so that no registry may be asked: one listens, and counts
connections. Memory is that of all controllers as users run them, with and without `build`.

    make bench ARGS=builds
    python -m bench.builds KUBECONFIG
"""

import base64
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.node import read_cpu, wait_until
from bench.result import Result
from bench.scale import build_node, read_rss, store_objects
from tests.controllers.clusters import make_build_controller
from tests.fixtures.controllers import open_client
from tests.fixtures.objects import add_config, install_kinds
from treenail.api import annotations as key
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosconfig import MachineOSConfig
from treenail.clocks import SystemClock
from treenail.controllers.image_build.build_planner import BuildPlanner
from treenail.controllers.image_build.cluster_reader import GLOBAL_PULL_SECRET, ClusterReader
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.kube.api_client import Client
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.request import ApiRequest, ApiResponse
from treenail.kube.resources import (
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    NAMESPACES,
    SECRETS,
    Resource,
)
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail_lab.apiserver.serving.server import LabServer
from treenail_lab.controllers import CONTROLLER_COMMAND

Json = dict[str, Any]
CONFIGS, BUILDS, NODES = 50, 500, 500
# Beside the current one, a MachineOSConfig keeps three builds; the others have lost theirs.
OWN_BUILDS = 4
NAMESPACE = "builds"
CONTAINERFILE = "FROM configs AS final\nRUN true\n"
RENDERED = "rendered-old"
PASSES = 11
PASS_MS, REST_MIB = 100.0, 15.0
CLOCK = SystemClock()


def measure(seconds: float) -> Iterator[Result]:
    """Yield the duration of a pass, its requests, and the memory at rest."""
    with silent_registry() as (host, connections), cluster(host) as server:
        kubeconfig = server.write_kubeconfig("build", ["system:masters"])
        done = subprocess.run(
            [sys.executable, "-m", "bench.builds", str(kubeconfig)],
            capture_output=True,
            text=True,
            check=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
        what = f"{CONFIGS} MachineOSConfigs, {BUILDS} builds"
        yield Result(f"{what}: one pass", "ms", found["ms"], PASS_MS)
        yield Result("  of that CPU", "ms", found["cpu_ms"])
        yield Result("  requests to the API server", "", found["requests"])
        yield Result("  writes", "", found["writes"], 0.0)
        yield Result("  connections to the registry", "", len(connections), 0.0)
        yield from measure_memory(server, seconds)


def measure_memory(server: LabServer, seconds: float) -> Iterator[Result]:
    used = {}
    for names in ("render,rollout,drain", "render,rollout,drain,build"):
        with running(server, names) as process:
            wait_for_rest(process.pid)
            time.sleep(min(seconds, 5.0))
            used[names] = read_rss(process.pid)
    without, with_build = used.values()
    yield Result("controllers at rest: RSS without build", "MiB", without)
    yield Result("controllers at rest: more with build", "MiB", with_build - without, REST_MIB)


def wait_for_rest(pid: int) -> None:
    """Wait until the process has used almost no CPU for a second."""
    before = [-1.0]

    def is_at_rest() -> bool:
        used = read_cpu(pid)
        is_idle = used > 0.5 and used - before[0] < 0.02
        before[0] = used
        time.sleep(1.0)
        return is_idle

    wait_until(is_at_rest)


@contextmanager
def running(server: LabServer, names: str) -> Iterator["subprocess.Popen[bytes]"]:
    kubeconfig = server.write_kubeconfig(f"controllers-{len(names)}", ["system:masters"])
    command = [
        *CONTROLLER_COMMAND, "run", f"--enable={names}", "--no-leader-election",
        f"--kubeconfig={kubeconfig}", "--metrics=127.0.0.1:0", f"--namespace={NAMESPACE}",
    ]  # fmt: skip
    if "build" in names:
        command += ["--builder-image=registry.example.com/builder:1"]
    log = kubeconfig.with_suffix(".log")
    with log.open("wb") as output, subprocess.Popen(command, stderr=output) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def silent_registry() -> Iterator[tuple[str, list[object]]]:
    """Count connections to a port that no registry serves."""
    listener = socket.create_server(("127.0.0.1", 0))
    found: list[object] = []

    def accept() -> None:
        while True:
            try:
                connection, address = listener.accept()
            except OSError:
                return
            found.append(address)
            connection.close()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", found
    finally:
        listener.close()


@contextmanager
def cluster(host: str) -> Iterator[LabServer]:
    """Run an API server with pools whose images are built."""
    # The path of a Unix socket has at most 107 characters (unix(7)).
    with (
        tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder,
        LabServer(Path(folder)) as server,
        open_client(server.admin_kubeconfig) as client,
    ):
        install_kinds(client)
        fill_cluster(client, host)
        pools = [f"pool-{number:02}" for number in range(CONFIGS)]
        nodes = [build_node(f"n{each:05}", pools[each % CONFIGS]) for each in range(NODES)]
        server.call_api(store_objects("nodes", nodes))
        yield server


def fill_cluster(client: Client, host: str) -> None:
    client.create(NAMESPACES, {"metadata": {"name": NAMESPACE}})
    login = base64.b64encode(b"user:password").decode()
    content = base64.b64encode(json.dumps({"auths": {host: {"auth": login}}}).encode()).decode()
    for name in ("push", GLOBAL_PULL_SECRET):
        secret = make_object(SECRETS, name, namespace=NAMESPACE)
        secret |= {"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": content}}
        client.create(SECRETS, secret, namespace=NAMESPACE)
    base = f"{host}/os/base@sha256:{'b' * 64}"
    add_config(client, RENDERED)
    client.patch(MACHINECONFIGS, RENDERED, {"spec": {"osImageURL": base}})
    planner = BuildPlanner(ClusterReader(client, CLOCK, namespace=NAMESPACE))
    for number in range(CONFIGS):
        add_built_pool(client, planner, f"pool-{number:02}", host)
    for number in range(BUILDS - CONFIGS * OWN_BUILDS):
        add_build(client, f"lost-{number:03}", "lost", f"{host}/os/lost")


def add_built_pool(client: Client, planner: BuildPlanner, name: str, host: str) -> None:
    """Create a pool, its MachineOSConfig, the current build and earlier ones."""
    pool = make_object(MACHINECONFIGPOOLS, name)
    pool["spec"] = {
        "configuration": {"name": RENDERED},
        "nodeSelector": {"matchLabels": {f"node-role.kubernetes.io/{name}": ""}},
    }
    client.create(MACHINECONFIGPOOLS, pool)
    config = make_object(MACHINEOSCONFIGS, name)
    config["spec"] = {
        "machineConfigPool": {"name": name},
        "imageBuilder": {"imageBuilderType": "Job"},
        "renderedImagePushSecret": {"name": "push"},
        "renderedImagePushSpec": f"{host}/os/{name}:latest",
        "containerFile": [{"containerfileArch": "NoArch", "content": CONTAINERFILE}],
    }
    created = client.create(MACHINEOSCONFIGS, config)
    wanted = planner.plan_build(
        MachineOSConfig.from_json(created),
        MachineConfigPool.from_json(client.get(MACHINECONFIGPOOLS, name)),
        frozenset(),
    ).wanted
    image = add_build(client, wanted.name, name, f"{host}/os/{name}", wanted.share_key)
    for number in range(1, OWN_BUILDS):
        add_build(client, f"{name}-{number:032x}", name, f"{host}/os/{name}")
    client.patch(
        MACHINEOSCONFIGS, name, {"metadata": {"annotations": {key.CURRENT_BUILD: wanted.name}}}
    )
    status = {"status": {"currentImagePullSpec": image, "observedGeneration": 1}}
    client.patch(MACHINEOSCONFIGS, name, status, subresource="status")


def add_build(
    client: Client, name: str, config: str, repository: str, share_key: str = "other"
) -> str:
    """Create a build that has succeeded; return its image."""
    build = make_object(MACHINEOSBUILDS, name)
    build["metadata"]["labels"] = {key.BUILD_KEY: share_key, key.IMAGE_CONFIG: config}
    build["spec"] = {
        "machineConfig": {"name": RENDERED},
        "machineOSConfig": {"name": config},
        "renderedImagePushSpec": f"{repository}:{name}",
    }
    client.create(MACHINEOSBUILDS, build)
    image = f"{repository}@sha256:{'1' * 64}"
    condition = {"status": "True", "reason": "Succeeded", "message": "x", "type": "Succeeded"}
    status = {
        "conditions": [{**condition, "lastTransitionTime": "2026-01-01T00:01:00Z"}],
        "buildStart": "2026-01-01T00:00:00Z",
        "buildEnd": "2026-01-01T00:01:00Z",
        "digestedImagePushSpec": image,
    }
    client.patch(MACHINEOSBUILDS, name, {"status": status}, subresource="status")
    return image


def make_object(resource: Resource, name: str, *, namespace: str = "") -> Json:
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}


class CountingTransport:
    """Counts requests and writes."""

    def __init__(self, transport: HttpTransport) -> None:
        self._transport = transport
        self.requests = self.writes = 0

    def send(self, request: ApiRequest) -> ApiResponse:
        self.requests += 1
        self.writes += request.method != "GET"
        return self._transport.send(request)

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> Any:
        return self._transport.open_stream(request, duration_s=duration_s)

    def close(self) -> None:
        self._transport.close()


def main(kubeconfig: str) -> None:
    """Measure passes in this process, and print the result as JSON."""
    wire = CountingTransport(HttpTransport(read_kubeconfig(kubeconfig), CLOCK, max_kept=16))
    client = Client(wire)
    controller = make_build_controller(
        client, EventRecorder(client, "bench", "bench", CLOCK), namespace=NAMESPACE
    )
    informers = InformerSet(client, CLOCK)
    controller.register_watches(informers, lambda _: None)
    informers.start()
    assert informers.wait_until_synced(60.0)
    names = [f"pool-{number:02}" for number in range(CONFIGS)]

    def run_pass() -> None:
        for name in names:
            controller.sync_key(name)

    run_pass()
    wait_until(lambda: is_quiet(run_pass, wire))
    before = wire.requests, wire.writes
    wall, cpu = [], []
    for _ in range(PASSES):
        began, used = time.perf_counter(), time.process_time()
        run_pass()
        wall.append((time.perf_counter() - began) * 1000)
        cpu.append((time.process_time() - used) * 1000)
    print(
        json.dumps(
            {
                "ms": median(wall),
                "cpu_ms": median(cpu),
                "requests": (wire.requests - before[0]) / PASSES,
                "writes": wire.writes - before[1],
            }
        )
    )
    informers.stop()
    controller.close()
    wire.close()


def is_quiet(run_pass: Callable[[], None], wire: CountingTransport) -> bool:
    """Whether a pass writes nothing."""
    before = wire.writes
    run_pass()
    return wire.writes == before


if __name__ == "__main__":
    main(sys.argv[1])
