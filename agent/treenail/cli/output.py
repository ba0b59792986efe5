"""Exit codes of the commands, and their standard output."""

import sys

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REBOOT_NEEDED = 3
EXIT_DEGRADED = 4


def flush_output() -> None:
    """Write the buffered output; raise `OSError` if that fails."""
    # sys.stdout is None in a process that was started with a closed standard output.
    if sys.stdout is not None:
        sys.stdout.flush()
