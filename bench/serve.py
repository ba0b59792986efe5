"""Benchmark of ``treenail-controller serve`` with a cluster: latency, memory and many machines.

The server is the real program with an API server of the lab, in its own process. The machines are
threads of this process. Each has an address of its own, verifies the certificate, and retries after
503 and after a closed connection as Ignition does. They use processor time of the same machine: the
ratio to ``/healthz`` over a new TLS connection is that of the config alone.
"""

import base64
import http.client
import json
import os
import random
import re
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench.interpreter import BYTECODE
from bench.node import read_cpu, read_memory
from bench.result import Result
from tests.contract.client import Cluster
from tests.controllers.hosted.owning.secret_site import HASHES, SecretSite, make_config
from tests.controllers.installed import apply
from tests.fixtures.objects import collection_of
from tests.provisioning.samples import make_pool
from tests.provisioning.serving import write_certificate
from treenail.api.machineconfig import MachineConfig
from treenail.clocks import SystemClock
from treenail.config.node_paths import KUBECONFIG
from treenail.kube.api_client import Client
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.manifests import installation
from treenail.manifests.ignition_server import (
    HOSTED_NAME,
    NAME,
    build_hosted_documents,
    build_server_documents,
)
from treenail.manifests.installation import InstallOptions
from treenail.provisioning.tokens.token_store import TokenStore
from treenail.provisioning.tokens.tokens import TokenTable, make_token
from treenail_lab.apiserver.access.certificates import CertificateAuthority
from treenail_lab.apiserver.serving.server import LabServer

SIZES = {"165 KB": 165_000, "1 MB": 1_000_000}
"""Bytes of JSON of the rendered config. A real worker config has about 165 KB."""
MACHINES = 200
TOKENS = 10_000
REQUESTS = 300
CHANGES = 7
FILES = 50
LIMIT_S = 60.0
PATH, HEALTH, IGNITION = "/config/worker", "/healthz", "/ignition"
BEHIND_ROUTER, PLANE = 50, "clusters-one"
NOT_IN_THE_LAB = ("Service", "DaemonSet", "Deployment")
POOLS = "/apis/machineconfiguration.openshift.io/v1/machineconfigpools"
ACCEPT = "application/vnd.coreos.ignition+json;version=3.4.0, */*;q=0.1"
NEWER = ACCEPT.replace("3.4.0", "3.5.0")
COMMAND = "import sys; from treenail.cli.controller.main import main; sys.exit(main())"
ADDRESS = re.compile(r"serving Ignition configs at https://127\.0\.0\.1:(\d+)/")
BUILT = "built the config of pool"
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
"""Of Ignition 2.14 (internal/resource/http.go)."""


def measure(seconds: float) -> Iterator[Result]:
    for title, size in SIZES.items():
        with running() as server:
            server.write_config(size)
            wait_until(lambda: server.fetch(PATH)[0] == HTTPStatus.OK)  # runs now
            yield Result(f"{title}: at rest: RSS", "MiB", read_memory(server.pid, "Rss"), 40.0)
            yield from measure_changes(server, title, size)
            yield from measure_latency(server, title)
            yield from measure_burst(server, title, size)
            yield from measure_rest(server, title, seconds)
    with running("--tokens=require") as server:
        yield from measure_tokens(server)
    yield from measure_hosted()


def measure_hosted() -> Iterator[Result]:
    """Compare the config of a machine of a hosted cluster with that of /config/POOL."""
    options = InstallOptions(control_planes={PLANE: ""})
    documents = build_hosted_documents(options)
    with (
        running() as ordinary,
        running("--hosted", f"--namespace={PLANE}", made=documents, account=HOSTED_NAME) as hosted,
    ):
        ordinary.write_config(SIZES["165 KB"])
        site, document = SecretSite(), make_rendered(1, SIZES["165 KB"])
        config = replace(make_config(HASHES[0]), config=MachineConfig.from_json(document))
        for secret in site.run(config=config).writes:
            hosted.cluster.post(collection_of(secret), secret).ok()
        token = base64.b64encode(site.read_tokens()[0].encode()).decode()
        wait_until(lambda: ordinary.fetch(PATH)[0] == HTTPStatus.OK)
        wait_until(lambda: hosted.fetch(IGNITION, "HEAD", NEWER, token=token)[0] == HTTPStatus.OK)
        built, begin = hosted.count_built(), threading.Barrier(BEHIND_ROUTER)
        with ThreadPoolExecutor(BEHIND_ROUTER) as pool:
            machines = [pool.submit(hosted.fetch_once, token, begin) for _ in range(BEHIND_ROUTER)]
            refused = [each for each in machines if each.result(LIMIT_S) != HTTPStatus.OK]
        title = f"hosted: {BEHIND_ROUTER} machines behind one address"
        yield Result(f"{title}: refused", "count", len(refused), 0.0)
        yield Result("  configs built", "count", hosted.count_built() - built, 1.0)
        ordinary_s, hosted_s = [], []
        for _ in range(REQUESTS):
            # In turns, so that other load affects both alike.
            ordinary_s.append(ordinary.fetch_timed())
            begun = time.perf_counter()
            status, _body = hosted.fetch(IGNITION, token=token)
            hosted_s.append(time.perf_counter() - begun)
            assert status == HTTPStatus.OK
        yield Result("hosted: cached, new TLS connection: p50", "ms", median(hosted_s) * 1000)
        ratio = median(hosted_s) / median(ordinary_s)
        yield Result("  compared with /config/POOL", "times", ratio, 1.5)


