"""Machines with real agents on a simulated cluster.

The agent's loop, its Node client, watch and Event recorder are real. Operating system, disk and
ledger are those of `tests.fakes.world`.
"""

import copy
from typing import Any

import treenail.daemon.reconcile.loop as loop_module
from tests.daemon.machines import ROOT
from tests.daemon.nodes import count_start, make_interfaces
from tests.fakes.host_machine import make_machine
from tests.fakes.world import (
    FakeMachine,
    FakeNotifier,
    WentDown,
    World,
)
from tests.simulation.cluster import SimCluster, SimTransport
from tests.simulation.threads import SimProcess
from treenail.clocks import format_rfc3339
from treenail.daemon.agent_settings import LimitSettings
from treenail.daemon.cluster.node_client import NodeClient
from treenail.daemon.local.metrics import NodeMetrics
from treenail.daemon.local.status_file import StatusFile
from treenail.daemon.reconcile.observe import Observer
from treenail.kube.api_client import Client
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.resources import NODES
from treenail.kube.watch import ResourceWatch, WatchScope
from treenail_lab.apiserver.access.authentication import ApiUser

BOOT_S = 20.0
RESTART_S = 1.0
"""RestartSec= of the agent's unit."""


class SimMachine:
    """One node: its machine, its kubelet's Ready condition, and its agent."""

    def __init__(self, cluster: SimCluster, name: str, world: World) -> None:
        self.cluster = cluster
        self.name = name
        self.world = world
        self.is_down = False
        self.agent: SimProcess | None = None
        self.starts = 0
        self.wall_offset = 0.0
        self._lost_power = self._went_down = False

    def power_on(self) -> None:
        """Start systemd, which starts the agent whenever it ends."""
        self._systemd = self.cluster.simulation.make_process(f"systemd/{self.name}")
        self._systemd.start("init", self._supervise)

    def kill_agent(self) -> None:
        """SIGKILL; it raises when the agent itself calls."""
        self.agent.kill()

    def cut_power(self) -> None:
        """Lose the power; the machine boots again. It raises when the agent itself calls."""
        self._lost_power = True
        self.kill_agent()

    def _supervise(self) -> None:
        simulation = self.cluster.simulation
        while True:
            self.starts += 1
            self._went_down = False
            self.agent = agent = simulation.make_process(f"agent/{self.name}")
            agent.wall_offset = self.wall_offset
            main = agent.start("main", self._run_agent)
            main.ended.wait()
            if not agent.is_killed:
                agent.kill()
            if self._lost_power or self._went_down or self.world.is_going_down:
                self._boot()
            else:
                simulation.park(RESTART_S)

    def _boot(self) -> None:
        self.is_down = True
        self._set_ready("False")
        self.cluster.simulation.park(BOOT_S)
        if self._lost_power:
            self.world.power_cut()
        else:
            self.world.reboot()
        self._lost_power = False
        self.is_down = False
        self._set_ready("True")

    def report_ready(self) -> None:
        """Write the Ready condition as the machine is now."""
        self._set_ready("False" if self.is_down else "True")

    def _set_ready(self, status: str) -> None:
        set_ready(self.cluster, self.name, status)

    def _run_agent(self) -> None:
        agent = self.agent
        assert agent is not None
        try:
            AgentRun(self.cluster, agent, self.name, self.world).run()
        except WentDown:
            self._went_down = True


class AgentRun:
    """One start of the agent, as `treenail.cli.node.run.Agent` is made."""

    def __init__(self, cluster: SimCluster, process: SimProcess, node: str, world: World) -> None:
        self._world = world
        transport = SimTransport(
            cluster, process, ApiUser(f"system:node:{node}", ("system:nodes",))
        )
        client = Client(transport)
        # That of the simulation, not of this module.
        self._wakeup = loop_module.Wakeup()
        stop: Any = loop_module.threading.Event()
        node_client = NodeClient(
            client,
            EventRecorder(client, "treenail", node, process),
            node_name=node,
            clock=process,
            on_change=lambda: self._wakeup.notify("the Node changed"),
        )
        self._watch = ResourceWatch(
            client,
            WatchScope(NODES, field_selector=f"metadata.name={node}"),
            process,
            on_change=lambda _, found: found and node_client.accept_node(found),
            on_connected=lambda: self._wakeup.notify("the Node watch connected"),
        )
        self._watch.add_list_handler(node_client.handle_list)
        host = make_machine(ROOT, world.disk, clock=process)
        ports = make_interfaces(world, host, process, node_client, FakeMachine(world))
        count_start(ports)
        self._loop = loop_module.ReconcileLoop(
            ports,
            observer=Observer(ports, should_drain=True, drain_limit_s=3600.0),
            status_file=StatusFile(
                write=lambda _: None, notifier=FakeNotifier(), clock=process, node=node
            ),
            metrics=NodeMetrics(host.files, process),
            wakeup=self._wakeup,
            stop=stop,
            limits=LimitSettings(),
        )

    def run(self) -> None:
        self._loop.finish_boot()
        self._watch.start()
        self._loop.run()


def set_ready(cluster: SimCluster, node: str, status: str) -> None:
    """Write the Ready condition, as the kubelet and the node lifecycle controller do."""
    now = format_rfc3339(cluster.clock.now())
    ready = {
        "type": "Ready", "status": status, "reason": "Kubelet", "message": "",
        "lastTransitionTime": now, "lastHeartbeatTime": now,
    }  # fmt: skip
    body = {"status": {"conditions": [ready]}}
    cluster.execute("PATCH", f"/api/v1/nodes/{node}/status", body)


def copy_world(world: World) -> World:
    """Return a machine in the same state."""
    return copy.deepcopy(world)
