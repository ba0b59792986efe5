"""A model of a node and its cluster that can lose power at any step.

What survives what is as on a real machine: the ledger and the booted deployment survive all; what
was flushed survives a power cut, what was written survives the agent's death; a staged deployment
survives the agent's death, but not a power cut; a clean reboot finalizes it if it is unlocked and
drops it if it is locked, but for a soft one, which keeps all of /run and the kernel, and leads into
what was prepared; the agent's memory survives nothing. A deployment that is finalized takes
along, of /etc, what differs from the /usr/etc of the deployment before it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.daemon.machines import BASE, TOP
from tests.fakes.clock import FakeClock
from tests.fakes.disk import MemoryDisk, Tree
from treenail.api import annotations as key
from treenail.api.disruptionpolicy import DEFAULT_POLICY, ClusterDisruptionPolicy
from treenail.api.machineconfig import MachineConfig
from treenail.api.node import Node
from treenail.deployment_change import DeploymentChange, apply_edit
from treenail.errors import (
    BusError,
    CancelledError,
    ConfigMissingError,
    FileError,
    HostError,
    LedgerError,
    PreflightError,
    TransactionError,
    UnreachableError,
)
from treenail.host.ostree.deployments import (
    DeploymentStatus,
    OstreeDeployment,
    TransactionProgress,
    TransactionVerdict,
)
from treenail.update.checks.health import (
    API_SERVER,
    BootTrialStatus,
    CheckHistory,
    HealthCheckResult,
    OriginCheck,
    judge_origin_check,
)
from treenail.update.decision.user_requests import UserRequest
from treenail.update.state.boot_trial import BootTrial, TrialLimits
from treenail.update.state.ledger_record import TRANSITIONS, Phase, Target
from treenail.update.status import NodeEvent, StatusReport

Json = dict[str, object]
PLATFORM = ("root=LABEL=root", "rw", "b=1", "b=2", "n=1")
"""The kernel arguments of the machine; configs of walks have some of them too."""
_ETC = f"{TOP}/etc/"


class Killed(BaseException):
    """The agent's process was killed."""


class PowerCut(BaseException):
    """The machine lost its power."""


class WentDown(BaseException):
    """The machine was rebooted, and the agent with it."""


def _live_on(_step: str) -> None:
    """The fault_point of most."""


@dataclass(frozen=True, slots=True)
class System:
    """The parts of a deployment; ``serial`` distinguishes two of the same image."""

    digest: str
    arguments: tuple[str, ...] = PLATFORM
    serial: int = 0

    @property
    def id(self) -> str:
        return f"os-{self.digest[7:13]}.{self.serial}"


@dataclass
class Unit:
    """A transient unit of systemd; ``result`` is empty while it runs."""

    what: str
    argv: tuple[str, ...]
    left: int
    result: str = ""


