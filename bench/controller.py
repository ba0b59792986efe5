"""The rollout controller in a process of its own, as a benchmark's subject.

    python -m bench.controller KUBECONFIG

It works until its standard input ends.
"""

import sys
import threading

from treenail.clock import SystemClock
from treenail.controllers.informers import Informers
from treenail.controllers.machineconfignodes import MachineConfigNodes
from treenail.controllers.metrics import Metrics
from treenail.controllers.rollout.asking import Asker
from treenail.controllers.rollout.controller import Settings
from treenail.controllers.rollout.live import WRITES_AT_ONCE, Rollout
from treenail.controllers.runtime import Runtime
from treenail.controllers.web import Web
from treenail.controllers.workers import Crew
from treenail.kube.client import Client
from treenail.kube.events import Recorder
from treenail.kube.kubeconfig import read_kubeconfig
from treenail.kube.transport import HttpTransport


def main(kubeconfig: str) -> None:
    clock = SystemClock()
    transport = HttpTransport(read_kubeconfig(kubeconfig), clock, keep=WRITES_AT_ONCE)
    client = Client(transport)
    events = Recorder(client, "treenail-rollout", "bench", clock)
    rollout = Rollout(client, clock, Asker(Web()), events, Settings())
    nodes = MachineConfigNodes(client, clock)
    crews = [Crew(rollout), Crew(nodes, workers=4)]
    runtime = Runtime(crews, Informers(client, clock), clock, Metrics())
    stop = threading.Event()
    thread = threading.Thread(target=runtime.run, args=(stop,))
    thread.start()
    sys.stdin.read()
    stop.set()
    thread.join()
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1])
