"""Run one controller in its own process, for a benchmark.

    python -m bench.controller KUBECONFIG rollout|drain

It runs until its standard input ends.
"""

import sys
import threading

from treenail.clocks import SystemClock
from treenail.controllers.drain.controller import DrainController
from treenail.controllers.rollout.controller import MAX_PARALLEL_WRITES, RolloutController
from treenail.controllers.rollout.external_gates import GateClient
from treenail.controllers.rollout.machineconfignodes import MachineConfigNodeController
from treenail.controllers.rollout.reconcile import RolloutSettings
from treenail.controllers.runtime.controller_metrics import ControllerMetrics
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.controllers.runtime.runtime import ControllerRuntime
from treenail.controllers.runtime.web import WebClient
from treenail.controllers.runtime.workers import ControllerSettings
from treenail.kube.api_client import Client
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport


def main(kubeconfig: str, name: str) -> None:
    clock = SystemClock()
    transport = HttpTransport(read_kubeconfig(kubeconfig), clock, max_kept=MAX_PARALLEL_WRITES)
    client = Client(transport)
    events, metrics = EventRecorder(client, f"treenail-{name}", "bench", clock), ControllerMetrics()
    if name == "drain":
        crews = [ControllerSettings(DrainController(client, events, clock, metrics), workers=8)]
    else:
        rollout = RolloutController(
            client, clock, GateClient(WebClient()), events, RolloutSettings()
        )
        crews = [
            ControllerSettings(rollout),
            ControllerSettings(MachineConfigNodeController(client, clock), workers=4),
        ]
    runtime = ControllerRuntime(crews, InformerSet(client, clock), clock, metrics)
    stop = threading.Event()
    thread = threading.Thread(target=runtime.run, args=(stop,))
    thread.start()
    sys.stdin.read()
    stop.set()
    thread.join()
    transport.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
