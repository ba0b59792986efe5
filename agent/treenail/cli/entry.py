"""Entry points of the programs: nothing that a user does ends in a traceback.

This module imports little. Ctrl-C while the others load, or while the interpreter exits, ends the
process as it ends a program without a handler.
"""

import signal
from collections.abc import Callable

from treenail.memory import load_modules

EXIT_INTERRUPTED = 130


def run_treenail() -> int:
    """Run ``treenail``; return its exit code."""

    def load() -> Callable[[], int]:
        from treenail.cli.node.main import main

        return main

    return _run_program(load)


def run_controller() -> int:
    """Run ``treenail-controller``; return its exit code."""

    def load() -> Callable[[], int]:
        from treenail.cli.controller.main import main

        return main

    return _run_program(load)


def run_kubectl_plugin() -> int:
    """Run ``kubectl treenail``; return its exit code."""

    def load() -> Callable[[], int]:
        from treenail.cli.controller.main import run_kubectl_plugin

        return run_kubectl_plugin

    return _run_program(load)


def complete_kubectl_plugin() -> int:
    """Run ``kubectl_complete-treenail``; return its exit code."""

    def load() -> Callable[[], int]:
        from treenail.cli.controller.complete import main

        return main

    return _run_program(load)


def _run_program(load: Callable[[], Callable[[], int]]) -> int:
    # A shell starts background jobs with SIGINT ignored: leave that as it is.
    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_interruptible:
        with load_modules():
            main = load()
        return main()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with load_modules():
        main = load()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
