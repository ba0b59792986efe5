"""Benchmark of a layer-only image: a config is added to a base through the registry API alone.

The registry is docker-registry where it is installed, behind the lab's front with TLS. Each run is
a new process, as the memory of the builder is measured; its time begins after the imports, because
the controller runs already. The base has as many layers as Fedora CoreOS.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench.interpreter import BYTECODE
from bench.result import Result
from treenail.clocks import SystemClock
from treenail.config.pullsecret import parse_pull_secret
from treenail.oci_content import OCI_MANIFEST
from treenail.registry.authorization import select_login
from treenail.registry.client import RegistryClient
from treenail.registry.referrers import encode_descriptor
from treenail.registry.transport import TlsSettings
from treenail.registry.uploads import upload_bytes
from treenail_lab.registry.service import PUSHER, RegistryService

ROOT = Path(__file__).parent.parent
BASES_MB = (200, 1000)
LAYERS = 60
RUNS = 5
FILES, FILE_BYTES = 100, 4000

_PROGRAM = """
import json, sys, time
from treenail.api.machineconfig import MachineConfig
from treenail.builder.append_config import ImageDestination, append_config
from treenail.clocks import SystemClock
from treenail.image.config_layer import make_config_layer
from treenail.image.oci.documents import ImageLabels
from treenail.config.pullsecret import parse_pull_secret
from treenail.registry.client import RegistryClient
from treenail.registry.images import resolve_image
from treenail.registry.authorization import select_login
from treenail.registry.transport import TlsSettings
inputs = json.load(sys.stdin)
begun = time.perf_counter()
secret = parse_pull_secret(inputs["auth"].encode(), where="the benchmark")
client = RegistryClient(
    inputs["host"],
    SystemClock(),
    login=select_login(secret.credentials, inputs["host"], "os/node"),
    tls=TlsSettings(inputs["ca"]),
)
layer = make_config_layer(MachineConfig.from_json(inputs["config"]))
image = resolve_image(client, "os/base", "base", "amd64")
labels = ImageLabels("rendered-worker-a", "worker", image.digest).to_map()
destination = ImageDestination(client, inputs["repository"], "build-1")
pushed = append_config(client, image, layer, labels, destination)
seconds = time.perf_counter() - begun
assert not pushed.moved_bytes
# Not ru_maxrss, which starts with the value of the parent.
peak = [line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1]
print(seconds, int(peak) / 1024)
"""


def measure(_seconds: float) -> Iterator[Result]:
    for size in BASES_MB:
        with RegistryService() as service:
            push_base(service, size)
            runs = [run_builder(service, number) for number in range(RUNS)]
        name = f"layer-only image on a base of {size} MB"
        yield Result(name, "s", median(seconds for seconds, _ in runs), 1.0)
        yield Result(f"{name}, memory", "MB", max(megabytes for _, megabytes in runs), 40.0)


def push_base(service: RegistryService, size_mb: int) -> None:
    secret = parse_pull_secret(service.make_auth_json(PUSHER), where="the benchmark")
    client = RegistryClient(
        service.host,
        SystemClock(),
        login=select_login(secret.credentials, service.host, "os/base"),
        tls=TlsSettings(service.ca_file.read_text()),
    )
    contents = (os.urandom(size_mb * 1_000_000 // LAYERS) for _ in range(LAYERS))
    kind = "application/vnd.oci.image.layer.v1.tar+gzip"
    layers = [upload_bytes(client, "os/base", kind, content) for content in contents]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {
            "type": "layers",
            # Nothing unpacks the layers.
            "diff_ids": [
                f"sha256:{hashlib.sha256(each.digest.encode()).hexdigest()}" for each in layers
            ],
        },
    }
    kind = "application/vnd.oci.image.config.v1+json"
    described = upload_bytes(client, "os/base", kind, json.dumps(config).encode())
    manifest = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": encode_descriptor(described),
        "layers": [encode_descriptor(each) for each in layers],
    }
    client.put_manifest("os/base", "base", OCI_MANIFEST, json.dumps(manifest).encode())


def run_builder(service: RegistryService, number: int) -> tuple[float, float]:
    """Return the seconds and the peak of memory in MB; each run has an empty repository."""
    inputs = {
        "host": service.host,
        "auth": service.make_auth_json(PUSHER).decode(),
        "ca": service.ca_file.read_text(),
        "repository": f"os/node-{number}",
        "config": make_config(),
    }
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps(inputs),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPYCACHEPREFIX": BYTECODE, "PYTHONPATH": str(ROOT / "agent")},
    )
    assert done.returncode == 0, done.stderr
    seconds, megabytes = map(float, done.stdout.split())
    return seconds, megabytes


def make_config() -> dict[str, object]:
    text = "x" * FILE_BYTES
    files = [
        {"path": f"/etc/app/{number}.conf", "contents": {"source": f"data:,{text}"}}
        for number in range(FILES)
    ]
    ignition = {"ignition": {"version": "3.4.0"}, "storage": {"files": files}}
    return {"metadata": {"name": "rendered-worker-a"}, "spec": {"config": ignition}}
