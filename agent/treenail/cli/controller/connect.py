"""Connection of commands to the cluster."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treenail.clock import SystemClock
from treenail.kube.client import Client
from treenail.kube.kubeconfig import read_kubeconfig
from treenail.kube.transport import HttpTransport


@contextmanager
def connect_cluster(kubeconfig: str | None) -> Iterator[Client]:
    """Connect with the kubeconfig, with KUBECONFIG, or with ~/.kube/config."""
    path = kubeconfig or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube/config")
    transport = HttpTransport(read_kubeconfig(path), SystemClock())
    try:
        yield Client(transport)
    finally:
        transport.close()
