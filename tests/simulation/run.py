"""One run of simulated processes on a cluster, from a saved state to a settled one."""

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

from tests.simulation.cluster import ClusterState, SimCluster
from tests.simulation.controllers import SimControllers
from tests.simulation.machines import SimMachine
from tests.simulation.registries import SimRegistry, hold_registries
from tests.simulation.threads import Simulation
from treenail_lab.apiserver.store import StoreEvent

Json = dict[str, Any]
PODS = ("a", "b")
"""Two processes of the controllers, of which one leads."""


class ClusterRun(ABC):
    """Machines and controllers from a saved state; use it as a context manager."""

    machines: Mapping[str, SimMachine] = {}
    pods: Sequence[SimControllers] = ()
    registries: Sequence[SimRegistry] = ()
    """The only registries that clients reach during the run."""

    def __init__(self, cluster: SimCluster, state: ClusterState, *, seed: int = 1) -> None:
        random.seed(seed)
        self.simulation = Simulation()
        self.cluster = cluster
        cluster.begin(self.simulation)
        cluster.load(state)
        self.broken: list[str] = []
        """What did not hold."""
        self.touches = 0
        self.is_restored = False
        """True after an etcd restore, after which objects show the past until they are reported."""
        self.began_at_version = cluster.api.store.version
        self.history: list[ClusterState] = []
        """The states before the last writes."""
        self._checked_version, self._is_settled = -1, False
        self.story = self.simulation.make_process("story")
        self._listener = self.check_event

    def __enter__(self) -> Self:
        self._held = ExitStack()
        if self.registries:
            self._held.enter_context(hold_registries(*self.registries))
        self._held.enter_context(self.simulation.hold_modules())
        self.cluster.api.store.add_listener(self._listener)
        for pod in self.pods:
            pod.start()
        for machine in self.machines.values():
            machine.power_on()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.simulation.end()
        finally:
            self.cluster.api.store._listeners.remove(self._listener)
            self._held.close()

    @abstractmethod
    def begin_story(self) -> None:
        """Let users and machines do what the controllers react to."""

    @abstractmethod
    def find_unsettled(self) -> Iterator[str]:
        """Yield what differs from the end of the story: objects, statuses and machines."""

    @abstractmethod
    def check_event(self, storage: tuple[str, str], event: StoreEvent) -> None:
        """Check what must hold after each event; the listener of the store."""

    def excuse_node(self, name: str) -> None:
        """Let a node be out of service beside those that the controllers chose."""
        raise AssertionError(f"{name}: this run has no machines")

    def note_problem(self, text: str) -> None:
        if text not in self.broken:
            self.broken.append(text)

    def restore(self, state: ClusterState, *, skipped_versions: int = 0) -> None:
        """Restore etcd."""
        self.is_restored = True
        self.cluster.load(state, skipped_versions=skipped_versions)

    def keep_state(self) -> None:
        """Keep the present state for a restore."""
        self.history.append(self.cluster.save())

    def settle(self, *, limit_s: float = 3600.0) -> bool:
        """Run until the story has ended as it must; False after the limit."""
        while self.simulation.run_until(self.is_settled, limit_s=limit_s):
            # A status that is true for a moment only is not the end.
            self.simulation.run_for(10.0)
            if self.is_settled():
                return True
        return False

    def is_settled(self) -> bool:
        # Between two writes nothing ends: each machine and status reports its end.
        version = self.cluster.api.store.version
        if version != self._checked_version:
            self._checked_version = version
            self._is_settled = next(self.find_unsettled(), None) is None
        return self._is_settled

    def list_unsettled(self) -> list[str]:
        return list(self.find_unsettled())

    def describe(self) -> str:
        return json.dumps([*self.broken, *self.list_unsettled(), *self.simulation.deaths],
                          indent=1, default=repr)  # fmt: skip
