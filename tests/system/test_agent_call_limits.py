"""D-Bus or rpm-ostreed hangs until the time limit of the agent's own calls, in real time."""

import pytest

from tests.records import write_record
from tests.system.nspawn import missing
from tests.system.sandboxed_node import FILE, SandboxedNode

pytestmark = [
    pytest.mark.system,
    pytest.mark.long,
    pytest.mark.limit(3_000),
    pytest.mark.skipif(bool(missing()), reason=f"no container: {missing()}"),
]
WAIT_S = 420.0
"""Above the time limit of each call, which is 300 s at most."""
HANGS = {
    "rpm-ostreed": (
        "systemctl start rpm-ostreed; systemctl kill --kill-whom=main --signal=STOP rpm-ostreed",
        "systemctl kill --kill-whom=main --signal=CONT rpm-ostreed",
        (
            "cannot call org.projectatomic.rpmostree1 RegisterClient: no answer within 300 s; ",
            "find its unit with: busctl status org.projectatomic.rpmostree1; then see: journalctl",
        ),
    ),
    "D-Bus": (
        "pkill -STOP -x dbus-daemon",
        "pkill -CONT -x dbus-daemon",
        (
            "cannot read the properties of org.freedesktop.login1.Manager: no answer within 30 s; ",
            "find its unit with: busctl status org.freedesktop.login1; then see: journalctl",
        ),
    ),
}
"""What begins and ends each hang, and words of the reason."""


@pytest.mark.parametrize("service", HANGS)
def test_hang_until_the_time_limit_of_a_call_is_reported(node: SandboxedNode, service: str) -> None:
    begin, end, words = HANGS[service]
    before = node.read(FILE)
    name = node.add_config(f"{service.lower()}-hangs", {FILE: f"after {service}"})
    restarts = node.restart_count()
    node.shell(begin)
    try:
        node.request(name)
        node.wait_degraded(*words, limit_s=WAIT_S)
        assert node.read(FILE) == before
        assert node.show("ActiveState") == "active"
    finally:
        node.shell(end)
    node.retry()
    node.wait_done(name)
    assert node.read(FILE) == f"after {service}"
    assert node.restart_count() == restarts
    write_record(
        "host",
        what=f"{service} hanging until the time limit of the agent's call, under the shipped "
        "unit's sandbox",
        count=1,
        result="Degraded with the call, its time limit and a remedy; the same process completes "
        "the update afterwards",
        command="make test-long ARGS=tests/system/test_agent_call_limits.py",
    )
