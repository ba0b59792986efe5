"""A lab of one node with a drain controller and a witness, for the tests of this folder."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.drains import Drains
from tests.integration.witness import Sight, Witness, Write
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.clocks import SystemClock
from treenail.kube.resources import MACHINECONFIGNODES, NODES
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.serving.faults import FaultMatch, RejectFault
from treenail_lab.apiserver.serving.server import ApiServer
from treenail_lab.cluster import Lab, LabPlan, build_rendered_config
from treenail_lab.images import Credential, Image, make_image
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine.node.machine import KUBELET_CONFIG, LabMachine
from treenail_lab.machine.settings import MachineSettings
from treenail_lab.machine.systemd.journal import JournalEntry

NODE = "n1"
USER = f"system:node:{NODE}"
DRAINER = "drain-controller"
PASSWORD = "canary-7f3a90c1"
LOGIN = Credential("puller", PASSWORD)
LIMIT_S = 30.0

FAST = 1e9
SLOW = 2e6
"""Bytes a second; at this speed a test can interfere with the pull of an image of `SIZE`."""
SIZE = 20_000_000
LAYERS = 100

QUICK = "[limits]\nretry_first_s = 0.1\nretry_max_s = 0.5\n"
# These tests delay reboots by inhibitors, which the pre-flight would refuse otherwise.
SETTINGS = (
    f"{QUICK}[health]\ndeadline_s = 10\nsettle_s = 0.1\ninterval_s = 0.1\n"
    "failing_s = 0.2\nready_s = 0.2\noutage_s = 0.2\n"
    '[preflight]\nonly_warn = ["ShutdownInhibited"]\n'
)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a site."""

    agent: tuple[str, ...] = ()
    agent_settings: str = SETTINGS
    backend: str = ""
    """The installed back end; with ``bootc`` it is the only one."""
    machine_config_nodes: bool = True
    behaviour: MachineSettings = field(
        default_factory=lambda: MachineSettings(pull_bytes_per_s=FAST, staging_s=0.02)
    )


@dataclass(frozen=True, slots=True)
class Goal:
    """A rendered config and an image."""

    config: str
    image: Image

    @property
    def pull_spec(self) -> str:
        """Return that of the manifest list, if the image is in one."""
        return self.image.list_pull_spec if self.image.list_digest else self.image.pull_spec


