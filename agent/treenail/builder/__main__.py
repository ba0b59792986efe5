"""Entry point of ``python -m treenail.builder``; see `treenail.builder.phases.command`."""

import sys

from treenail.builder.phases.termination import TerminationHandler


def run() -> int:
    """Run one phase; return its exit code."""
    # Before the other imports: as PID 1 of a container, this process ignores SIGTERM until it has
    # a handler (signal(7)).
    handler = TerminationHandler()
    handler.install()
    from treenail.builder.phases.command import main

    return main(sys.argv[1:], handler)


if __name__ == "__main__":
    sys.exit(run())
