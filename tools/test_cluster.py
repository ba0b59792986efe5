"""Tests on a real cluster: ``python -m tools.test_cluster [PYTEST-OPTION ...]``.

The cluster is the one that TREENAIL_TEST_KUBECONFIG names. Without it, the programs that ETCD,
KUBE_APISERVER and KUBE_CONTROLLER_MANAGER name are started, and ended afterwards; their logs are
in build/cluster.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.contract.client import Cluster
from tests.realcluster import RealCluster, RealClusterError, answers_readyz, find_programs
from treenail_lab.lifetime.owner import owner

KUBECONFIG = "TREENAIL_TEST_KUBECONFIG"
LOGS = Path("build/cluster")
PYTEST = (sys.executable, "-m", "pytest", "-m", "cluster", "-p", "no:cacheprovider")
USAGE = f"""\
make test-cluster ETCD=PATH KUBE_APISERVER=PATH [KUBE_CONTROLLER_MANAGER=PATH]
make test-cluster {KUBECONFIG}=PATH\
"""


def main(options: Sequence[str]) -> int:
    """Run the tests; return pytest's exit code, or 2 if there is no cluster."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: sys.exit(128))
    # A shell lets its background jobs ignore SIGINT, and pytest must not inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with ExitStack() as exits:
        try:
            kubeconfig = find_cluster(exits)
        except RealClusterError as error:
            print(f"test-cluster: {error}\n{USAGE}", file=sys.stderr)
            return 2
        version = Cluster.of_kubeconfig(kubeconfig).get("/version").ok()["gitVersion"]
        print(f"test-cluster: kube-apiserver {version}", flush=True)
        environment = {**os.environ, **owner.mark_environment(), KUBECONFIG: str(kubeconfig)}
        process = subprocess.Popen([*PYTEST, *options], env=environment)
        try:
            return process.wait()
        except SystemExit:
            # Only this process received the signal.
            process.send_signal(signal.SIGINT)
            raise
        finally:
            end_tests(process)


def find_cluster(exits: ExitStack) -> Path:
    """Return the administrator's kubeconfig of a cluster that answers."""
    if not (named := os.environ.get(KUBECONFIG)):
        return exits.enter_context(RealCluster(find_programs(os.environ), LOGS)).kubeconfig
    path = Path(named).absolute()
    try:
        is_ready = answers_readyz(Cluster.of_kubeconfig(path))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RealClusterError(f"cannot read {KUBECONFIG}={named}: {error}") from error
    if not is_ready:
        raise RealClusterError(f"the API server of {named} does not answer /readyz with 200")
    return path


def end_tests(process: subprocess.Popen[bytes]) -> None:
    """Let pytest clean up after SIGINT, then kill it."""
    try:
        process.wait(30.0)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
