"""Faults of a cluster that lies, each at one write of a rollout.

The writes are those of agents and controllers, in order, without renewals of the Lease. A fault
begins just before the write is executed, or just after it.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.simulation.cluster import FaultWindow, make_error
from tests.simulation.controllers import SimControllers
from tests.simulation.machines import SimMachine
from tests.simulation.run import ClusterRun
from tests.simulation.threads import SimProcess
from treenail.errors import UnreachableError
from treenail.kube.request import ApiResponse
from treenail_lab.apiserver.request import ServerRequest


@dataclass(frozen=True)
class WritePoint:
    """A write and the process that sends it."""

    run: ClusterRun
    process: SimProcess
    request: ServerRequest

    @property
    def now(self) -> float:
        return self.run.simulation.time

    @property
    def actor(self) -> SimMachine | SimControllers:
        """The machine or pod of the process."""
        kind, _, name = self.process.name.partition("/")
        if kind == "agent":
            return self.run.machines[name]
        return next(pod for pod in self.run.pods if pod.name == name)

    def __str__(self) -> str:
        where = f"{self.request.resource} {self.request.name}".strip()
        return f"{self.process.name}: {self.request.verb} {where}"

    def add(self, name: str, seconds: float, *, everywhere: bool = False, **more: object) -> None:
        """Begin a fault of the writing process, or of all, for some time."""
        process = "" if everywhere else self.process.name
        window = FaultWindow(name, self.now + seconds, process, **more)  # type: ignore[arg-type]  # its fields
        self.run.cluster.faults.add(window)


Act = Callable[[WritePoint], ApiResponse | None]


def kill(point: WritePoint) -> None:
    point.process.kill()


def cut_power(point: WritePoint) -> None:
    """The machine of the agent, or of the pod, loses its power."""
    actor = point.actor
    if isinstance(actor, SimMachine):
        # The fault itself takes the machine out of service, beside those that are assigned.
        point.run.excuse_node(actor.name)
        actor.cut_power()
    else:
        point.process.kill()


def lose_connection(_point: WritePoint) -> None:
    raise UnreachableError("the connection broke before the answer")


def reject(code: int, retry_after_s: int = 0) -> Act:
    return lambda _: make_error(code, retry_after_s=retry_after_s)


def answer_garbage(_point: WritePoint) -> ApiResponse:
    return ApiResponse(200, b'{"kind": "Nod')


def touch(point: WritePoint) -> None:
    """Another client changes the object just before the write."""
    request = point.request
    if request.verb not in {"patch", "update"} or request.plural == "events":
        return
    path = request.path.removesuffix(f"/{request.subresource}")
    point.run.touches += 1
    notes = {"example.com/touched": str(point.run.touches)}
    point.run.cluster.execute("PATCH", path, {"metadata": {"annotations": notes}})


def begin(name: str, seconds: float, **options: object) -> Act:
    return lambda point: point.add(name, seconds, **options)  # type: ignore[arg-type]  # its fields


def expire_versions(point: WritePoint) -> None:
    """The API server compacts its history, and all watches break: each lists again."""
    point.run.cluster.api.store.expire_versions()
    point.run.cluster.cut_watches()


def miss_changes(point: WritePoint) -> None:
    """Watches break for a minute, and then list again: what happened between is never seen."""
    point.add("hold", 60.0, everywhere=True)

    def end() -> None:
        point.run.cluster.simulation.park(60.0)
        expire_versions(point)

    point.run.story.start("expire", end)


def read_stale(seconds: float, age: int) -> Act:
    """Lists of the process show the past for some time; it lists again."""

    def act(point: WritePoint) -> None:
        version = max(point.run.began_at_version, point.run.cluster.api.store.version - age)
        point.add("stale", seconds, version=version, should_cut=True)

    return act


def restart_into_past(point: WritePoint) -> None:
    """The process is killed after its write, and its next start lists the past for a while."""
    version = max(point.run.began_at_version, point.run.cluster.api.store.version - 5)
    point.add("stale", 20.0, version=version)
    point.process.kill()


def restore_etcd(age: int, *, skipped_versions: int = 0) -> Act:
    """The cluster returns to a state of some writes and a minute ago.

    In the minute other clients write, and bookmarks show their versions. A watch cannot detect a
    restore that lost fewer versions than were written again before it reconnected.
    """

    def act(point: WritePoint) -> None:
        run, number = point.run, len(point.run.history) - 1
        run.cluster.api.store.version += 1000
        run.simulation.park(61.0)
        run.restore(run.history[max(number - age, 0)], skipped_versions=skipped_versions)
        point.add("outage", 5.0, everywhere=True, should_cut=True)
        # The API server was stopped for the restore.
        lose_connection(point)

    return act


def jump_clock(seconds: float) -> Act:
    """The wall clock of the process, and of its next starts, jumps."""

    def act(point: WritePoint) -> None:
        point.process.wall_offset += seconds
        point.actor.wall_offset = point.process.wall_offset

    return act


def stop_process(seconds: float) -> Act:
    """SIGSTOP between the decision and the write; beyond the Lease another process leads."""
    return lambda point: point.process.stop_for(seconds)


def kill_leader_node(point: WritePoint) -> None:
    """All processes of controllers and agents die at once."""
    for machine in point.run.machines.values():
        if machine.agent not in {None, point.process}:
            machine.kill_agent()
    for pod in point.run.pods:
        if pod.process not in {None, point.process}:
            pod.process.kill()  # type: ignore[union-attr]  # not None
    point.process.kill()


BEFORE: Mapping[str, Act] = {
    "crash before the write": kill,
    "power cut before the write": cut_power,
    "crash of all before the write": kill_leader_node,
    "connection refused": lose_connection,
    "409": reject(409),
    "410": reject(410),
    "429 for 7 s": reject(429, 7),
    "500": reject(500),
    "503": reject(503),
    "422": reject(422),
    "another client writes first": touch,
    "outage of 15 s": begin("outage", 15.0, everywhere=True, should_cut=True),
    "outage of 100 s": begin("outage", 100.0, everywhere=True, should_cut=True),
    "process is cut off for 100 s": begin("outage", 100.0, should_cut=True),
    "429 for all for 30 s": begin("reject", 30.0, everywhere=True, code=429, retry_after_s=2),
    "500 for all for 30 s": begin("reject", 30.0, everywhere=True, code=500),
    "credentials expired for 90 s": begin("reject", 90.0, code=401, should_cut=True),
    "forbidden for 90 s": begin("reject", 90.0, code=403, should_cut=True),
    "process stops for 20 s": stop_process(20.0),
    "process stops for 100 s, another leads": stop_process(100.0),
    "etcd restored 3 writes back": restore_etcd(3),
    "etcd restored 15 writes back": restore_etcd(15),
    "etcd restored to before the rollout": restore_etcd(1000),
    "etcd restored 15 writes back, with higher versions": restore_etcd(15, skipped_versions=10**6),
    "clock jumps 1 h ahead": jump_clock(3600.0),
    "clock jumps 1 h back": jump_clock(-3600.0),
    "watches held for 60 s": begin("hold", 60.0),
    "all watches held for 200 s": begin("hold", 200.0, everywhere=True),
    "events up to 20 s late": begin("late", 120.0, lag_s=20.0),
    "all events up to 20 s late": begin("late", 120.0, everywhere=True, lag_s=20.0),
    "events twice": begin("duplicate", 120.0, everywhere=True),
    "changes of 60 s never seen": miss_changes,
    "history compacted": expire_versions,
}
AFTER: Mapping[str, Act] = {
    "crash after the write": kill,
    "power cut after the write": cut_power,
    "crash of all after the write": kill_leader_node,
    "answer lost": lose_connection,
    "504 after the write": reject(504),
    "garbage after the write": answer_garbage,
    "crash after the write, then stale reads": restart_into_past,
    "stale reads for 20 s": read_stale(20.0, 5),
}
FAULTS = (*BEFORE, *AFTER)


class FaultAt:
    """Injects one fault at one write of a run, and records all writes."""

    def __init__(
        self, run: ClusterRun, name: str = "", number: int = -1, *, keeps_states: bool = True
    ) -> None:
        self._run, self._name, self._number = run, name, number
        self._keeps_states = keeps_states
        self.points: list[str] = []
        self.counts: Counter[str] = Counter()
        """Writes by kind."""
        faults = run.cluster.faults
        faults.before, faults.after = self._before, self._after

    def _before(self, process: SimProcess, request: ServerRequest) -> ApiResponse | None:
        if request.plural == "leases":
            return None
        point = WritePoint(self._run, process, request)
        self.counts[request.plural] += 1
        if self._keeps_states:
            self._run.keep_state()
            self.points.append(str(point))
        return self._act(BEFORE, point)

    def _after(self, process: SimProcess, request: ServerRequest) -> ApiResponse | None:
        if request.plural == "leases":
            return None
        return self._act(AFTER, WritePoint(self._run, process, request))

    def _act(self, acts: Mapping[str, Act], point: WritePoint) -> ApiResponse | None:
        if len(self.points) - 1 != self._number or self._name not in acts:
            return None
        self._number = -1
        return acts[self._name](point)
