"""Containers end with the process that runs their kubelet, however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.processes import find_processes
from tests.waiting import wait_until
from treenail_lab.kubelet.runtime import find_refusal
from treenail_lab.lifetime.owner import owner

pytestmark = pytest.mark.integration

# A shell starts its background jobs with SIGINT ignored.
KUBELET = """
import signal
import sys
from pathlib import Path
from tests.lab.kubelet.cluster import ContainerCluster
from treenail_lab.lifetime.owner import owner
with owner.temporary_directory() as directory, ContainerCluster(directory) as cluster:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    script = "trap '' TERM HUP INT; setsid sleep 600 & echo started; exec sleep 600"
    cluster.create_pod("a", script, {"env": [{"name": "MARKED", "value": sys.argv[1]}]})
    cluster.wait_log("a", "started")
    print(directory, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_containers_end_with_their_kubelet(number: signal.Signals) -> None:
    if why := find_refusal():
        pytest.skip(why)
    mark = f"end-{number}-{os.getpid()}"
    process = subprocess.Popen(
        [sys.executable, "-c", KUBELET, mark],
        env={**os.environ, **owner.mark_environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        directory = Path(process.stdout.readline().strip())
        assert len(find_processes(f"MARKED={mark}", part="environ")) == 2
        process.send_signal(number)
        wait_until(lambda: not find_processes(f"MARKED={mark}", part="environ"))
        wait_until(lambda: not directory.exists())