@dataclass
class World:
    """Everything outside the agent's process. Effects call ``fault_point`` before and after."""

    booted: str
    fault_point: Callable[[str], None] = _live_on
    on_wait: Callable[[], None] = lambda: None
    """Called while the agent waits for a long call."""
    boots: int = 1
    system: System = field(init=False)
    staging: System | None = None
    serials: int = 0
    locked: bool = False
    first_arguments: tuple[str, ...] = ()
    """The kernel arguments of the first boot; empty if it was not treenail's."""
    has_same_kernel: bool = True
    """The staged deployment has the running kernel and its arguments."""
    starts_wrong_root: bool = False
    """Soft reboots start the booted deployment again."""
    pins: set[str] = field(default_factory=set)
    """The pinned deployments."""
    pending: System | None = None
    """The deployment that boots next, though a soft reboot started another one."""
    pending_etc: Tree = field(default_factory=dict)
    is_sysroot_locked: bool = False
    """Another program has locked the sysroot, outside any transaction."""
    prepared: str = ""
    """The id of the deployment that a soft reboot leads into."""
    soft: bool = False
    """The reboot that is under way keeps the kernel."""
    soft_boots: int = 0
    """How often user space was started since the kernel was."""
    finalizes: bool = True
    """The boot loader's entry can be written."""
    fips: bool = False
    """The mode that the kernel was installed for."""
    is_going_down: bool = False
    ledger: str | None = None
    crash_record: str | None = None
    """Survives what the ledger survives."""
    api_up: bool = True
    loses_answers: int = 0
    annotations: dict[str, str] = field(default_factory=dict)
    unschedulable: bool = False
    writes: list[str] = field(default_factory=list)
    events: list[NodeEvent] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    transitions: set[tuple[Phase | None, Phase | None]] = field(default_factory=set)
    """The transitions of phases that were written to the ledger."""
    configs: dict[str, MachineConfig] = field(default_factory=dict)
    request: UserRequest | None = None
    """The request of a user on the machine."""
    is_unhealthy: Callable[["World"], bool] = lambda _: False
    """Returns whether a health check fails in this world."""
    is_ledger_full: Callable[["World"], bool] = lambda _: False
    """Returns whether the ledger cannot be written."""
    crashes: Callable[["World"], bool] = lambda _: False
    """Returns whether the agent crashes after each start."""
    unbootable: frozenset[str] = frozenset()
    """The images whose kernel never boots."""
    others: tuple[System, ...] = ()
    """Further deployments, which bootc lists after the previous one."""
    previous: System | None = None
    """The previously booted deployment, if it still exists."""
    kept_etc: Tree = field(default_factory=dict)
    """The /etc of the previous deployment."""
    tried_again: bool = False
    """The one beside the booted one did not boot, and is still the default."""
    rolled_back: bool = False
    """The previous deployment is the default."""
    units: dict[str, Unit] = field(default_factory=dict)
    """Those of bootc, which end with the boot."""
    unit_steps: int = 4
    """How many questions to systemd such a unit outlives."""
    staged_instead: str = ""
    """The image that the next switch of bootc stages instead of the requested one."""
    stored: set[str] = field(default_factory=set)
    """The images in podman's storage."""
    finding: str = ""
    """The finding of a pre-flight check."""
    image_finding: str = ""
    """The finding of the check of a staged image."""
    returns: int = 0
    policy: ClusterDisruptionPolicy = field(
        default_factory=lambda: ClusterDisruptionPolicy(DEFAULT_POLICY)
    )
    vendor: dict[str, Tree] = field(default_factory=dict)
    """The content of /usr/etc of each image, by digest and path."""
    disk: MemoryDisk = field(default_factory=lambda: MemoryDisk(BASE))
    keeps_records_on_disk: bool = False
    """The ledger and the crash record are files of the disk, which may fail."""

    def __post_init__(self) -> None:
        self.disk.chunk = 1 << 20
        self.system = System(self.booted)

    @property
    def staged(self) -> str:
        """The digest of what is staged; empty when nothing is."""
        return self.staging.digest if self.staging else ""

    def request_target(self, target: Target, spelling: str = key.DESIRED_OS_IMAGE) -> None:
        self.annotations[key.DESIRED_CONFIG] = target.config
        if target.image:
            self.annotations[spelling] = target.image
        else:
            self.annotations.pop(spelling, None)

    def file(self, path: str) -> bytes | None:
        """The content of the file; None without one."""
        return self.disk.content(TOP + path)

    @property
    def in_service(self) -> bool:
        applied = self.annotations.get(key.LAST_APPLIED_DRAIN, "")
        return not (self.unschedulable and applied.startswith("drain-"))

    @property
    def may_be_uncordoned(self) -> bool:
        """True when something is staged or pulled that no reboot would start."""
        running = any(not each.result for each in self.units.values())
        return not running and (self.locked or (bool(self.units) and self.staging is None))

    def reboot(self) -> None:
        """Reboot cleanly."""
        if self.soft:
            self._reboot_softly()
            return
        self.disk.replace_by(self.disk.tree())
        self._boot_pending()
        if self.staging is not None and not self.locked and self.finalizes:
            if self.in_service:
                self.violations.append("the OS changed while the node was in service")
            self._finalize(self.staging)
        elif self.rolled_back and self.previous is not None:
            self._boot_previous(self.previous)
        self._finish_reboot()

    def _reboot_softly(self) -> None:
        before, etc, staged = self.system, self._etc(), self.staging
        if staged is not None and not self.locked and self.finalizes:
            self._finalize(staged)
            self.staging = None
            if self.prepared != staged.id or self.starts_wrong_root:
                # It is written, and what boots next, but not what is started.
                self.pending, self.pending_etc = staged, self._etc()
                self.system, self.previous, self.kept_etc = before, None, {}
                self._replace_etc(etc)
        if self.in_service and self.system != before:
            self.violations.append("the OS changed while the node was in service")
        self.soft_boots += 1
        self.units.clear()
        self.booted = self.system.digest
        self.is_going_down, self.soft, self.prepared = False, False, ""

    def _boot_pending(self) -> None:
        if self.pending is None:
            return
        if self.in_service:
            self.violations.append("the OS changed while the node was in service")
        self.previous, self.kept_etc = self.system, self._etc()
        self.system, self.pending = self.pending, None
        self._replace_etc(self.pending_etc)

    def power_cut(self) -> None:
        self.disk.replace_by(next(self.disk.after_power_cut(1)))
        self._boot_pending()
        if self.rolled_back and self.previous is not None:
            self._boot_previous(self.previous)
        self._finish_reboot()

    def _finalize(self, staged: System) -> None:
        if staged.digest in self.unbootable:
            # The boot loader gives it up, and starts what was booted; that stays deployed too.
            self.previous, self.tried_again = staged, True
            return
        self.previous, self.tried_again, self.pending = self.system, False, None
        self.kept_etc = self._etc()
        self._merge(staged.digest)
        self.system = staged

    def _boot_previous(self, previous: System) -> None:
        etc, self.kept_etc = self.kept_etc, self._etc()
        self._replace_etc(etc)
        self.previous, self.system = self.system, previous
        self.returns += 1

    def _replace_etc(self, etc: Tree) -> None:
        others = {path: each for path, each in self.disk.tree().items() if _ETC not in path}
        self.disk.replace_by(others | etc)

    def _etc(self) -> Tree:
        return {path: each for path, each in self.disk.tree().items() if _ETC in path}

    def _merge(self, digest: str) -> None:
        """Merge /etc: local changes stay, all else comes from the new deployment."""
        old, new = self.vendor.get(self.booted, {}), self.vendor.get(digest, {})
        tree = self.disk.tree()
        etc = {path.removeprefix(_ETC): each for path, each in tree.items() if _ETC in path}
        changed = {path: each for path, each in etc.items() if old.get(path) != each}
        gone = old.keys() - etc.keys()
        merged = {**{p: e for p, e in new.items() if p not in gone}, **changed}
        others = {path: entry for path, entry in tree.items() if _ETC not in path}
        self.disk.replace_by(others | {_ETC + path: each for path, each in merged.items()})

    def _finish_reboot(self) -> None:
        self.boots += 1
        self.booted = self.system.digest
        self.staging, self.locked, self.is_going_down = None, False, False
        self.soft_boots, self.soft, self.prepared = 0, False, ""
        self.request = None
        self.rolled_back = False
        self.units.clear()

    def drain_controller(self) -> None:
        """One step of the drain controller."""
        token = self.annotations.get(key.DESIRED_DRAIN, "")
        if self.api_up and token and token != self.annotations.get(key.LAST_APPLIED_DRAIN):
            self.unschedulable = token.startswith("drain-")
            self.annotations[key.LAST_APPLIED_DRAIN] = token


