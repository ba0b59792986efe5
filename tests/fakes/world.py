"""A node, its cluster and its fate: small, honest, and able to lose power at any step.

What survives what is as on a real machine: the ledger and the booted deployment survive all; a
staged deployment survives the agent's death, but not a power cut; a clean reboot finalizes it if
it is unlocked and drops it if it is locked; the agent's memory survives nothing.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from treenail.api import annotations as key
from treenail.api.machineconfig import MachineConfig
from treenail.api.node import Node
from treenail.errors import CancelledError, NotFound, TransactionError, Unreachable
from treenail.host.deployments import Change, Deployment, Deployments, Progress, Verdict
from treenail.update.record import Target
from treenail.update.status import Event, Report

Json = dict[str, object]


class Killed(BaseException):
    """The agent's process was killed."""


class PowerCut(BaseException):
    """The machine lost its power."""


class WentDown(BaseException):
    """The machine was rebooted, and the agent with it."""


def _live_on(_step: str) -> None:
    """The fate of most."""


@dataclass
class World:
    """Everything outside the agent's process. ``fate`` is asked before and after each effect."""

    booted: str
    fate: Callable[[str], None] = _live_on
    meanwhile: Callable[[], None] = lambda: None
    """What happens in the world while the agent waits for a long call."""
    boots: int = 1
    staged: str = ""
    locked: bool = False
    going_down: bool = False
    ledger: str | None = None
    api_up: bool = True
    loses_answers: int = 0
    annotations: dict[str, str] = field(default_factory=dict)
    unschedulable: bool = False
    writes: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    configs: dict[str, MachineConfig] = field(default_factory=dict)

    def ask_for(self, target: Target, spelling: str = key.DESIRED_OS_IMAGE) -> None:
        self.annotations[key.DESIRED_CONFIG] = target.config
        self.annotations[spelling] = target.image

    @property
    def in_service(self) -> bool:
        applied = self.annotations.get(key.LAST_APPLIED_DRAIN, "")
        return not (self.unschedulable and applied.startswith("drain-"))

    def reboot(self) -> None:
        """A clean reboot, whoever asked for it."""
        if self.staged and not self.locked:
            if self.in_service:
                self.violations.append("the OS changed while the node was in service")
            self.booted = self.staged
        self._up_again()

    def power_cut(self) -> None:
        self._up_again()

    def _up_again(self) -> None:
        self.boots += 1
        self.staged, self.locked, self.going_down = "", False, False

    def drain_controller(self) -> None:
        """One step of the drain controller."""
        asked = self.annotations.get(key.DESIRED_DRAIN, "")
        if self.api_up and asked and asked != self.annotations.get(key.LAST_APPLIED_DRAIN):
            self.unschedulable = asked.startswith("drain-")
            self.annotations[key.LAST_APPLIED_DRAIN] = asked


class FakeMachine:
    """Operating system, power and kernel of a `World`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def boot_id(self) -> str:
        return f"boot-{self._world.boots}"

    def fips_enabled(self) -> bool:
        return False

    def look(self) -> Deployments:
        world = self._world
        found = [_deployment(world.booted, booted=True)]
        if world.staged:
            found.append(_deployment(world.staged, staged=True, locked=world.locked))
        return Deployments(tuple(found), None)

    @property
    def name(self) -> str:
        return "rpm-ostree"

    def stage(self, change: Change, *, watch: Callable[[Progress], Verdict]) -> None:
        world, digest = self._world, change.image.partition("@")[2]
        if world.staged == digest:
            return
        world.fate("stage begins")
        for percent in (0, 50, 100):
            world.meanwhile()
            match watch(Progress("fetching", percent)):
                case Verdict.CANCEL:
                    raise CancelledError("cancelled")
                case Verdict.LEAVE:
                    return
                case Verdict.GO_ON:
                    pass
            world.fate("staging")
        world.staged, world.locked = digest, True
        world.fate("staged")

    def wait_for_other(self, *, watch: Callable[[Progress], Verdict]) -> None:
        watch(Progress("waiting", None))

    def drop(self, staged_id: str) -> None:
        self._world.fate("drop")
        if _id(self._world.staged) == staged_id:
            self._world.staged, self._world.locked = "", False
        self._world.fate("dropped")

    def finalize(self, staged_id: str) -> None:
        world = self._world
        if _id(world.staged) != staged_id:
            raise TransactionError("No pending staged deployment found")
        world.fate("unlock")
        world.locked = False
        if world.in_service:
            world.violations.append("unlocked while the node was in service")
        world.fate("unlocked")
        world.going_down = True

    def roll_back(self) -> None:
        pass

    def release(self) -> None:
        pass

    def reboot(self) -> None:
        self._world.fate("reboot")
        self._world.going_down = True
        raise WentDown

    def shutting_down(self) -> bool:
        return self._world.going_down


class FakeLedger:
    """A document that is replaced whole or not at all."""

    def __init__(self, world: World) -> None:
        self._world = world

    def read(self) -> Json | None:
        if self._world.ledger is None:
            return None
        document: Json = json.loads(self._world.ledger)
        return document

    def write(self, document: Json) -> None:
        text = json.dumps(document)
        self._world.fate("ledger write")
        self._world.ledger = text
        self._world.fate("ledger written")


class FakeCluster:
    """The Node as one process sees it: a cache that only sight and own writes renew."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cached: Node | None = None

    def node(self) -> Node | None:
        return self._cached

    def see(self) -> None:
        """What the watch does: it never fails, it only sees nothing new."""
        if self._world.api_up:
            self._cached = Node(
                name="node-1",
                annotations=dict(self._world.annotations),
                unschedulable=self._world.unschedulable,
            )

    def refresh(self) -> None:
        if not self._world.api_up:
            raise Unreachable("the API server does not answer")
        self.see()

    def machine_config(self, name: str) -> MachineConfig:
        if not self._world.api_up:
            raise Unreachable("the API server does not answer")
        if name not in self._world.configs:
            raise NotFound(f"MachineConfig {name} does not exist")
        return self._world.configs[name]

    def report(self, report: Report) -> None:
        world = self._world
        known = self._cached.annotations if self._cached else {}
        changes = {k: v for k, v in report.annotations.items() if known.get(k) != v}
        if not changes:
            return
        if not world.api_up:
            raise Unreachable("the API server does not answer")
        world.fate("patch")
        for name, value in changes.items():
            if value is None:
                world.annotations.pop(name, None)
            else:
                world.annotations[name] = value
        world.writes.append("patch node: " + " ".join(sorted(changes)))
        world.fate("patched")
        if world.loses_answers:
            world.loses_answers -= 1
            raise Unreachable("the connection was lost before the answer")
        self.see()

    def tell(self, event: Event) -> None:
        self._world.events.append(event)


class FakeCredentials:
    """Pull secrets that are in place."""

    def refresh(self) -> tuple[str, ...]:
        return ()


class FakeNotifier:
    """A systemd that listens to nobody."""

    interval_s: float | None = None

    def status(self, text: str) -> None:
        pass

    def watchdog(self) -> None:
        pass


def _deployment(
    digest: str, *, booted: bool = False, staged: bool = False, locked: bool = False
) -> Deployment:
    return Deployment(
        id=_id(digest),
        checksum=digest[7:],
        version="1",
        image=f"registry.example.com/os/node@{digest}",
        digest=digest,
        booted=booted,
        staged=staged,
        locked=locked,
        pinned=False,
    )


def _id(digest: str) -> str:
    return f"os-{digest[7:13]}" if digest else ""
