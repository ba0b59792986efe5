"""Threads in virtual time: one runs at once, and switches happen only where a thread waits.

`Simulation.hold_modules` replaces `threading`, `queue` and `ThreadPoolExecutor` in the modules of
treenail, so that its own watches, work queues and loops run here, without a second of real time
and in the same order each time. A thread belongs to a `SimProcess`, which can be killed at any
wait, or stopped as SIGSTOP does.
"""

import heapq
import itertools
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

STARTED_AT = 1_700_000_000.0


class TaskKilled(BaseException):
    """The process of the thread was killed."""


class SimProcess:
    """The threads that are killed or stopped together, and the wall clock of their machine."""

    def __init__(self, simulation: "Simulation", name: str) -> None:
        self.simulation = simulation
        self.name = name
        self.tasks: dict[SimTask, None] = {}
        self.is_killed = False
        self.stopped_until = 0.0
        self.wall_offset = 0.0

    def now(self) -> float:
        return STARTED_AT + self.simulation.time + self.wall_offset

    def monotonic(self) -> float:
        return self.simulation.time

    def sleep(self, seconds: float) -> None:
        self.simulation.park(seconds)

    def start(self, name: str, run: Callable[[], object]) -> "SimTask":
        """Run a function on a new thread of the process."""
        return SimTask(self, f"{self.name}/{name}", run)

    def kill(self) -> None:
        """Kill all threads; they take no further step. It raises in a thread of the process."""
        self.is_killed = True
        self.stopped_until = 0.0
        for task in list(self.tasks):
            self.simulation.wake(task)
        current = self.simulation.current
        if current is not None and current.process is self:
            raise TaskKilled

    def stop_for(self, seconds: float) -> None:
        """Stop all threads for some time, as SIGSTOP or a suspended machine does."""
        self.stopped_until = self.simulation.time + seconds
        current = self.simulation.current
        if current is not None and current.process is self:
            self.simulation.park(seconds)


class SimTask:
    """One thread."""

    def __init__(self, process: SimProcess, name: str, run: Callable[[], object]) -> None:
        self.process = process
        self.name = name
        self.baton = threading.Lock()
        self.baton.acquire()
        self.is_done = False
        self.is_queued = False
        self.parked = 0
        """Number of waits; tells a timer whether its wait is still the current one."""
        self.was_woken = False
        self.ended: SimEvent = SimEvent(process.simulation)
        self.sim_thread: object = None
        """The object that `threading.current_thread` returns."""
        self._run = run
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        process.tasks[self] = None
        self.thread.start()
        process.simulation.wake(self)

    def _serve(self) -> None:
        simulation = self.process.simulation
        self.baton.acquire()
        try:
            if not self.process.is_killed:
                self._run()
        except TaskKilled:
            pass
        except BaseException as error:  # noqa: BLE001  # the test reports it
            simulation.deaths.append((self.name, error))
        self.is_done = True
        self.process.tasks.pop(self, None)
        self.ended.set()
        simulation.yield_baton()