class FakeMachine:
    """Operating system, power and kernel of a `World`."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def name(self) -> str:
        return "rpm-ostree"

    def roll_back(self) -> None:
        world = self._world
        if world.previous is None:
            raise TransactionError("there is no previous deployment")
        world.fault_point("roll back")
        world.staging, world.rolled_back = None, True
        world.fault_point("rolled back")

    def find_architecture(self) -> str:
        return "amd64"

    def read_finalization_error(self) -> str:
        return "" if self._world.finalizes else "No space left on device"

    def read_boot_id(self) -> str:
        world = self._world
        return f"boot-{world.boots}" + f"+{world.soft_boots}" * bool(world.soft_boots)

    def count_soft_reboots(self) -> int | None:
        return self._world.soft_boots

    def is_fips_enabled(self) -> bool:
        return self._world.fips

    def read_command_line(self) -> tuple[str, ...]:
        return self._world.system.arguments

    def read_first_command_line(self) -> tuple[str, ...]:
        return self._world.first_arguments

    def read_deployments(self) -> DeploymentStatus:
        world = self._world
        if world.is_going_down:
            raise BusError("rpm-ostreed closed the connection")
        found = [_deployment(world.system, booted=True, pinned=world.system.id in world.pins)]
        if world.staging:
            found.append(_deployment(world.staging, staged=True, locked=world.locked))
        if world.previous:
            at = 0 if world.tried_again else len(found)
            found.insert(at, _deployment(world.previous))
        if world.pending:
            found.insert(0, _deployment(world.pending))
        return DeploymentStatus(tuple(found), None)

    def stage_deployment(
        self,
        change: DeploymentChange,
        *,
        watch: Callable[[TransactionProgress], TransactionVerdict],
    ) -> None:
        world = self._world
        digest = change.image.partition("@")[2] or world.system.digest
        requested = System(digest, apply_edit(world.system.arguments, change), world.serials + 1)
        staged = world.staging
        if staged and not world.locked:
            raise HostError(f"cannot stage {change}: {staged.id} is pending, and not locked")
        if staged and (staged.digest, staged.arguments) == (requested.digest, requested.arguments):
            return
        world.fault_point("stage begins")
        for percent in (0, 50, 100):
            world.on_wait()
            match watch(TransactionProgress("fetching", percent)):
                case TransactionVerdict.CANCEL:
                    raise CancelledError("cancelled")
                case TransactionVerdict.DETACH:
                    raise CancelledError("stopped waiting")
                case TransactionVerdict.CONTINUE:
                    pass
            world.fault_point("staging")
        world.serials += 1
        world.staging, world.locked = requested, True
        world.fault_point("staged")

    def wait_for_other_transaction(
        self, *, watch: Callable[[TransactionProgress], TransactionVerdict]
    ) -> bool:
        watch(TransactionProgress("waiting", None))
        return not self._world.is_sysroot_locked

    def drop_staged(self, staged_id: str) -> None:
        world = self._world
        world.fault_point("drop")
        if world.staging is not None and world.staging.id == staged_id:
            world.staging, world.locked = None, False
        if world.previous is not None and world.previous.id == staged_id:
            world.previous, world.tried_again = None, False
        if world.pending is not None and world.pending.id == staged_id:
            world.pending = None
        world.fault_point("dropped")

    def prepare_soft_reboot(self) -> bool:
        world = self._world
        world.fault_point("prepare")
        if world.has_same_kernel and world.staging is not None:
            world.prepared = world.staging.id
        world.fault_point("prepared")
        return bool(world.prepared)

    def clear_soft_reboot(self) -> None:
        self._world.prepared = ""

    def pin_deployment(self, deployment_id: str) -> None:
        self._world.fault_point("pin")
        self._world.pins.add(deployment_id)
        self._world.fault_point("pinned")

    def unpin_deployment(self, deployment_id: str) -> None:
        self._world.fault_point("unpin")
        self._world.pins.discard(deployment_id)
        self._world.fault_point("unpinned")

    def finalize_staged(self, staged_id: str, *, is_soft: bool = False) -> None:
        world = self._world
        if world.staging is None or world.staging.id != staged_id:
            raise TransactionError("No pending staged deployment found")
        world.fault_point("unlock")
        world.locked = False
        if world.in_service:
            world.violations.append("unlocked while the node was in service")
        world.fault_point("unlocked")
        world.is_going_down = not is_soft

    def release_daemon(self) -> None:
        pass

    def reboot_machine(self, *, is_soft: bool = False) -> None:
        self._world.fault_point("reboot")
        self._world.is_going_down, self._world.soft = True, is_soft
        raise WentDown

    def is_shutting_down(self) -> bool:
        return self._world.is_going_down


class FakeLedger:
    """A document that is replaced whole or not at all."""

    def __init__(self, world: World) -> None:
        self._world = world

    def read_document(self) -> Json | None:
        if self._world.ledger is None:
            return None
        try:
            document: Json = json.loads(self._world.ledger)
        except ValueError as error:
            raise LedgerError(f"cannot read the ledger: {error}") from error
        return document

    def write_document(self, document: Json) -> None:
        text = json.dumps(document)
        if self._world.is_ledger_full(self._world):
            raise LedgerError("the ledger: no space left on device")
        self._world.fault_point("ledger write")
        self.store_text(text)
        self._world.fault_point("ledger written")

    def store_text(self, text: str) -> None:
        """Store the document, and check the transition of its phase."""
        self._record_transition(text)
        self._world.ledger = text

    def _record_transition(self, text: str) -> None:
        before, after = read_phase(self._world.ledger), read_phase(text)
        if before is after:
            return
        self._world.transitions.add((before, after))
        if after not in TRANSITIONS[before]:
            self._world.violations.append(f"phase {before} was followed by {after}")


def read_phase(ledger: str | None) -> Phase | None:
    """The phase of the update in a ledger's document; None without an update."""
    update = json.loads(ledger)["update"] if ledger else None
    if not update:
        return None
    # The codec reads the phase of a newer agent as this one.
    return Phase(update["phase"]) if update["phase"] in set(Phase) else Phase.CANCELLING