class Site:
    """One node at rest at a target, and the means to interfere with it."""

    def __init__(self, options: Options) -> None:
        self.directory = owner.make_directory()
        self._goals = 0
        self._is_server_stopped = False
        first = make_image("os/node", "1", SIZE, layers=LAYERS, credential=LOGIN)
        plan = LabPlan(
            (NODE,),
            (first,),
            machine_settings=options.behaviour,
            agent_settings=_backend(options.backend) + options.agent_settings,
            has_machine_config_nodes=options.machine_config_nodes,
        )
        self.lab = Lab(self.directory, plan, agent=options.agent)
        self.lab.start()
        self.server = self.lab.server
        self.machine: LabMachine = self.lab.machines[NODE]
        self.backend = options.backend
        if self.backend == "bootc":
            (self.machine.root / "usr/lib/systemd/system/rpm-ostreed.service").unlink()
        self.pull_secret = self.machine.root / KUBELET_CONFIG
        self._pull_secret = self.pull_secret.read_text()
        self.witness = Witness(NODE, self.machine)
        self.server.call_api(self.witness.attend)
        drainer = self.server.write_kubeconfig(DRAINER, ["system:masters"])
        self.drains = Drains(self.lab.open_client(drainer), SystemClock())
        self.drains.start()
        self.current = self.goal(image=first)
        self.ask(self.current)
        self.settle()
        self.begin()

    def stop(self) -> None:
        self.drains.stop()
        self.lab.stop()
        owner.remove_directory(self.directory)

    def begin(self) -> None:
        """Begin the records of a test."""
        self._sights, self._writes = len(self.witness.sights), len(self.witness.writes)
        self._entries = len(self.machine.read_journal())
        self._events = len(self._all_events())
        self._daemon_log = len(self._daemons())
        self.boots = self.machine.boot_count

    # Requests

    def goal(
        self, *, image: Image | None = None, size_bytes: int = SIZE, published: bool = True
    ) -> Goal:
        """Create another config and another image, of which no machine has a layer."""
        self._goals += 1
        name = str(self._goals)
        image = image or make_image("os/node", name, size_bytes, layers=LAYERS, credential=LOGIN)
        if published:
            self.lab.add_image(image)
        return Goal(self.lab.add_config(build_rendered_config(f"rendered-worker-{name}")), image)

    def ask(self, goal: Goal, *, spelling: str = key.DESIRED_OS_IMAGE) -> None:
        """Request the target, with one spelling of the image annotation."""
        self.annotate({key.DESIRED_CONFIG: goal.config, spelling: goal.pull_spec})

    def annotate(self, notes: dict[str, str]) -> None:
        """Set annotations; the image is requested in the given spellings only."""
        cleared: dict[str, str | None] = dict.fromkeys(key.IMAGE_SPELLINGS)
        self.lab.client.patch(NODES, NODE, {"metadata": {"annotations": {**cleared, **notes}}})

    def settle(self, goal: Goal | None = None, *, limit_s: float = LIMIT_S) -> None:
        """Wait until the node is at the target, in service, and reports both."""
        goal = goal or self.current
        self.current = goal
        wait_until(lambda: self.is_at(goal), limit_s=limit_s)

    def reach(self, goal: Goal) -> None:
        """Request the target and wait until the node is there."""
        self.ask(goal)
        self.settle(goal)

    def is_at(self, goal: Goal) -> bool:
        notes = self.notes()
        return (
            notes.get(key.STATE) == "Done"
            and notes.get(key.CURRENT_CONFIG) == goal.config
            and goal.pull_spec in [notes.get(each) for each in key.IMAGE_SPELLINGS.values()]
            and self.booted() == goal.image.digest
            and self.calm()
            and self.witness.has_report()
        )

    def calm(self) -> bool:
        """Return whether the node is in service, without an update and a staged deployment."""
        notes = self.notes()
        return (
            self.machine.agent.is_ready
            and not self.cordoned()
            and notes.get(key.DESIRED_DRAIN) == notes.get(key.LAST_APPLIED_DRAIN)
            and self.machine.staged_deployment is None
            and self.phase() == ""
        )

    def wait_note(self, name: str, value: str) -> None:
        """Wait until the Node has this annotation."""
        wait_until(lambda: self.notes().get(name) == value, limit_s=LIMIT_S)

    def wait_degraded(self, *words: str, limit_s: float = LIMIT_S) -> str:
        """Wait until the Node is Degraded with a reason that has these words; return the reason."""

        def reason() -> str:
            notes = self.notes()
            text = notes.get(key.REASON, "")
            found = notes.get(key.STATE) == "Degraded" and all(word in text for word in words)
            return text if found else ""

        try:
            return wait_until(reason, limit_s=limit_s)
        except AssertionError as error:
            error.add_note(f"the last reason: {self.notes().get(key.REASON)!r}")
            raise

    # Observations

    def notes(self) -> dict[str, str]:
        """Return the Node's annotations, also while the server is stopped."""
        return dict(self._node()["metadata"].get("annotations") or {})

    def assert_unchanged(self) -> None:
        """Check that there was no reboot, and that nothing is left behind."""
        assert self.machine.boot_count == self.boots
        assert self.machine.staged_deployment is None
        assert not self.cordoned()

    def cordoned(self) -> bool:
        return bool(self._node()["spec"].get("unschedulable"))

    def booted(self) -> str:
        """Return the manifest digest of the booted deployment."""
        booted = self.machine.booted_deployment
        return booted.digest if booted else ""

    def phase(self) -> str:
        """Return the phase of the update in the ledger; empty without one."""
        return self.witness.phase()

    def wait_phase(self, phase: str, *, limit_s: float = LIMIT_S) -> None:
        wait_until(lambda: self.phase() == phase, limit_s=limit_s)

    def wait_progress(self) -> int:
        """Wait until an image is being pulled; return the percentage."""

        def percent() -> object:
            progress = self.lab.read_live_status(NODE).get("progress")
            return progress.get("percent") if isinstance(progress, dict) else None

        return int(str(wait_until(percent, limit_s=LIMIT_S)))

    def sights(self) -> list[Sight]:
        """Return the states of the Node in this test, and the one before it."""
        return self.witness.sights[self._sights - 1 :]

    def was(self, state: str) -> bool:
        """Return whether the Node had this state in this test."""
        return any(sight.notes.get(key.STATE) == state for sight in self.sights()[1:])

    def was_cordoned(self) -> bool:
        return any(sight.cordoned for sight in self.sights())

    def writes(self) -> list[Write]:
        """Return the agent's writes in this test."""
        return self.witness.writes[self._writes :]

    def journal(self, **match: str) -> list[JournalEntry]:
        """Return the agent's journal entries of this test."""
        wanted = {"SYSLOG_IDENTIFIER": "treenail", **match}.items()
        entries = self.machine.read_journal()[self._entries :]
        return [entry for entry in entries if all(entry.get(k) == v for k, v in wanted)]

    def messages(self, **match: str) -> list[str]:
        return [str(entry["MESSAGE"]) for entry in self.journal(**match)]

    def transactions(self, what: str = "") -> list[str]:
        """Return the log line of each rpm-ostree transaction that ended in this test."""
        lines = self._daemons()[self._daemon_log :].splitlines()
        return [line.partition("txn ")[2] for line in lines if "txn " in line and what in line]

    def events(self) -> list[tuple[str, str, str]]:
        """Return type, reason and message of every Event of this test."""
        return [
            (each["type"], each["reason"], each["message"])
            for each in self._all_events()[self._events :]
        ]

    def conditions(self) -> dict[str, str]:
        """Return the status of each condition of the MachineConfigNode."""
        found = self.lab.client.get(MACHINECONFIGNODES, NODE)["status"]
        assert isinstance(found, dict)
        return {each["type"]: each["status"] for each in found["conditions"]}

    # Interference

    @contextmanager
    def slow_pull(self, bytes_per_s: float = SLOW) -> Iterator[None]:
        """Make pulls slow while inside."""
        self.machine.change_settings(pull_bytes_per_s=bytes_per_s)
        try:
            yield
        finally:
            self.machine.change_settings(pull_bytes_per_s=FAST)

    @contextmanager
    def drains_held(self) -> Iterator[None]:
        """Stop the drain controller's writes to Nodes while inside."""
        match = FaultMatch(verb="patch", resource="nodes", user=DRAINER)
        number = self.server.inject_fault(RejectFault(503, retry_after_s=0), match)
        try:
            yield
        finally:
            self.server.lift_fault(number)

    @contextmanager
    def at_each_change(self, strike: Callable[[ApiServer], object]) -> Iterator[None]:
        """Call ``strike`` on the API server after each change of the Node, while inside."""
        self.witness.then = lambda: strike(self.server.api)
        try:
            yield
        finally:
            self.witness.then = None

    def stop_server(self) -> None:
        """Stop the API server until `start_server`, or until the end of the test."""
        self.server.stop()
        self._is_server_stopped = True

    def start_server(self) -> None:
        self.server.start()
        self._is_server_stopped = False

    # Recovery

    def recover(self) -> None:
        """End every interference."""
        self.witness.then = None
        if self._is_server_stopped:
            self.start_server()
        self.server.lift_fault()
        self.machine.change_settings(pull_bytes_per_s=FAST)
        self.pull_secret.write_text(self._pull_secret)

    def story(self) -> str:
        """Return the records of this test, for the output of a failed test."""
        lines = [
            f"{entry['__REALTIME_TIMESTAMP']} {entry.get('SYSLOG_IDENTIFIER')} "
            f"{entry.get('TREENAIL_PHASE', '')} {entry['MESSAGE']}"
            for entry in self.machine.read_journal()[self._entries :]
        ]
        log = self.machine.agent_log.read_text() if self.machine.agent_log.exists() else ""
        return "\n".join(
            (
                *lines,
                "sights:",
                *map(str, self.sights()),
                "agent.log:",
                log[-4000:],
                "live:",
                json.dumps(self.lab.read_live_status(NODE), indent=1),
            )
        )

    def _node(self) -> Json:
        found = self.server.call_api(lambda api: api.store.find_object(("", "nodes"), ("", NODE)))
        assert found is not None
        return found

    def _all_events(self) -> list[dict[str, str]]:
        return self.server.call_api(lambda api: list(api.store.list_objects(("", "events"))))

    def _daemons(self) -> str:
        path = self.directory / NODE / "daemons.log"
        return path.read_text() if path.exists() else ""


def _backend(name: str) -> str:
    return f'backend = "{name}"\n' if name else ""
