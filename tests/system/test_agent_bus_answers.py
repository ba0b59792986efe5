"""Wrong answers and lost connections of D-Bus in updates of an agent in the shipped unit's sandbox.

A proxy between the agent and the bus breaks the calls of one method from one call on, until the
Node shows a reason. The unit has one line more than the shipped one: the address of that proxy.
"""

import itertools
from collections.abc import Callable, Iterator

import pytest

from tests.fakes.bus_proxy import PEER, BusProxy, FaultKind
from tests.fakes.bus_strikes import BusPoint, BusStrikes
from tests.records import write_record
from tests.system.nspawn import Container, missing
from tests.system.sandboxed_node import LIMIT_S, NODE, SandboxedNode
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail_lab.images import Image

pytestmark = [
    pytest.mark.system,
    pytest.mark.long,
    pytest.mark.limit(1_200),
    pytest.mark.skipif(bool(missing()), reason=f"no container: {missing()}"),
]
FREE = "/etc/nmstate/openshift/net.yml"
"""A change of it needs neither a drain nor a reboot."""
POLICY = "/etc/crio/policies/app.json"
"""A change of it reloads CRI-O."""
FAULTS = (
    FaultKind.MISTYPED,
    FaultKind.SHORT,
    FaultKind.HOSTILE,
    FaultKind.DISCONNECTED,
)
"""Others need shorter time limits than the agent's, or are in `test_agent_bus_faults`."""
RPM_OSTREE = "org.projectatomic.rpmostree1"
WORDS = {
    RPM_OSTREE: ("rpm-ostree", "rpmostree"),
    PEER: ("rpm-ostree", "rpmostree"),
    "org.freedesktop.systemd1": ("systemd",),
    "org.freedesktop.login1": ("login1",),
}
"""A word of the reason names the service."""
WRITING = ("applying", "cancelling")
"""In these phases the agent writes files."""
MAX_HITS = 60
"""After so many failed calls the Node must show a reason, or the update continue."""
NEW_HITS = 4
"""After more failed calls an equal reason is that of this strike."""
TRIAL_HITS = 3
"""So often a method fails in a trial, whose deadline would roll back."""
# The lab's image has the agent's unit in another place than this container.
SETTINGS = """
[preflight]
only_warn = ["AgentMissing"]
[health]
deadline_s = 120
settle_s = 0.1
interval_s = 0.1
failing_s = 0.2
ready_s = 0.2
outage_s = 0.2
"""
MAX_UPDATES = 40
NUMBERS = itertools.count(1)