class FakeCrashRecord:
    """The crash record, replaced whole or not at all."""

    def __init__(self, world: World) -> None:
        self._world = world

    def read_document(self) -> Json | None:
        if self._world.crash_record is None:
            return None
        document: Json = json.loads(self._world.crash_record)
        return document

    def write_document(self, document: Json) -> None:
        if self._world.is_ledger_full(self._world):
            raise FileError("the crash record: no space left on device")
        self._world.fault_point("crash record write")
        self._world.crash_record = json.dumps(document)
        self._world.fault_point("crash record written")

    def remove_document(self) -> None:
        if self._world.crash_record is not None:
            self._world.fault_point("crash record remove")
            self._world.crash_record = None


class FakeCluster:
    """The Node as one process sees it: a cache that only sight and own writes renew."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cached: Node | None = None

    def get_cached_node(self) -> Node | None:
        return self._cached

    def see(self) -> None:
        """Update the cached Node, as the watch would."""
        if self._world.api_up:
            self._cached = Node(
                name="node-1",
                annotations=dict(self._world.annotations),
                is_unschedulable=self._world.unschedulable,
            )

    def refresh_node(self) -> None:
        if not self._world.api_up:
            raise UnreachableError("the API server does not answer")
        self.see()

    def fetch_machine_config(self, name: str) -> MachineConfig:
        if not self._world.api_up:
            raise UnreachableError("the API server does not answer")
        if name not in self._world.configs:
            raise ConfigMissingError(f"cannot read MachineConfig {name}: it does not exist")
        return self._world.configs[name]

    def fetch_disruption_policy(self) -> ClusterDisruptionPolicy:
        if not self._world.api_up:
            raise UnreachableError("the API server does not answer")
        return self._world.policy

    def write_report(self, report: StatusReport) -> None:
        world = self._world
        if self._cached is None:
            # Nothing can differ before the first observation.
            return
        known = self._cached.annotations
        changes = {k: v for k, v in report.annotations.items() if known.get(k) != v}
        if not changes:
            return
        if not world.api_up:
            raise UnreachableError("the API server does not answer")
        world.fault_point("patch")
        for name, value in changes.items():
            if value is None:
                world.annotations.pop(name, None)
            else:
                world.annotations[name] = value
        world.writes.append("patch node: " + " ".join(sorted(changes)))
        world.fault_point("patched")
        if world.loses_answers:
            world.loses_answers -= 1
            raise UnreachableError("the connection was lost before the answer")
        self.see()

    def write_progress(self, percent: int) -> None:
        """The machine of this world stages at once."""

    def record_event(self, event: NodeEvent) -> None:
        self._world.events.append(event)


class FakePullSecrets:
    """Pull secrets that are in place."""

    def install_secrets(self) -> tuple[str, ...]:
        return ()

    def handle_rejected_login(self, image: str) -> bool:
        return False

    def confirm_login(self, image: str) -> None:
        """There is one login."""


class FakeControllerConfigSync:
    """There is no ControllerConfig."""

    def sync_files(self) -> tuple[str, ...]:
        return ()


class FakeTrustStore:
    """There are no anchors."""

    def sync_store(self) -> tuple[str, ...]:
        return ()


class FakeHealth:
    """Checks of a world: one of the machine, and the API server."""

    DEADLINE_S = 60.0
    LIMITS = TrialLimits(DEADLINE_S, 5.0, failing_s=20.0, ready_s=30.0, outage_s=120.0)
    interval_s = 10.0

    def __init__(self, world: World, clock: FakeClock) -> None:
        self._world = world
        self._clock = clock
        self._trial_clock = CheckHistory(self.LIMITS)
        self._origin_clock = CheckHistory(self.LIMITS)
        self._marked: dict[str, str] = {}

    def set_check_problem(self, name: str, problem: str) -> None:
        self._marked[name] = problem

    def run_checks(self, probation: BootTrial, boot_id: str) -> BootTrialStatus:
        return self._trial_clock.observe(self._check(), probation, self._clock.monotonic())

    def take_baseline(self, boot_id: str) -> BootTrial:
        results = self._check()
        return BootTrial(
            failed_before=tuple(each.name for each in results if each.is_passing is False),
            passed_before=tuple(each.name for each in results if each.is_passing),
        )

    def check_origin(self, name: str, boot_id: str) -> OriginCheck:
        results = self._origin_clock.add_ages(self._check(), self._clock.monotonic())
        found = next((each for each in results if each.name == name), None)
        return OriginCheck.UNKNOWN if found is None else judge_origin_check(found, self.LIMITS)

    def _check(self) -> tuple[HealthCheckResult, ...]:
        world = self._world
        unhealthy = world.is_unhealthy(world)
        return (
            *(
                HealthCheckResult(name, not text, text)
                for name, text in self._marked.items()
                if text
            ),
            HealthCheckResult(
                "Kubelet", not unhealthy, "kubelet.service is failed" if unhealthy else ""
            ),
            HealthCheckResult(
                API_SERVER,
                world.api_up,
                "" if world.api_up else "the API server does not answer",
                is_external=not world.api_up,
            ),
        )


class FakePreflight:
    """No findings, unless the world sets one after the staging."""

    def __init__(self, world: World | None = None) -> None:
        self._world = world

    def check_image(self, image: str) -> None:
        pass

    def check_staged_image(self, staged_id: str, image: str) -> None:
        if self._world is not None and self._world.image_finding:
            raise PreflightError(f"cannot start the update: {self._world.image_finding}")

    def check_machine(self, image: str) -> None:
        if self._world is not None and self._world.finding:
            raise PreflightError(f"cannot start the update: {self._world.finding}")


class FakeRequests:
    """The request file; one in /run does not outlive the boot."""

    def __init__(self, world: World) -> None:
        self._world = world

    def read_request(self) -> UserRequest | None:
        return self._world.request

    def remove_request(self) -> None:
        self._world.request = None


class FakeNotifier:
    """A systemd that records requests for more time, and ignores all else."""

    watchdog_interval_s: float | None = None

    def __init__(self) -> None:
        self.extensions: list[float] = []

    def extend_start_timeout(self, seconds: float) -> None:
        self.extensions.append(seconds)

    def notify_status(self, text: str) -> None:
        pass

    def notify_watchdog(self) -> None:
        pass


def _deployment(
    system: System,
    *,
    booted: bool = False,
    staged: bool = False,
    locked: bool = False,
    pinned: bool = False,
) -> OstreeDeployment:
    return OstreeDeployment(
        id=system.id,
        checksum=system.digest[7:],
        version="1",
        image=f"registry.example.com/os/node@{system.digest}",
        digest=system.digest,
        is_booted=booted,
        is_staged=staged,
        is_locked=locked,
        is_pinned=pinned,
    )
