"""One call of the agent's adapter for the operating system, for a test on the host.

Standard input has the method, its arguments and what a watcher answers, pickled; standard output
what came of it: a value, or the error.
"""

import base64
import pickle
import sys

from treenail.cli.node.backend import choose_backend, create_operating_system
from treenail.clocks import SystemClock
from treenail.errors import TreenailError
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.ostree.backend_settings import BackendSetting
from treenail.host.ostree.deployments import TransactionProgress, TransactionVerdict


def main() -> int:
    """Make the call."""
    method, arguments, verdict = pickle.loads(base64.b64decode(sys.stdin.read()))

    def watch(progress: TransactionProgress) -> TransactionVerdict:
        return verdict if progress.text else TransactionVerdict.CONTINUE

    options = {} if verdict is None else {"watch": watch}
    root = Root("/")
    with Machine(root, clock=SystemClock()) as machine:
        backend = create_operating_system(choose_backend(BackendSetting.AUTO, root), machine)
        try:
            found: object = getattr(backend, method)(*arguments, **options)
        except TreenailError as error:
            found = error
    print(base64.b64encode(pickle.dumps(found)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
