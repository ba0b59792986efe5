"""Processes of the cluster's controllers in a simulation, with runtime and leader election."""

from typing import Any

import treenail.controllers.runtime.runtime as runtime_module
from tests.simulation.cluster import SimCluster, SimTransport
from tests.simulation.threads import SimProcess
from treenail.cli.controller.main import create_process_parser
from treenail.cli.controller.run.command import _CALL_TIMEOUT_S, _LEASE_S, _RENEW_S, _RETRY_S
from treenail.cli.controller.run.controllers import ControllerContext, load_command
from treenail.controllers.runtime.controller_metrics import ControllerMetrics
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.kube.api_client import Client
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.lease import LateWrites, LeaderElectionConfig, LeaderElector, LeaderTransport
from treenail.manifests.installation import NAME
from treenail_lab.apiserver.access.authentication import ApiUser

NAMESPACE = "kube-system"
RESTART_S = 2.0
MASTERS = ("system:masters",)


class SimControllers:
    """A pod of the controllers, which the kubelet starts again whenever its process ends."""

    def __init__(
        self,
        cluster: SimCluster,
        name: str,
        enabled: tuple[str, ...],
        *,
        build_namespace: str = NAMESPACE,
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.enabled = enabled
        self.build_namespace = build_namespace
        self.starts = 0
        self.process: SimProcess | None = None
        self.runtime: Any = None
        self.wall_offset = 0.0

    def start(self) -> None:
        kubelet = self.cluster.simulation.make_process(f"kubelet/{self.name}")
        kubelet.start("pod", self._supervise)

    def _supervise(self) -> None:
        simulation = self.cluster.simulation
        while True:
            self.starts += 1
            process = simulation.make_process(f"controllers/{self.name}")
            process.wall_offset = self.wall_offset
            self.process = process
            process.start("main", self._run_controllers).ended.wait()
            if not process.is_killed:
                process.kill()
            simulation.park(RESTART_S)

    def _run_controllers(self) -> None:
        """As `ControllerProcess` does, without its HTTP servers and signals."""
        process = self.process
        assert process is not None
        user = ApiUser(f"treenail-{self.name}", MASTERS)
        transport = SimTransport(self.cluster, process, user)
        client = Client(transport)
        metrics = ControllerMetrics()
        identity = f"{self.name}-{self.starts}"
        recorder = EventRecorder(client, NAME, identity, process)
        context = ControllerContext(
            transport=LeaderTransport(transport, lambda: self.runtime.is_leader),
            late_writes=LateWrites(client, lambda: self.runtime.is_leader),
            recorder=recorder,
            clock=process,
            metrics=metrics,
            own_node_name="",
            load_secret=lambda _: {},
            find_namespace=lambda: NAMESPACE,
        )
        enabled = f"--enable={','.join(self.enabled)}"
        arguments = create_process_parser("run").parse_args(
            ["run", enabled, f"--build-namespace={self.build_namespace}"]
        )
        candidacy = LeaderElectionConfig(
            NAMESPACE,
            NAME,
            identity,
            lease_duration_s=_LEASE_S,
            renew_deadline_s=_RENEW_S,
            retry_period_s=_RETRY_S,
        )
        self.runtime = runtime_module.ControllerRuntime(
            [
                each
                for name in self.enabled
                for each in load_command(name).build(context, arguments)
            ],
            InformerSet(client, process),
            process,
            metrics,
            make_elector=lambda gain, loss: LeaderElector(
                Client(transport, limit_s=_CALL_TIMEOUT_S),
                candidacy,
                process,
                on_started_leading=gain,
                on_stopped_leading=loss,
            ),
        )
        self.runtime.run(runtime_module.threading.Event())
