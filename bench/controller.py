"""A controller in a process of its own, as a benchmark's subject.

    python -m bench.controller KUBECONFIG rollout|drain

It works until its standard input ends.
"""

import sys
import threading

from treenail.clock import SystemClock
from treenail.controllers.drain.controller import DrainController
from treenail.controllers.rollout.controller import Settings
from treenail.controllers.rollout.gates.asking import Asker
from treenail.controllers.rollout.live import WRITES_AT_ONCE, Rollout
from treenail.controllers.rollout.machineconfignodes import MachineConfigNodes
from treenail.controllers.runtime.informers import Informers
from treenail.controllers.runtime.metrics import Metrics
from treenail.controllers.runtime.runtime import Runtime
from treenail.controllers.runtime.web import Web
from treenail.controllers.runtime.workers import Crew
from treenail.kube.client import Client
from treenail.kube.events import Recorder
from treenail.kube.kubeconfig import read_kubeconfig
from treenail.kube.transport import HttpTransport


def main(kubeconfig: str, name: str) -> None:
    clock = SystemClock()
    transport = HttpTransport(read_kubeconfig(kubeconfig), clock, keep=WRITES_AT_ONCE)
    client = Client(transport)
    events, metrics = Recorder(client, f"treenail-{name}", "bench", clock), Metrics()
    if name == "drain":
        crews = [Crew(DrainController(client, events, clock, metrics), workers=8)]
    else:
        rollout = Rollout(client, clock, Asker(Web()), events, Settings())
        crews = [Crew(rollout), Crew(MachineConfigNodes(client, clock), workers=4)]
    runtime = Runtime(crews, Informers(client, clock), clock, metrics)
    stop = threading.Event()
    thread = threading.Thread(target=runtime.run, args=(stop,))
    thread.start()
    sys.stdin.read()
    stop.set()
    thread.join()
    transport.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