class Simulation:
    """All threads, and the time, which passes only while every thread waits."""

    def __init__(self) -> None:
        self.time = 0.0
        self.current: SimTask | None = None
        self.deaths: list[tuple[str, BaseException]] = []
        """Threads that ended by an exception: bugs."""
        self.switches = 0
        self._ready: deque[SimTask] = deque()
        self._timers: list[tuple[float, int, SimTask, int]] = []
        self._numbers = itertools.count()
        self._baton = threading.Lock()
        self._baton.acquire()
        self._processes: list[SimProcess] = []

    def make_process(self, name: str) -> SimProcess:
        self._processes = [each for each in self._processes if each.tasks or not each.is_killed]
        process = SimProcess(self, name)
        self._processes.append(process)
        return process

    def run_until(self, is_reached: Callable[[], bool], *, limit_s: float) -> bool:
        """Run until the condition holds between two steps; False after ``limit_s``."""
        end = self.time + limit_s
        while not is_reached():
            if not self._step(end):
                return is_reached()
        return True

    def run_for(self, seconds: float) -> None:
        self.run_until(lambda: False, limit_s=seconds)

    def end(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            process.kill()
        while any(process.tasks for process in self._processes):
            if not self._step(self.time):
                names = [task.name for each in self._processes for task in each.tasks]
                raise AssertionError(f"threads do not end: {names}")

    def _step(self, end: float) -> bool:
        """Run one thread until it waits; False when nothing happens until ``end``."""
        while not self._ready:
            if not self._timers or self._timers[0][0] > end:
                self.time = max(self.time, end)
                return False
            at, _, task, parked = heapq.heappop(self._timers)
            if task.parked == parked and not task.is_done and not task.is_queued:
                self.time = max(self.time, at)
                task.is_queued = True
                self._ready.append(task)
        task = self._ready.popleft()
        task.is_queued = False
        if task.is_done:
            return True
        if task.process.stopped_until > self.time:
            at = task.process.stopped_until
            heapq.heappush(self._timers, (at, next(self._numbers), task, task.parked))
            return True
        self.switches += 1
        self.current = task
        task.baton.release()
        self._baton.acquire()
        self.current = None
        return True

    def yield_baton(self) -> None:
        """Let the scheduler continue; the calling thread does not run before it gets a turn."""
        self._baton.release()

    def wake(self, task: SimTask) -> None:
        if not task.is_queued and not task.is_done:
            task.is_queued = task.was_woken = True
            self._ready.append(task)

    def park(self, seconds: float | None) -> bool:
        """Wait until `wake`, or for some time; return whether it was woken."""
        task = self.current
        assert task is not None, "only a thread of the simulation can wait"
        if task.process.is_killed:
            raise TaskKilled
        task.parked += 1
        task.was_woken = False
        if seconds is not None:
            # A wait for the rest of a limit is too short for the precision of the time otherwise.
            at = self.time + max(seconds, 1e-6)
            heapq.heappush(self._timers, (at, next(self._numbers), task, task.parked))
        self._baton.release()
        task.baton.acquire()
        if task.process.is_killed:
            raise TaskKilled
        return task.was_woken

    @contextmanager
    def hold_modules(self) -> Iterator[None]:
        """Let the modules of treenail use these threads, as long as the context is open."""
        primitives = _make_threading(self)
        simulated = {
            "threading": primitives,
            "queue": SimpleNamespace(SimpleQueue=_make_queue_class(self), Empty=queue.Empty),
            "ThreadPoolExecutor": lambda *_, **__: SimExecutor(self),
        }
        names = ("Thread", "Lock", "RLock", "Condition", "Event")
        by_name = [(each, getattr(threading, each), getattr(primitives, each)) for each in names]
        replaced = []
        for name, module in list(sys.modules.items()):
            if not name.startswith("treenail.") or name.startswith("treenail.log"):
                continue
            for attribute, value in simulated.items():
                if (before := vars(module).get(attribute)) is not None:
                    replaced.append((module, attribute, before))
                    setattr(module, attribute, value)
            for attribute, real, value in by_name:
                if vars(module).get(attribute) is real:
                    replaced.append((module, attribute, real))
                    setattr(module, attribute, value)
        try:
            yield
        finally:
            for module, attribute, before in replaced:
                setattr(module, attribute, before)


class SimLock:
    """A lock, and with ``is_recursive`` a recursive one."""

    def __init__(self, simulation: Simulation, *, is_recursive: bool = False) -> None:
        self._simulation = simulation
        self._is_recursive = is_recursive
        self._owner: object = None
        self._depth = 0
        self._waiting: deque[SimTask] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        owner = self._simulation.current or self._simulation
        if self._is_recursive and self._owner is owner:
            self._depth += 1
            return True
        while self._depth:
            if not blocking:
                return False
            assert isinstance(owner, SimTask), "the scheduler waits for a lock"
            self._waiting.append(owner)
            self._simulation.park(None)
        self._owner, self._depth = owner, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            while self._waiting:
                task = self._waiting.popleft()
                if not task.is_done:
                    self._simulation.wake(task)
                    return

    def locked(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimCondition:
    """A condition with a recursive lock."""

    def __init__(self, simulation: Simulation, lock: SimLock | None = None) -> None:
        self._simulation = simulation
        self._lock = lock or SimLock(simulation, is_recursive=True)
        self._waiting: deque[SimTask] = deque()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        task = self._simulation.current
        assert task is not None
        self._waiting.append(task)
        self._lock.release()
        try:
            return self._simulation.park(timeout)
        finally:
            if task in self._waiting:
                self._waiting.remove(task)
            self._lock.acquire()

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        end = None if timeout is None else self._simulation.time + timeout
        while not predicate():
            left_s = None if end is None else end - self._simulation.time
            if left_s is not None and left_s <= 0:
                return False
            self.wait(left_s)
        return True

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            self._simulation.wake(self._waiting.popleft())

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class SimEvent:
    """An event."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._is_set = False
        self._waiting: list[SimTask] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._simulation.wake(task)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            task = self._simulation.current
            assert task is not None
            self._waiting.append(task)
            try:
                self._simulation.park(timeout)
            finally:
                if task in self._waiting:
                    self._waiting.remove(task)
        return self._is_set


class SimFuture(Future[Any]):
    """A result that a thread of the simulation can wait for."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._ended = SimEvent(simulation)
        self.add_done_callback(lambda _: self._ended.set())

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self._ended.wait(timeout)
        return super().result(0)


class SimExecutor(Executor):
    """Runs each call on a thread of the process that submits it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = SimFuture(self._simulation)

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:  # noqa: BLE001  # as ThreadPoolExecutor does
                future.set_exception(error)

        task = self._simulation.current
        task.process.start("executor", run)
        return future


def _make_threading(simulation: Simulation) -> SimpleNamespace:
    class Thread:
        def __init__(
            self, target: Callable[..., object], args: tuple[object, ...] = (), name: str = "",
            daemon: bool = True,
        ) -> None:  # fmt: skip
            self._run = lambda: target(*args)
            self.name = name
            self._task: SimTask | None = None

        def start(self) -> None:
            creator = simulation.current
            self._task = creator.process.start(self.name, self._run)
            self._task.sim_thread = self

        @property
        def ident(self) -> int | None:
            return None if self._task is None else id(self._task)

        def is_alive(self) -> bool:
            return self._task is not None and not self._task.is_done

        def join(self, timeout: float | None = None) -> None:
            if not self._task.is_done:
                self._task.ended.wait(timeout)

    return SimpleNamespace(
        Thread=Thread,
        Lock=lambda: SimLock(simulation),
        RLock=lambda: SimLock(simulation, is_recursive=True),
        Condition=lambda lock=None: SimCondition(simulation, lock),
        Event=lambda: SimEvent(simulation),
        get_ident=lambda: id(simulation.current),
        current_thread=lambda: getattr(simulation.current, "sim_thread", None),
    )


def _make_queue_class(simulation: Simulation) -> type:
    class SimpleQueue:
        def __init__(self) -> None:
            self._items: deque[object] = deque()
            self._changed = SimCondition(simulation)

        def __class_getitem__(cls, _item: object) -> type:
            return cls

        def put(self, item: object) -> None:
            self._items.append(item)
            self._changed.notify()

        def empty(self) -> bool:
            return not self._items

        def get_nowait(self) -> object:
            if not self._items:
                raise queue.Empty
            return self._items.popleft()

        def get(self, block: bool = True, timeout: float | None = None) -> object:
            end = None if timeout is None else simulation.time + timeout
            while not self._items:
                left_s = None if end is None else end - simulation.time
                if not block or (left_s is not None and left_s <= 0):
                    raise queue.Empty
                with self._changed:
                    self._changed.wait(left_s)
            return self._items.popleft()

    return SimpleQueue
