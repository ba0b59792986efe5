"""One call of a method on the system bus, for a test on the host.

Standard input has the interface, the method and its arguments, pickled; standard output what the
method returns, or the error.
"""

import base64
import pickle
import sys

from treenail.errors import TreenailError
from treenail.host.systemd.system_bus import SystemBus

_LIMIT_S = 300.0


def main() -> int:
    """Call the method."""
    target, method, arguments = pickle.loads(base64.b64decode(sys.stdin.read()))
    try:
        found = SystemBus().call_method(target, method, *arguments, timeout_s=_LIMIT_S)
    except TreenailError as error:
        found = error
    print(base64.b64encode(pickle.dumps(found)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
