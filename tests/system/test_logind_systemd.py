"""Rebooting, with a real logind."""

import subprocess
import sys

import pytest

from tests.system.nspawn import REPOSITORY, Container, missing

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(missing()), reason=f"no container: {missing()}"),
]
# The exit code of systemd-nspawn after its payload requested a reboot.
REBOOT = 133
# logind looks up the PID of its callers, so the caller must run in the container.
PROGRAM = f"""
import sys
sys.path[:0] = ["{REPOSITORY}", "{REPOSITORY}/agent"]
from tests.fakes.inhibitor import hold_inhibitor
from tests.waiting import wait_until
from treenail.errors import BusError
from treenail.host.systemd.system_bus import SystemBus
from treenail.host.systemd.logind import Logind
logind, soft = Logind(SystemBus()), sys.argv[1:] == ["soft"]
with hold_inhibitor("shutdown", "backup", "copying", "block"):
    print(*(each.who for each in logind.list_inhibitors()))
    try:
        logind.reboot_machine(is_soft=soft)
    except BusError as error:
        print(error)
    print(logind.is_shutting_down())
wait_until(lambda: not logind.list_inhibitors())
logind.reboot_machine(is_soft=soft)
"""


@pytest.mark.parametrize("kind", ["", "soft"])
def test_reboot_waits_for_the_end_of_a_block_lock(own_container: Container, kind: str) -> None:
    command = own_container.inside(sys.executable, "-c", PROGRAM, *filter(None, [kind]))
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    who, refusal, going_down = done.stdout.splitlines()
    assert (who, going_down) == ("backup", "False")
    assert "cannot reboot: blocked by backup (process " in refusal
    assert own_container.wait() == REBOOT
