"""Each D-Bus method that an update calls fails, in each of its phases and in each way.

The agent, rpm-ostree, systemd and logind are processes on a private bus; a proxy between the agent
and the bus breaks the calls of one method from one call on, until the Node shows a reason.
"""

import itertools
import json
import signal
import sys
from urllib.parse import quote

import pytest

from tests.fakes import proxied_agent
from tests.fakes.bus_proxy import PEER, BusProxy, FaultKind
from tests.fakes.bus_strikes import BusPoint, BusStrikes
from tests.integration.site import LIMIT_S, NODE, SETTINGS, Goal, Options, Site
from tests.records import write_record
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail_lab.cluster import build_rendered_config
from treenail_lab.machine.ostree.sysroot import SysrootDeployment

pytestmark = pytest.mark.integration

MAX_LIMIT_S = 300.0
"""The longest time limit that a call may have."""
FIRST_S = 1.5
"""The time limit of calls that are not known to stay without an answer."""
MAX_HITS = 60
"""After so many failed calls the Node must show a reason, or the update continue."""
NEW_HITS = 4
"""After more failed calls an equal reason is that of this strike."""
TRIAL_HITS = 3
"""So often a method fails in a boot trial, whose deadline would roll back."""
WALK_UPDATES = 40
APP = "/etc/app.conf"
POLICY = "/etc/crio/policies/app.json"
UNIT = "app.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
RPM_OSTREE = "org.projectatomic.rpmostree1"
LOGIND = "org.freedesktop.login1"
SYSTEMD = "org.freedesktop.systemd1"
WORDS = {
    RPM_OSTREE: ("rpm-ostree", "rpmostree"),
    PEER: ("rpm-ostree", "rpmostree"),
    SYSTEMD: ("systemd",),
    LOGIND: ("login1",),
    "org.freedesktop.timedate1": ("timedate1",),
}
"""A word of the reason names the service."""
TRANSIENT_PHASES = ("applying", "cancelling", "rolling-back")
"""In these phases the agent writes files."""


@pytest.fixture(scope="module")
def options() -> Options:
    return Options(agent=(sys.executable, "-m", proxied_agent.__name__))


class ProxiedBus:
    """The bus of a site with a proxy, while entered."""

    def __init__(self, site: Site) -> None:
        self.strikes = BusStrikes(
            site.phase,
            on_strike=self._shorten_limit,
            read_reason=lambda: site.notes().get(key.REASON, ""),
        )
        self._site = site
        self._folder = site.directory / NODE
        self._proxy = BusProxy(
            self._folder, site.machine.address, self.strikes.choose_fault, on_restart=self._restart
        )

    def begin(self) -> None:
        (self._folder / proxied_agent.CALLS).write_text("")
        (self._folder / proxied_agent.ADDRESS).write_text(self._proxy.address)
        self._restart_agent()

    def end(self) -> None:
        self._proxy.close()
        for name in (proxied_agent.ADDRESS, proxied_agent.LIMITS):
            (self._folder / name).unlink(missing_ok=True)
        self._restart_agent()

    def limit_calls(self, limits: dict[str, float]) -> None:
        scratch = self._folder / "scratch"
        scratch.write_text(json.dumps(limits))
        scratch.replace(self._folder / proxied_agent.LIMITS)

    def find_longest_limit_s(self) -> float:
        lines = (self._folder / proxied_agent.CALLS).read_text().splitlines()
        return max(float(line.split()[0]) for line in lines)

    def _shorten_limit(self, point: BusPoint) -> None:
        if self.strikes.kind in (FaultKind.HANGING, FaultKind.LATE):
            self.limit_calls({"": FIRST_S, str(point.call): 0.2})

    def _restart(self) -> None:
        self._site.machine.restart_service("rpm-ostreed", signal_number=signal.SIGKILL)

    def _restart_agent(self) -> None:
        self._site.machine.stop_agent()
        self._site.machine.start_agent()
        wait_until(lambda: self._site.machine.agent.is_ready, limit_s=LIMIT_S)


NUMBERS = itertools.count(1)