def measure_tokens(server: "Server") -> Iterator[Result]:
    """Measure HEAD with tokens over new TLS connections: it decides, and counts no use."""
    server.write_config(SIZES["165 KB"])
    tokens = server.create_tokens(TOKENS)
    token = tokens[TOKENS // 2]
    wrong = token[:-8] + "A" * 8
    wait_until(lambda: server.check_token(token) == HTTPStatus.OK)
    seconds_of: dict[str, list[float]] = {token: [], wrong: [], "": []}
    for _ in range(REQUESTS):
        # In turns, so that other load affects all alike.
        for each, durations in seconds_of.items():
            begun = time.perf_counter()
            status = server.check_token(each)
            durations.append(time.perf_counter() - begun)
            assert (status == HTTPStatus.OK) == (each == token), status
    right_s, wrong_s, none_s = (median(each) for each in seconds_of.values())
    yield Result(f"{TOKENS} tokens: wrong one refused", "ms", wrong_s * 1000, 5.0)
    yield Result("  right one accepted", "ms", right_s * 1000)
    yield Result("  wrong one compared with the right one", "times", wrong_s / right_s)
    yield Result("  wrong one compared with none", "times", wrong_s / none_s)
    begun = time.perf_counter()
    status, _ = server.fetch(PATH, token=token)
    assert status == HTTPStatus.OK
    yield Result("  use of one recorded in the Secret", "ms", (time.perf_counter() - begun) * 1000)
    yield Result("  memory", "MiB", read_memory(server.pid, "Rss"))
    yield from measure_burst(server, f"{TOKENS} tokens", SIZES["165 KB"], tokens[:MACHINES])


def measure_changes(server: "Server", title: str, size: int) -> Iterator[Result]:
    """Measure the first response after the server's watch has delivered a new config."""
    first_s, cached_s, cpu_s = [], [], 0.0
    for _ in range(CHANGES):
        server.write_config(size)
        wait_until(server.has_new_config)
        before_s = read_cpu(server.pid)
        first_s.append(server.fetch_timed())
        cpu_s += read_cpu(server.pid) - before_s
        cached_s.append(min(server.fetch_timed() for _ in range(3)))
    yield Result(f"{title}: first response after a change", "ms", median(first_s) * 1000, 100.0)
    yield Result("  CPU time of the server for it", "ms", cpu_s / CHANGES * 1000)
    ratio = median(one / other for one, other in zip(first_s, cached_s, strict=True))
    yield Result("  compared with a cached one", "times", ratio)


def measure_latency(server: "Server", title: str) -> Iterator[Result]:
    config_s, health_s = [], []
    cpu_s = read_cpu(server.pid)
    for _ in range(REQUESTS):
        config_s.append(server.fetch_timed())
        health_s.append(server.fetch_timed(HEALTH))
    cpu_s = read_cpu(server.pid) - cpu_s
    yield Result(f"{title}: cached, new TLS connection: p50", "ms", median(config_s) * 1000)
    p99 = quantiles(config_s, n=100)[98]
    yield Result(f"{title}: cached, new TLS connection: p99", "ms", p99 * 1000, 30.0)
    yield Result("  CPU time of the server for both", "ms", cpu_s / REQUESTS * 1000)
    health_p99 = quantiles(health_s, n=100)[98]
    yield Result("  /healthz over a new TLS connection: p99", "ms", health_p99 * 1000)
    yield Result("  p50 compared with /healthz", "times", median(config_s) / median(health_s))


def measure_burst(
    server: "Server", title: str, size: int, tokens: Sequence[str] = ("",) * MACHINES
) -> Iterator[Result]:
    """Let all machines request a config at once, which no request has had built."""
    server.write_config(size)
    wait_until(lambda: server.has_new_config(tokens[0]))
    built, cpu_s = server.count_built(), read_cpu(server.pid)
    server.reset_peak()
    begin = threading.Barrier(MACHINES + 1)
    with ThreadPoolExecutor(MACHINES) as pool:
        machines = [pool.submit(server.join, *each, begin) for each in enumerate(tokens)]
        begin.wait(LIMIT_S)
        begun = time.perf_counter()
        bodies = {each.result(LIMIT_S)[1] for each in machines}
        duration_s = time.perf_counter() - begun
    assert len({drop_kubeconfig(each) for each in bodies}) == 1, "received different configs"
    # One token, one bootstrap credential.
    assert len(bodies) == len(set(tokens)), "machines share a credential"
    yield Result(f"{title}: {MACHINES} machines at once", "s", duration_s, 10.0)
    yield Result(
        "  attempts of a machine", "times", sum(e.result()[0] for e in machines) / MACHINES
    )
    yield Result("  CPU time of the server", "s", read_cpu(server.pid) - cpu_s)
    yield Result("  configs built", "count", server.count_built() - built, 1.0)
    yield Result("  peak memory of the server", "MiB", server.read_peak(), 60.0)


def measure_rest(server: "Server", title: str, seconds: float) -> Iterator[Result]:
    time.sleep(12.0)  # the log of requests ends its writes; the server releases memory every 10 s
    cpu_s = read_cpu(server.pid)
    time.sleep(seconds)
    cpu = (read_cpu(server.pid) - cpu_s) / seconds * 100
    yield Result(f"{title}: at rest after it: RSS", "MiB", read_memory(server.pid, "Rss"), 40.0)
    yield Result(f"{title}: at rest after it: CPU", "%", cpu)


@dataclass(slots=True)
class Server:
    """The running server, its cluster, and clients of it."""

    pid: int
    log: Path
    port: int
    cluster: Cluster
    context: ssl.SSLContext
    store: TokenStore
    serial: int = 0

    def write_config(self, size: int) -> None:
        """Create a rendered config of this size, and have the pool serve it."""
        self.serial += 1
        document = make_rendered(self.serial, size)
        self.cluster.post(collection_of(document), document).ok()
        pool = make_pool(new=document["metadata"]["name"])
        if self.serial == 1:
            self.cluster.post(POOLS, {key: pool[key] for key in pool if key != "status"}).ok()
        else:
            self.cluster.patch(f"{POOLS}/worker", {"spec": pool["spec"]}).ok()
        generation = self.cluster.get(f"{POOLS}/worker").ok()["metadata"]["generation"]
        status = {**pool["status"], "observedGeneration": generation}
        self.cluster.patch(f"{POOLS}/worker/status", {"status": status}).ok()

    def has_new_config(self, token: str = "") -> bool:
        """Return whether the watch has delivered the pool: HEAD in a version of its own builds it.

        The version measured is another one, which is still missing in the cache.
        """
        before = self.count_built()
        status, _ = self.fetch(PATH, "HEAD", ACCEPT.replace("3.4.0", "3.5.0"), token=token)
        # The watch of the pools may be ahead of that of the configs.
        return status == HTTPStatus.OK and self.count_built() > before

    def create_tokens(self, count: int) -> list[str]:
        """Replace all tokens by new ones of the pool; return them."""
        made = [make_token("worker", expires=time.time() + 86_400) for _ in range(count)]
        table = TokenTable({record.name: record for _, record in made})
        self.store.change(lambda _: (table, None))
        return [token for token, _ in made]

    def check_token(self, token: str) -> int:
        return self.fetch(PATH, "HEAD", token=token)[0]

    def count_built(self) -> int:
        return self.log.read_text().count(BUILT)

    def fetch_once(self, token: str, begin: threading.Barrier) -> int:
        """Fetch the config of a hosted machine together with others; return the status."""
        begin.wait(LIMIT_S)
        return self.fetch(IGNITION, token=token)[0]

    def fetch_timed(self, path: str = PATH) -> float:
        """Return the seconds from the connection to the last byte."""
        begun = time.perf_counter()
        status, body = self.fetch(path)
        duration_s = time.perf_counter() - begun
        assert status == HTTPStatus.OK
        assert bool(body) == (path == PATH)
        return duration_s

    def fetch(
        self,
        path: str,
        method: str = "GET",
        accept: str = ACCEPT,
        *,
        source: str = "127.0.0.1",
        token: str = "",
    ) -> tuple[int, bytes]:
        """Return status and body of a request over a new TLS connection."""
        head = f"{method} {path} HTTP/1.1\r\nAccept: {accept}\r\n"
        if token:
            head += f"Authorization: Bearer {token}\r\n"
        plain = socket.create_connection(
            ("127.0.0.1", self.port), timeout=LIMIT_S, source_address=(source, 0)
        )
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as programs in Go do
        with plain, self.context.wrap_socket(plain, server_hostname="localhost") as client:
            client.sendall(f"{head}\r\n".encode())
            found = http.client.HTTPResponse(client, method=method)
            found.begin()
            return found.status, found.read()

    def join(self, number: int, token: str, begin: threading.Barrier) -> tuple[int, bytes]:
        """Fetch the config as Ignition does; return the number of attempts and the body."""
        source = f"127.0.{1 + number // 250}.{1 + number % 250}"
        begin.wait(LIMIT_S)
        attempts, backoff_s = 0, FIRST_BACKOFF_S
        while True:
            attempts += 1
            try:
                status, body = self.fetch(PATH, source=source, token=token)
            except OSError:
                status, body = 0, b""
            if status == HTTPStatus.OK:
                return attempts, body
            assert status in (0, HTTPStatus.SERVICE_UNAVAILABLE), body
            time.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)

    def reset_peak(self) -> None:
        # 5 resets VmHWM to the current size (proc(5)).
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def read_peak(self) -> float:
        """Return the peak of the resident memory since `reset_peak`, in MiB."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
        raise AssertionError("no VmHWM")


@contextmanager
def running(
    *arguments: str, made: Sequence[dict[str, Any]] | None = None, account: str = NAME
) -> Iterator[Server]:
    """Run the server with a cluster that has its manifests, or others."""
    with tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder:
        directory = Path(folder)
        with LabServer(directory / "api") as lab:
            own = build_server_documents(InstallOptions()) if made is None else made
            documents = [*installation.load_crds(), *own]
            cluster = Cluster.of_kubeconfig(lab.admin_kubeconfig)
            cluster.post("/api/v1/namespaces", {"metadata": {"name": PLANE}}).ok()
            # The lab has no Services, and runs no pods.
            apply(lab, [each for each in documents if each["kind"] not in NOT_IN_THE_LAB])
            authority = CertificateAuthority(directory)
            certificate, log = directory / "serving.pem", directory / "serve.log"
            write_certificate(authority, certificate)
            command = [
                *(sys.executable, "-c", COMMAND, "serve", "--listen=127.0.0.1:0"),
                *(f"--certificate={certificate}", f"--key={certificate}", "--metrics=127.0.0.1:0"),
                f"--kubeconfig={lab.write_account_kubeconfig(account, account)}",
                *arguments,
            ]
            environment = {
                **{key: os.environ[key] for key in os.environ if key != "PYTHONDONTWRITEBYTECODE"},
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "PYTHONPYCACHEPREFIX": BYTECODE,
            }
            with log.open("wb") as output:
                process = subprocess.Popen(command, env=environment, stderr=output)
            try:
                wait_until(lambda: bool(ADDRESS.search(log.read_text())))
                found = ADDRESS.search(log.read_text())
                assert found
                context = ssl.create_default_context(cadata=authority.pem.decode())
                transport = HttpTransport(read_kubeconfig(str(lab.admin_kubeconfig)), SystemClock())
                with closing(transport):
                    store = TokenStore(Client(transport), NAME, SystemClock())
                    yield Server(process.pid, log, int(found[1]), cluster, context, store)
            finally:
                process.terminate()
                process.wait(LIMIT_S)


def make_rendered(serial: int, size: int) -> dict[str, Any]:
    """Make a rendered config whose JSON has this size. Its files are text."""
    source = random.Random(serial)
    files = [
        {
            "path": f"/etc/bench/{number}",
            "mode": 0o644,
            "contents": {
                "source": "data:;base64,"
                + base64.b64encode(source.randbytes(size // FILES * 3 // 8).hex().encode()).decode()
            },
        }
        for number in range(FILES)
    ]
    return {
        "apiVersion": "machineconfiguration.openshift.io/v1",
        "kind": "MachineConfig",
        "metadata": {"name": f"rendered-worker-{serial:032x}"},
        "spec": {"config": {"ignition": {"version": "3.5.0"}, "storage": {"files": files}}},
    }


def drop_kubeconfig(body: bytes) -> bytes:
    """Return a served config without the file that differs for each token."""
    config = json.loads(body)
    files = config["storage"]["files"]
    config["storage"]["files"] = [each for each in files if each["path"] != KUBECONFIG]
    return json.dumps(config).encode()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "the server did not reach the state in time"
        time.sleep(0.02)
