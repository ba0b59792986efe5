"""A machine from which an API server can be reached."""

import base64
import json
from pathlib import Path

from tests.kube.server import Server


def reachable(root: Path, server: Server, node: str = "a") -> None:
    """Write settings and kubeconfig of a node's machine."""
    identity = base64.b64encode(server.identity(f"system:node:{node}").read_bytes()).decode()
    kubeconfig = {
        "current-context": "a",
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "clusters": [
            {"name": "a", "cluster": {"server": server.url, "insecure-skip-tls-verify": True}}
        ],
        "users": [
            {
                "name": "a",
                "user": {"client-certificate-data": identity, "client-key-data": identity},
            }
        ],
    }
    for path, text in (
        ("etc/treenail/agent.toml", f'node_name = "{node}"\n'),
        ("var/lib/kubelet/kubeconfig", json.dumps(kubeconfig)),
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