class Walk:
    """Updates of one kind with one fault, until it struck each of their calls."""

    def __init__(self, site: Site, bus: ProxiedBus, kind: str) -> None:
        self._site = site
        self._bus = bus
        self._kind = kind
        self._texts: dict[str, tuple[str, str, str]] = {}
        self.outcomes: dict[BusPoint, str] = {}
        deadline_s = 6 if kind == "rollback" else 120
        settings = SETTINGS.replace("deadline_s = 10", f"deadline_s = {deadline_s}")
        path = site.machine.root / "etc/treenail/agent.toml"
        path.write_text('image_files = "write"\n' + settings)
        site.machine.on_boot = self._break_boot
        self._bad_digest = ""
        self._retried = ("", 0)

    def run(self, fault: FaultKind, updates: int = WALK_UPDATES) -> None:
        """Make updates until one has no call that was not struck before."""
        site, strikes = self._site, self._bus.strikes
        self._bus.begin()
        site.reach(self._make_goal(is_live=False))
        if fault in (FaultKind.HANGING, FaultKind.LATE):
            self._bus.limit_calls({"": FIRST_S})
        strikes.kind = fault
        for _ in range(updates):
            before = len(strikes.struck)
            self._update()
            if len(strikes.struck) == before:
                return
        assert updates < WALK_UPDATES, "there are always new calls"

    def _update(self) -> None:
        site, strikes = self._site, self._bus.strikes
        before, goal = site.current, self._make_goal(is_live=self._kind == "live")
        if self._kind == "rollback":
            self._bad_digest = goal.image.digest
        site.ask(goal)
        while True:
            wait_until(lambda: self._has_progress(goal), limit_s=2 * LIMIT_S)
            active = strikes.active
            if active is None:
                break
            outcome = self._wait_for_outcome(active, goal)
            if site.phase() not in TRANSIENT_PHASES:
                assert self._read_files() in (self._texts[before.config], self._texts[goal.config])
            self.outcomes[active] = outcome
            strikes.lift()
            self._retry_failed_step(goal)
        if self._kind == "rollback":
            site.current = before
        else:
            site.settle(goal)
        wait_until(site.calm, limit_s=LIMIT_S)
        assert site.notes()[key.CURRENT_CONFIG] == site.current.config
        assert site.booted() == site.current.image.digest
        assert self._read_files() == self._texts[site.current.config]

    def _wait_for_outcome(self, active: BusPoint, goal: Goal) -> str:
        try:
            return wait_until(lambda: self._find_outcome(goal), limit_s=2 * LIMIT_S)
        except AssertionError as error:
            hits, notes = self._bus.strikes.hits, self._site.notes()
            error.add_note(f"{active}, {hits} hits: {notes.get(key.REASON)!r}")
            raise

    def _has_progress(self, goal: Goal) -> bool:
        """Return whether a strike began or the update ended."""
        if self._bus.strikes.active is not None or self._has_ended(goal):
            return True
        self._retry_failed_step(goal)
        return False

    def _has_ended(self, goal: Goal) -> bool:
        if self._kind != "rollback":
            return self._site.is_at(goal)
        reason = self._site.notes().get(key.REASON, "")
        return "treenail retry" in reason and goal.config in reason and self._site.calm()

    def _find_outcome(self, goal: Goal) -> str:
        """Return what the Node shows under the strike; empty while that is not known."""
        site, strikes = self._site, self._bus.strikes
        assert strikes.active is not None
        reason = site.notes().get(key.REASON, "")
        if strikes.active.phase == "verifying" and strikes.hits >= TRIAL_HITS:
            return "the boot trial continues"
        # The reason of the strike before may stay until this one has failed often enough, too.
        is_new = reason != strikes.reason or strikes.hits > NEW_HITS
        words = WORDS[strikes.active.call.service]
        if is_new and any(word in reason for word in words) and "; " in reason:
            return reason
        if strikes.has_continued:
            return f"continued: {strikes.later_phase}"
        if self._has_ended(goal):
            return "continued to the end"
        self._retry_failed_step(goal)
        assert strikes.hits < MAX_HITS, f"{strikes.active} failed in silence: {reason!r}"
        return ""

    def _retry_failed_step(self, goal: Goal) -> None:
        """Let the agent repeat a failed step at once: it waits for minutes before it does."""
        reason = self._site.notes().get(key.REASON, "")
        # A target that was rolled back has no time of the next try, and must stay so.
        words = "tries again at" if self._kind == "rollback" else "treenail retry"
        failed = reason, self._bus.strikes.hits
        if words in reason and failed != self._retried:
            self._retried = failed
            self._site.annotate({key.RETRY: str(next(NUMBERS)), **self._spell(goal)})

    def _make_goal(self, *, is_live: bool) -> Goal:
        """Create a config with two files and a unit, of which a live update changes one file."""
        site, number = self._site, next(NUMBERS)
        app, _, unit = self._texts[site.current.config] if is_live else ("",) * 3
        texts = (
            app or f"app {number}",
            f"policy {number}",
            unit
            or f"[Service]\nExecStart=/bin/true\n# {number}\n"
            "[Install]\nWantedBy=multi-user.target\n",
        )
        files = [
            {"path": path, "contents": {"source": f"data:,{quote(text)}"}, "overwrite": True}
            for path, text in zip((APP, POLICY), texts, strict=False)
        ]
        config = {
            "ignition": {"version": "3.5.0"},
            "storage": {"files": files},
            "systemd": {"units": [{"name": UNIT, "contents": texts[2], "enabled": True}]},
        }
        name = f"rendered-bus-{number}"
        self._texts[name] = texts
        image = site.current.image if is_live else site.goal().image
        return Goal(site.lab.add_config(build_rendered_config(name, {"config": config})), image)

    def _spell(self, goal: Goal) -> dict[str, str]:
        return {key.DESIRED_CONFIG: goal.config, key.DESIRED_OS_IMAGE: goal.pull_spec}

    def _read_files(self) -> tuple[str, ...]:
        root = self._site.machine.root
        return tuple((root / path[1:]).read_text() for path in (APP, POLICY, UNIT_FILE))

    def _break_boot(self, booted: SysrootDeployment) -> None:
        units = ("kubelet.service",) if booted.digest == self._bad_digest else ()
        self._site.machine.change_settings(failing_units=units)


