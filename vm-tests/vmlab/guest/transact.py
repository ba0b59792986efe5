"""One transaction of rpm-ostree, for a test on the host.

Standard input has the method of the OS interface and its arguments, pickled; standard output the
outcome, or the error. A dictionary among the arguments becomes an ``a{sv}``.
"""

import base64
import pickle
import sys

from treenail.clocks import SystemClock
from treenail.errors import TreenailError
from treenail.host.ostree.backend_settings import TransactionLimits
from treenail.host.rpmostree.client import RpmOstreeClient
from treenail.host.systemd.system_bus import SystemBus, make_options


def main() -> int:
    """Follow the transaction."""
    method, arguments = pickle.loads(base64.b64decode(sys.stdin.read()))
    values = [make_options(each) if isinstance(each, dict) else each for each in arguments]
    client = RpmOstreeClient(
        SystemBus(), SystemClock(), TransactionLimits(), heartbeat=lambda: None
    )
    try:
        found: object = client.run_transaction(method, *values)
    except TreenailError as error:
        found = error
    print(base64.b64encode(pickle.dumps(found)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