class ProxiedNode:
    """A node whose agent reaches the bus through a proxy, while entered."""

    def __init__(self, node: SandboxedNode) -> None:
        self.node = node
        self.strikes = BusStrikes(node.read_phase, read_reason=lambda: node.read_note(key.REASON))
        self._proxy = BusProxy(
            node.container.shared, node.container.address, self.strikes.choose_fault
        )
        self.text = ""
        self.config = self._add_config()
        node.start_crio()
        path = "/etc/treenail/agent.toml"
        node.write(path, f'image_files = "write"\n{node.read(path)}{SETTINGS}')
        node.install_drop_in(
            f"[Service]\nEnvironment=DBUS_SYSTEM_BUS_ADDRESS={self._proxy.address}\n"
        )
        node.request(self.config, node.image)
        node.start_agent()
        node.wait_done(self.config)

    def stop(self) -> None:
        self._proxy.close()
        self.node.install_drop_in("")

    def update_files(self) -> None:
        """Change both files and reload CRI-O, without a drain."""
        before, config = self.text, self._add_config()
        self._request(config)
        self._pass_strikes(lambda: self._is_at(config), {before, self.text})

    def stage_image_and_cancel(self) -> None:
        """Stage an image until the drain is requested, and request the previous image."""
        config = self.config
        self._image = self.node.add_image(str(next(NUMBERS)))
        self._request(config, self._image)
        self._pass_strikes(lambda: self._read_drain().startswith("drain-"), {self.text})
        self._request(config)
        self._pass_strikes(lambda: self._is_uncordoned(config), {self.text})

    def _add_config(self) -> str:
        self.text = f"bus-{next(NUMBERS)}"
        self.config = self.node.add_config(self.text, dict.fromkeys((FREE, POLICY), self.text))
        return self.config

    def _request(self, config: str, image: Image | None = None) -> None:
        self._target = config, image or self.node.image
        self.node.request(*self._target)

    def _pass_strikes(self, has_ended: Callable[[], bool], texts: set[str]) -> None:
        """Wait for the end; lift each strike on the way, once the Node shows it."""
        strikes = self.strikes

        def has_progress() -> bool:
            if strikes.active is not None or has_ended():
                return True
            self._retry()
            return False

        while wait_until(has_progress, limit_s=2 * LIMIT_S) and strikes.active is not None:
            self._wait_for_outcome(has_ended)
            if self.node.read_phase() not in WRITING:
                found = {self.node.read(path) for path in (FREE, POLICY)}
                assert len(found) == 1, (strikes.active, found)
                assert found <= texts, (strikes.active, found)
            strikes.lift()
            self._retry()

    def _wait_for_outcome(self, has_ended: Callable[[], bool]) -> None:
        try:
            wait_until(lambda: self._has_outcome(has_ended), limit_s=2 * LIMIT_S)
        except AssertionError as error:
            strikes, reason = self.strikes, self.node.read_note(key.REASON)
            error.add_note(f"{strikes.active}, {strikes.hits} hits: {reason!r}")
            error.add_note(self.node.run("journalctl", "-n", "40", is_checked=False))
            raise

    def _has_outcome(self, has_ended: Callable[[], bool]) -> bool:
        """Return whether the Node shows the reason, or the update continued without the call."""
        strikes = self.strikes
        assert strikes.active is not None
        notes = self.node.lab.read_annotations(NODE)
        reason, is_trial = notes.get(key.REASON, ""), strikes.active.phase == "verifying"
        is_new = reason != strikes.reason or strikes.hits > NEW_HITS
        words = WORDS[strikes.active.call.service]
        if is_trial and strikes.hits >= TRIAL_HITS:
            return True
        if is_new and any(word in reason for word in words) and "; " in reason:
            assert reason.isprintable(), reason
            # A trial continues until its deadline.
            assert notes[key.STATE] in ("Degraded", "Working" if is_trial else ""), notes
            return True
        if strikes.has_continued or has_ended():
            return True
        self._retry()
        assert strikes.hits < MAX_HITS, f"{strikes.active} failed in silence: {reason!r}"
        return False

    def _retry(self) -> None:
        """Let the agent repeat a failed step at once: it waits for minutes before it does."""
        reason = self.node.read_note(key.REASON)
        if "treenail retry" in reason:
            self.node.request(*self._target)
            self.node.retry()

    def _is_at(self, config: str) -> bool:
        is_done = self.node.read_note(key.STATE) == "Done"
        return (
            is_done
            and self.node.read_note(key.CURRENT_CONFIG) == config
            and not self.node.read_phase()
        )

    def _is_uncordoned(self, config: str) -> bool:
        if self._read_drain().startswith("uncordon-"):
            # As the drain controller does.
            self.node.annotate({key.LAST_APPLIED_DRAIN: self._read_drain()})
        return self._is_at(config)

    def _read_drain(self) -> str:
        return self.node.read_note(key.DESIRED_DRAIN)


@pytest.fixture(scope="module")
def proxied(container: Container) -> Iterator[ProxiedNode]:
    with SandboxedNode(container) as node:
        found = ProxiedNode(node)
        yield found
        found.stop()


def can_fail(point: BusPoint) -> bool:
    """Return whether the call is of a service; that of the bus itself is left alone."""
    return point.call.service in WORDS


@pytest.mark.parametrize("fault", FAULTS)
def test_each_call_of_update_fails(proxied: ProxiedNode, fault: FaultKind) -> None:
    node, strikes = proxied.node, proxied.strikes
    restarts, tracebacks = node.restart_count(), node.count_tracebacks()
    strikes.struck.clear()
    strikes.is_wanted = can_fail
    strikes.kind = fault
    try:
        for _ in range(MAX_UPDATES):
            before = len(strikes.struck)
            proxied.update_files()
            proxied.stage_image_and_cancel()
            if len(strikes.struck) == before:
                break
        else:
            raise AssertionError("there are always new calls")
    finally:
        strikes.kind = None
        strikes.lift()
    assert node.restart_count() == restarts
    assert node.count_tracebacks() == tracebacks
    write_record(
        "host",
        what=f"D-Bus: {fault}, from each call of a live update and of one cancelled in its drain "
        "on, in each of its phases, under the shipped unit's sandbox",
        count=len(strikes.struck),
        result="the Node names the service and a remedy, or the update continues without the call; "
        "files old or new; afterwards the same process completes the update",
        command="make test-long ARGS=tests/system/test_agent_bus_answers.py",
    )
