"""Entry point of ``python -m treenail.builder``; see `treenail.builder.phases.command`."""

import os
import signal
import sys
from collections.abc import Callable


class TerminationHandler:
    """Ends the process with a report; a signal that arrives early is reported later."""

    def __init__(self) -> None:
        self._report: Callable[[], int] | None = None
        self._is_requested = False

    def install(self) -> None:
        """Handle both signals from now on. Ctrl-C reaches all processes of a local build."""
        signal.signal(signal.SIGTERM, self._handle_signal)
        signal.signal(signal.SIGINT, self._handle_signal)

    def set_report(self, report: Callable[[], int]) -> None:
        """Let a signal call ``report`` and exit with the code that it returns."""
        self._report = report
        if self._is_requested:
            self._exit(report)

    def _handle_signal(self, _signal: int, _frame: object) -> None:
        self._is_requested = True
        if self._report is not None:
            self._exit(self._report)

    def _exit(self, report: Callable[[], int]) -> None:
        # At once: a thread may wait for a registry longer than the pod may. The namespaces of
        # buildah end with this process.
        os._exit(report())


def run() -> int:
    """Run one phase; return its exit code."""
    # Before the other imports: as PID 1 of a container, this process ignores SIGTERM until it has
    # a handler (signal(7)).
    handler = TerminationHandler()
    handler.install()
    from treenail.builder.phases.command import main

    return main(sys.argv[1:], handler.set_report)


if __name__ == "__main__":
    sys.exit(run())
