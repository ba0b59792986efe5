"""Faults of D-Bus and its services during updates of an agent in the shipped unit's sandbox."""

import time

import pytest

from tests.records import write_record
from tests.system.nspawn import missing
from tests.system.sandboxed_node import FILE, LIMIT_S, NODE, SandboxedNode
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.kube.resources import NODES

pytestmark = [
    pytest.mark.system,
    pytest.mark.long,
    pytest.mark.skipif(bool(missing()), reason=f"no container: {missing()}"),
]
HANG_S = 5.0
_SERVICE = "rpm-ostreed"
_DROP_INS = "/etc/systemd/system/rpm-ostreed.service.d"
_FAILING = "[Service]\\nExecStart=\\nExecStart=/bin/false\\n"
_RELOAD = "systemctl daemon-reload; systemctl reset-failed"
_BREAK = (
    f"mkdir -p {_DROP_INS}; printf '{_FAILING}' >{_DROP_INS}/test.conf; {_RELOAD}; "
    f"systemctl stop {_SERVICE}"
)
FAULTS = {
    "rpm-ostreed absent": (
        f"systemctl mask --runtime --now {_SERVICE}",
        f"systemctl unmask --runtime {_SERVICE}",
    ),
    "rpm-ostreed ends at its start": (
        _BREAK,
        f"rm {_DROP_INS}/test.conf; {_RELOAD}",
    ),
    "rpm-ostreed hanging": (
        f"systemctl start {_SERVICE}; systemctl kill --signal=STOP {_SERVICE}",
        f"systemctl kill --signal=CONT {_SERVICE}",
    ),
    "D-Bus hanging": (
        "pkill -STOP -x dbus-daemon",
        "pkill -CONT -x dbus-daemon",
    ),
}
"""What begins and ends each fault."""


def read_drain(node: SandboxedNode) -> str:
    return node.lab.read_annotations(NODE).get(key.DESIRED_DRAIN, "")


def find_uncordon(node: SandboxedNode) -> str:
    found = read_drain(node)
    return found if found.startswith("uncordon-") else ""


@pytest.mark.parametrize("fault", FAULTS)
def test_update_waits_for_the_end_of_a_fault(node: SandboxedNode, fault: str) -> None:
    begin, end = FAULTS[fault]
    # The second file needs a drain and a reboot.
    files = {FILE: "second", "/etc/app.conf": fault}
    name = node.add_config(fault.replace(" ", "-").lower(), files)
    drain = read_drain(node)
    node.shell(begin)
    begun, restarts = time.monotonic(), node.restart_count()
    try:
        node.request(name)
        if "hanging" in fault:
            wait_until(lambda: time.monotonic() > begun + HANG_S, limit_s=LIMIT_S)
        else:
            node.wait_degraded("cannot call org.projectatomic.rpmostree1")
        assert read_drain(node) == drain
        assert node.read(FILE) == "first"
        assert node.show("ActiveState") == "active"
    finally:
        node.shell(end)
    node.retry()
    wait_until(lambda: read_drain(node) == f"drain-{name}", limit_s=LIMIT_S)
    assert node.restart_count() == restarts
    node.request("first")
    uncordon = wait_until(lambda: find_uncordon(node), limit_s=LIMIT_S)
    # As the drain controller does.
    notes = {"metadata": {"annotations": {key.LAST_APPLIED_DRAIN: uncordon}}}
    node.lab.client.patch(NODES, NODE, notes)
    node.wait_done("first")
    assert node.read(FILE) == "first"
    write_record(
        "host",
        what=f"{fault} during an update, under the shipped unit's sandbox",
        count=1,
        result=f"{'no change' if 'hanging' in fault else 'Degraded with the cause'} meanwhile; "
        "the same process completes the step afterwards",
        command="make test-long ARGS=tests/system/test_agent_bus_faults.py",
    )
