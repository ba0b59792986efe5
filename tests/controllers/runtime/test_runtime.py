"""Controllers in a process: shared watches, errors of one key, leadership, shutdown."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from tests.fixtures.objects import install_kinds
from tests.waiting import wait_until
from treenail.clocks import SystemClock
from treenail.controllers.runtime.controller_metrics import ControllerMetrics
from treenail.controllers.runtime.informer_set import InformerSet, InformerView
from treenail.controllers.runtime.runtime import ControllerRuntime, MakeElector, make_sole_leader
from treenail.controllers.runtime.workers import Controller, ControllerSettings, Enqueue
from treenail.errors import ClusterError, ConfigError, NotFoundError, NotLeaderError
from treenail.kube.api_client import Client, Json
from treenail.kube.lease import LateWrites, LeaderElectionConfig, LeaderElector
from treenail.kube.resources import CONFIGMAPS, LEASES, ROLLOUTPOLICIES
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.kube.watch import WatchScope
from treenail_lab.apiserver.serving.faults import DelayFault, FaultMatch, RejectFault
from treenail_lab.apiserver.serving.server import LabServer

CLOCK = SystemClock()
PLACE = WatchScope(CONFIGMAPS, namespace="default")


def word(found: Json) -> str:
    """Return the value in a ConfigMap."""
    content = found.get("data")
    if not isinstance(content, dict) or "word" not in content:
        raise ConfigError("there is no word in it")
    return str(content["word"])


class Reader:
    """Records what it reads; raises ``trouble`` for the key of that name."""

    def __init__(self, name: str = "reader") -> None:
        self._name = name
        self.seen: list[tuple[str, str | None]] = []
        self.turns: Counter[str] = Counter()
        self.trouble: dict[str, Exception] = {}
        self.again_s: float | None = None
        self.hold = threading.Event()
        self.hold.set()
        self.closed = False

    @property
    def name(self) -> str:
        return self._name

    def register_watches(self, informers: InformerSet, enqueue: Enqueue) -> None:
        self.view: InformerView[str] = informers.add_view(PLACE, word)
        self.view.add_handler(lambda key, _before, _after: enqueue(key))

    def sync_key(self, key: str) -> float | None:
        self.turns[key] += 1
        self.hold.wait(10)
        if key in self.trouble:
            raise self.trouble[key]
        self.seen.append((key, self.view.find(key)))
        return self.again_s

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def client(server: LabServer) -> Iterator[Client]:
    transport = HttpTransport(read_kubeconfig(str(server.admin_kubeconfig)), CLOCK, max_kept=4)
    yield Client(transport)
    transport.close()


class Process:
    """A runtime on its own thread."""

    def __init__(
        self,
        client: Client,
        *controllers: Controller,
        stand: MakeElector = make_sole_leader,
        stop_limit_s: float = 20.0,
    ) -> None:
        self.metrics = ControllerMetrics()
        informers = InformerSet(client, CLOCK)
        crews = [
            ControllerSettings(each, first_retry_s=0.01, max_retry_s=0.05) for each in controllers
        ]
        self.runtime = ControllerRuntime(
            crews, informers, CLOCK, self.metrics, make_elector=stand, stop_limit_s=stop_limit_s
        )
        self.stop = threading.Event()
        self.ended: list[bool] = []
        self._thread = threading.Thread(
            target=lambda: self.ended.append(self.runtime.run(self.stop))
        )

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self.stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()


@contextmanager
def running(
    client: Client, *controllers: Controller, stand: MakeElector = make_sole_leader
) -> Iterator[Process]:
    process = Process(client, *controllers, stand=stand)
    process.start()
    try:
        yield process
    finally:
        process.end()


def standing(client: Client, identity: str) -> MakeElector:
    """Build an elector with short times."""
    candidacy = LeaderElectionConfig(
        "kube-system", "c", identity, lease_duration_s=3, renew_deadline_s=0.4, retry_period_s=0.05
    )
    return lambda gain, loss: LeaderElector(
        client, candidacy, CLOCK, on_started_leading=gain, on_stopped_leading=loss
    )


def put(client: Client, name: str, value: str) -> None:
    body: Json = {"metadata": {"name": name}, "data": {"word": value}}
    client.create(CONFIGMAPS, body, namespace="default")


def change(client: Client, name: str, content: Json) -> None:
    client.patch(CONFIGMAPS, name, content, namespace="default")


def test_each_change_is_synced(client: Client) -> None:
    put(client, "a", "one")
    reader = Reader()
    with running(client, reader) as process:
        wait_until(lambda: reader.seen == [("default/a", "one")])
        change(client, "a", {"metadata": {"labels": {"x": "y"}}})
        change(client, "a", {"data": {"word": "two"}})
        wait_until(lambda: reader.seen[1:] == [("default/a", "two")])
        change(client, "a", {"data": {"word": None}})
        wait_until(lambda: reader.seen[2:] == [("default/a", None)])
        assert reader.view.get_all() == {}
        assert process.runtime.unready_reason == process.runtime.stuck_reason == ""
    assert reader.closed
    assert process.ended == [True]


def test_controllers_share_the_watch_of_a_kind(server: LabServer, client: Client) -> None:
    put(client, "a", "one")
    readers = Reader("first"), Reader("second")
    with running(client, *readers):
        wait_until(lambda: all(reader.seen for reader in readers))
        wait_until(
            lambda: server.call_api(lambda api: api.watches.count_watches()) == {"configmaps": 1}
        )
        assert server.count_requests(verb="list", resource="configmaps") == 1


@pytest.mark.parametrize("error", [ClusterError("the server is ill"), KeyError("a bug")])
def test_error_of_one_key_blocks_no_other_key(client: Client, error: Exception) -> None:
    put(client, "a", "one")
    put(client, "b", "two")
    reader = Reader()
    reader.trouble["default/a"] = error
    with running(client, reader) as process:
        wait_until(lambda: reader.seen == [("default/b", "two")])
        wait_until(lambda: reader.turns["default/a"] >= 3)
        reader.trouble.clear()
        wait_until(lambda: ("default/a", "one") in reader.seen)
    text = process.metrics.render_text()
    assert 'reconciles_total{controller="reader",result="success"} 2.0\n' in text
    assert 'reconcile_errors_total{controller="reader"}' in text


def test_sync_result_schedules_the_next_sync(client: Client) -> None:
    put(client, "a", "one")
    reader = Reader()
    reader.again_s = 0.01
    with running(client, reader):
        wait_until(lambda: reader.turns["default/a"] >= 3)


def test_wait_that_rounding_left_is_no_busy_loop(client: Client) -> None:
    put(client, "a", "one")
    reader = Reader()
    reader.again_s = 7e-15
    with running(client, reader) as process:
        delays = []
        add_after = process.runtime._workers[0].queue.add_after

        def record(key: str, seconds: float) -> None:
            delays.append(seconds)
            add_after(key, seconds)

        process.runtime._workers[0].queue.add_after = record  # type: ignore[method-assign]  # observed
        wait_until(lambda: len(delays) >= 3)
    assert min(delays) >= 0.001


def test_no_sync_runs_before_all_informers_synced(server: LabServer, client: Client) -> None:
    put(client, "a", "one")
    server.inject_fault(RejectFault(503, retry_after_s=0), FaultMatch(resource="configmaps"))
    reader = Reader()
    with running(client, reader) as process:
        wait_until(lambda: "unable to handle the request" in process.runtime.unready_reason)
        assert reader.turns == {}
        server.lift_fault()
        wait_until(lambda: reader.seen == [("default/a", "one")])


def test_stop_finishes_running_syncs_and_starts_no_other(client: Client) -> None:
    for name in "abcde":
        put(client, name, "one")
    reader = Reader()
    reader.hold.clear()
    with running(client, reader) as process:
        wait_until(lambda: len(reader.turns) == 2)
        process.stop.set()
        wait_until(lambda: not process.runtime._workers[0].queue._ready)
        assert not reader.closed
        reader.hold.set()
    assert len(reader.seen) == 2
    assert reader.closed


def test_stop_has_one_limit_for_all_parts(
    server: LabServer, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    put(client, "a", "one")
    readers = [Reader(f"reader-{number}") for number in range(4)]
    for reader in readers:
        reader.hold.clear()
    process = Process(client, *readers, stand=standing(client, "us"), stop_limit_s=1.0)
    process.start()
    wait_until(lambda: all(reader.turns for reader in readers))
    server.inject_fault(DelayFault(4.0), FaultMatch(resource="leases"))
    began = CLOCK.monotonic()
    process.end()
    assert CLOCK.monotonic() - began < 3.0
    assert "controller reader-3: a sync did not end in time; stopping without it" in caplog.text
    server.lift_fault()
    for reader in readers:
        reader.hold.set()
    wait_until(lambda: not process.runtime._election_thread.is_alive())


def test_one_of_two_processes_leads_and_hands_over_at_exit(client: Client) -> None:
    put(client, "a", "one")
    first, second = Reader(), Reader()
    with running(client, first, stand=standing(client, "first")) as leader:
        wait_until(lambda: first.seen)
        with running(client, second, stand=standing(client, "second")) as standby:
            wait_until(lambda: not standby.runtime.unready_reason)
            assert "leader 0" in standby.metrics.render_text()
            change(client, "a", {"data": {"word": "two"}})
            wait_until(lambda: first.seen[1:] == [("default/a", "two")])
            assert second.seen == []
            leader.end()
            wait_until(lambda: second.seen == [("default/a", "two")])
            assert "leader 1" in standby.metrics.render_text()
    assert (leader.ended, standby.ended) == ([True], [True])


def test_runtime_with_lost_lease_ends(client: Client) -> None:
    put(client, "a", "one")
    reader = Reader()
    process = Process(client, reader, stand=standing(client, "us"))
    process.start()
    wait_until(lambda: reader.seen)
    client.patch(LEASES, "c", {"spec": {"holderIdentity": "them"}}, namespace="kube-system")
    wait_until(lambda: process.ended)
    process.end()

    assert process.ended == [False]
    assert reader.closed


@pytest.mark.parametrize("is_changed", [False, True])
def test_object_created_too_late_is_withdrawn_unless_another_client_changed_it(
    client: Client, *, is_changed: bool
) -> None:
    leads = [True]
    late = LateWrites(client, lambda: leads[0])
    body: Json = {"metadata": {"name": "a"}, "data": {"word": "one"}}
    created = client.create(CONFIGMAPS, body, namespace="default")
    late.check_created(CONFIGMAPS, created)
    assert client.get(CONFIGMAPS, "a", namespace="default")

    leads[0] = False
    if is_changed:
        change(client, "a", {"data": {"word": "two"}})
    with pytest.raises(NotLeaderError, match="ConfigMap a was created too late"):
        late.check_created(CONFIGMAPS, created)
    with nullcontext() if is_changed else pytest.raises(NotFoundError):
        client.get(CONFIGMAPS, "a", namespace="default")


def test_leader_without_renewal_starts_no_sync(server: LabServer, client: Client) -> None:
    put(client, "a", "one")
    reader = Reader()
    process = Process(client, reader, stand=standing(client, "us"))
    process.start()
    wait_until(lambda: reader.seen)
    server.inject_fault(RejectFault(503, retry_after_s=0), FaultMatch(resource="leases"))
    wait_until(lambda: process.ended)
    process.end()
    change(client, "a", {"data": {"word": "two"}})

    assert reader.seen == [("default/a", "one")]
    assert process.ended == [False]


def test_new_leader_lists_every_kind_before_its_first_sync(
    server: LabServer, client: Client
) -> None:
    put(client, "a", "one")
    first, second = Reader(), Reader()
    with running(client, first, stand=standing(client, "first")) as leader:
        wait_until(lambda: first.seen)
        with running(client, second, stand=standing(client, "second")) as standby:
            wait_until(lambda: not standby.runtime.unready_reason)
            before = server.count_requests(verb="list", resource="configmaps")
            server.inject_fault(
                RejectFault(503, retry_after_s=0), FaultMatch(verb="list", resource="configmaps")
            )
            leader.end()
            wait_until(lambda: standby.runtime.is_leader)
            wait_until(
                lambda: server.count_requests(verb="list", resource="configmaps") > before + 1
            )
            assert second.seen == []
            server.lift_fault()
            wait_until(lambda: second.seen == [("default/a", "one")])


def test_kind_is_listed_again_once_for_a_time(server: LabServer, client: Client) -> None:
    informers = InformerSet(client, CLOCK)
    view = informers.add_view(PLACE, word)
    informers.start()
    try:
        assert informers.wait_until_synced(10)
        before = server.count_requests(verb="list", resource="configmaps")
        informers.request_lists(float("inf"))
        wait_until(lambda: server.count_requests(verb="list", resource="configmaps") == before + 1)
        informers.request_lists(float("inf"))
        put(client, "b", "two")
        wait_until(lambda: view.find("default/b"))
        assert server.count_requests(verb="list", resource="configmaps") == before + 1
    finally:
        informers.stop()


def test_disconnected_watch_makes_the_process_unready(server: LabServer, client: Client) -> None:
    put(client, "a", "one")
    reader = Reader()
    with running(client, reader) as process:
        wait_until(lambda: reader.seen)
        wait_until(lambda: not process.runtime.unready_reason)
        server.inject_fault(RejectFault(503, retry_after_s=0), FaultMatch(verb="watch"))
        server.cut_watches("configmaps")
        wait_until(lambda: "watch of configmaps is disconnected" in process.runtime.unready_reason)
        assert 'watch_silence_seconds{resource="configmaps"}' in process.metrics.render_text()


def test_optional_kind_that_is_installed_later_can_be_stale(
    server: LabServer, client: Client
) -> None:
    informers = InformerSet(client, CLOCK)
    scope = WatchScope(ROLLOUTPOLICIES)
    view = informers.add_view(scope, lambda found: found, optional=True)
    informers.start()
    try:
        wait_until(lambda: not informers.unsynced_reason)
        assert informers.describe_staleness() == ""
        install_kinds(client)
        policy = {"apiVersion": scope.resource.api_version, "kind": scope.resource.kind}
        client.create(ROLLOUTPOLICIES, {**policy, "metadata": {"name": "careful"}, "spec": {}})
        wait_until(lambda: "careful" in view.get_all())
        server.inject_fault(RejectFault(503), FaultMatch(resource="rolloutpolicies"))
        server.cut_watches("rolloutpolicies")
        wait_until(lambda: "watch of rolloutpolicies is di" in informers.describe_staleness())
    finally:
        informers.stop()
