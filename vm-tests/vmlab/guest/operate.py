"""One call of the agent's adapter for the operating system, for a test on the host.

Standard input has the method, its arguments and what a watcher answers, pickled; standard output
what came of it: a value, or the error.
"""

import base64
import pickle
import sys

from treenail.clock import SystemClock
from treenail.errors import TreenailError
from treenail.host.ostree.deployments import TransactionProgress, WatchVerdict
from treenail.host.rpmostree.backend import RpmOstreeBackend
from treenail.host.systemd.bus import SystemBus


def main() -> int:
    """Make the call."""
    method, arguments, verdict = pickle.loads(base64.b64decode(sys.stdin.read()))

    def watch(progress: TransactionProgress) -> WatchVerdict:
        return verdict if progress.text else WatchVerdict.CONTINUE

    options = {} if verdict is None else {"watch": watch}
    bus = SystemBus()
    try:
        found: object = getattr(RpmOstreeBackend(bus, SystemClock()), method)(*arguments, **options)
    except TreenailError as error:
        found = error
    finally:
        bus.close_connection()
    print(base64.b64encode(pickle.dumps(found)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
