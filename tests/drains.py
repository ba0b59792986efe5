"""The drain controller in the process of a test, and its effects."""

import threading

from treenail.clocks import Clock
from treenail.controllers.drain.controller import DrainController
from treenail.controllers.runtime.controller_metrics import ControllerMetrics
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.controllers.runtime.runtime import ControllerRuntime
from treenail.controllers.runtime.workers import ControllerSettings
from treenail.kube.api_client import Client
from treenail.kube.event_recorder import EventRecorder
from treenail_lab.demo.outages import NodeOutages

NAMED_AFTER_S = 2.0


class Drains:
    """Runs the drain controller and observes outages."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._absences = NodeOutages(client, clock)
        metrics = ControllerMetrics()
        recorder = EventRecorder(client, "treenail-controller", "lab", clock)
        controller = DrainController(client, recorder, clock, metrics, report_after_s=NAMED_AFTER_S)
        crew = ControllerSettings(controller, first_retry_s=0.05, max_retry_s=0.5)
        self._runtime = ControllerRuntime([crew], InformerSet(client, clock), clock, metrics)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._runtime.run, args=(self._stop,), name="drains", daemon=True
        )

    def start(self) -> None:
        self._absences.start()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30.0)
        self._absences.stop()

    def blocked(self, node: str) -> str:
        """The blockers of a drain; empty without any."""
        return self._absences.find_blocker(node)
