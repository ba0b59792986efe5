"""Stands in for the kubelet: keeps its Node's Ready condition and heartbeat, and runs no pods."""

import logging
import os
import socket
import sys
import time
from pathlib import Path

from treenail.clocks import SystemClock, format_rfc3339
from treenail.errors import TreenailError
from treenail.kube.api_client import Client, Json
from treenail.kube.resources import NODES
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.sd_notify import SystemdNotifier

log = logging.getLogger(__name__)

_KUBECONFIG = "/var/lib/kubelet/kubeconfig"
_BEAT_S = 10.0


def main() -> int:
    """Report the Node status until stopped."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    clock = SystemClock()
    client = Client(HttpTransport(read_kubeconfig(_KUBECONFIG), clock))
    SystemdNotifier(os.environ).notify_ready()
    while True:
        try:
            client.patch(NODES, socket.gethostname(), _status(clock), subresource="status")
        except TreenailError as error:
            log.info("can't report: %s", error)
        time.sleep(_BEAT_S)


def _status(clock: SystemClock) -> Json:
    now = format_rfc3339(clock.now())
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    condition: Json = {
        "type": "Ready",
        "status": "True",
        "reason": "KubeletReady",
        "message": "kubelet is posting ready status",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }
    return {"status": {"conditions": [condition], "nodeInfo": {"bootID": boot}}}


if __name__ == "__main__":
    sys.exit(main())
