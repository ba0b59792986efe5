"""The entry point of ``treenail-lab``."""

import signal
import sys


def main() -> int:
    """Run `treenail_lab.command.main`; Ctrl-C while the modules load ends without a traceback."""
    # There is nothing to clean up yet. `command.main` sets its own handlers.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from treenail_lab import command  # loading takes a second

    return command.main()


if __name__ == "__main__":
    sys.exit(main())