def can_fail(point: BusPoint, fault: FaultKind) -> bool:
    """Return whether the fault can happen to the service of the call."""
    if point.call.service not in WORDS:
        return False  # the bus itself, which the disconnections are about
    if fault in (FaultKind.ABSENT, FaultKind.INACTIVE):
        return point.call.service != PEER
    return fault is not FaultKind.RESTARTED or point.call.service in (RPM_OSTREE, PEER)


ENDS = {
    "reboot": "reaches its target",
    "live": "reaches its target",
    "rollback": "has its previous target again",
}
"""How each kind of update ends after its faults."""
SAMPLE = [
    (SYSTEMD, "EnableUnitFiles"),
    (LOGIND, "Reboot"),
    (RPM_OSTREE, "UpdateDeployment"),
    (PEER, "Start"),
    (SYSTEMD, "properties of Manager"),
]


def run_walk(
    site: Site, bus: ProxiedBus, kind: str, fault: FaultKind, updates: int = WALK_UPDATES
) -> int:
    """Return the number of calls that were struck."""
    walk = Walk(site, bus, kind)
    crashes = site.machine.agent_log.read_text().count("Traceback")
    try:
        walk.run(fault, updates)
        for outcome in walk.outcomes.values():
            assert outcome.isprintable(), outcome
        assert site.machine.agent_log.read_text().count("Traceback") == crashes
        assert bus.find_longest_limit_s() <= MAX_LIMIT_S
        assert site.witness.violations() == []
    finally:
        site.machine.on_boot = lambda _: None
        site.machine.change_settings(failing_units=())
        bus.end()
    return len(walk.outcomes)


def test_update_with_lost_answers_of_each_service_ends_at_target(site: Site) -> None:
    bus = ProxiedBus(site)
    bus.strikes.is_wanted = lambda point: (point.call.service, point.call.member) in SAMPLE
    assert run_walk(site, bus, "reboot", FaultKind.DISCONNECTED, updates=1) >= len(SAMPLE)


@pytest.mark.long
@pytest.mark.limit(3_000)
@pytest.mark.parametrize("fault", FaultKind)
@pytest.mark.parametrize("kind", ENDS)
def test_each_call_of_update_fails(site: Site, kind: str, fault: FaultKind) -> None:
    bus = ProxiedBus(site)
    bus.strikes.is_wanted = lambda point: can_fail(point, fault)
    count = run_walk(site, bus, kind, fault)
    write_record(
        "host",
        what=f"D-Bus: {fault}, from each call of an update ({kind}) on, in each of its phases",
        count=count,
        result="no call waits for more than 300 s; the Node names the service and a remedy, or "
        f"the update continues without the call; afterwards the node {ENDS[kind]}",
        command="make test-long ARGS=tests/integration/test_bus_faults.py",
    )
