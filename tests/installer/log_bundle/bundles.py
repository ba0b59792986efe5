"""Reads log bundles, and makes an install directory with a secret wherever one can stand."""

import base64
import gzip
import io
import json
import tarfile
from pathlib import Path

from tests.fixtures.files import write_files

CANARY = "Canary5Xw9"
ENCODED = base64.b64encode(CANARY.encode()).decode()
TRACES = (CANARY.encode(), ENCODED[:12].encode(), CANARY.encode().hex().encode())
NOW = 1_700_000_000.0
DIGEST = "ab" * 32
CONFIG_DIGEST = "cd" * 32


def find_traces(packed: bytes) -> list[bytes]:
    """The traces of the canary in an archive."""
    content = gzip.decompress(packed)
    return [trace for trace in TRACES if trace in content]


def make_archive(files: dict[str, bytes], *, prefix: str = "treenail-node") -> bytes:
    """An archive as `treenail collect` writes it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"{prefix}/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def make_install_directory(root: Path) -> Path:
    """A failed installation with the canary in every place that can hold a secret."""
    ignition = {
        "ignition": {"version": "3.4.0", "proxy": {"httpsProxy": f"http://me:{CANARY}@proxy:1"}},
        "passwd": {"users": [{"name": "core", "passwordHash": CANARY}]},
        "storage": {
            "files": [
                {
                    "path": "/etc/secret",
                    "mode": 0o600,
                    "contents": {"source": f"data:;base64,{ENCODED}"},
                }
            ]
        },
    }
    secret = {"kind": "Secret", "metadata": {"name": "push"}, "data": {"x": ENCODED}}
    applied = {"kubectl.kubernetes.io/last-applied-configuration": json.dumps(secret)}
    step = {
        "name": "build:master",
        "state": "failed",
        "began": "2026-01-01T00:00:00Z",
        "ended": "2026-01-01T00:01:00Z",
        "attempts": 2,
        "reason": f"cannot push https://me:{CANARY}@registry.example/os: denied",
        "remedy": "correct the Secret push",
    }
    state = {"id": "0123456789ab", "began": "2026-01-01T00:00:00Z", "steps": [step]}
    storage = ".treenail/registry/storage/docker/registry/v2"
    manifest = {"config": {"digest": f"sha256:{CONFIG_DIGEST}"}, "layers": []}
    config = {"config": {"Env": [f"TOKEN={CANARY}"]}, "history": []}
    attempt = ".treenail/logs/builds/master/attempt-2"
    write_files(
        root,
        {
            "auth/kubeconfig": CANARY,
            "install-config.yaml": f"pullSecret: '{CANARY}'\n",
            "manifests/secret.yaml": f"kind: Secret\ndata: {{any: {ENCODED}}}\n",
            "manifests/list.yaml": json.dumps({"kind": "List", "items": [secret]}),
            "manifests/mosc.yaml": json.dumps(
                {
                    "kind": "MachineOSConfig",
                    "metadata": {"name": "master", "annotations": applied},
                    "spec": {
                        "renderedImagePushSecret": {"name": "push"},
                        "containerFile": [{"content": f"FROM configs\nENV TOKEN={CANARY}\n"}],
                    },
                }
            ),
            "manifests/broken.yaml": f"kind: Secret\ndata:\n\tany: {ENCODED}\n",
            "manifests/tls.key": CANARY,
            "machine-pools/master.yaml": "kind: MachineConfigPool\nmetadata: {name: master}\n",
            "machine-configs/rendered-master-1.yaml": json.dumps(
                {"kind": "MachineConfig", "spec": {"config": ignition}}
            ),
            "controller-config/machine-config-controller.yaml": json.dumps(
                {"kind": "ControllerConfig", "spec": {"pullSecret": {"name": "pull"}}}
            ),
            ".treenail/install.json": json.dumps(state),
            ".treenail/status.json": json.dumps(
                {
                    "token": CANARY,
                    "failure": {name: step[name] for name in ("reason", "remedy")}
                    | {"step": "build:master"},
                }
            ),
            ".treenail/registry/secrets/push-login": CANARY,
            ".treenail/registry/tls.key": CANARY,
            f"{storage}/repositories/example/os/_manifests/revisions/sha256/{DIGEST}/link": "x",
            f"{storage}/blobs/sha256/ab/{DIGEST}/data": json.dumps(manifest),
            f"{storage}/blobs/sha256/cd/{CONFIG_DIGEST}/data": json.dumps(config),
            ".treenail/cluster-objects/secret-handover.yaml": json.dumps(secret),
            f"{attempt}/Containerfile": f"FROM configs\nARG PASSWORD={CANARY}\nRUN true\n",
            f"{attempt}/output.log": f"STEP 1\nAuthorization: Bearer {CANARY}\n",
            f"{attempt}/report.json": json.dumps({"reason": "PushDenied", "auth": CANARY}),
            ".treenail/logs/registry.log": f"GET /v2/?token={CANARY} http.request.uri\n"
            f"see https://registry.example/v2/?sig={CANARY}\n",
        },
    )
    return root
