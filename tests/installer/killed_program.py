"""``treenail-controller`` that kills itself at a chosen write, as SIGKILL from outside would.

    python -m tests.installer.killed_program NAME NUMBER MOMENT ARGUMENTS...

NAME is the end of the paths that count, NUMBER that of the rename, from 1. MOMENT is ``before`` the
rename or ``after`` it. An audit hook sees the renames: the code of the product runs unchanged.
"""

import os
import signal
import sys
from typing import Any

from treenail.cli.controller.main import main


class Killer:
    """An audit hook (PEP 578)."""

    def __init__(self, name: str, number: int, moment: str) -> None:
        self._name = name
        self._left = number
        self._is_after = moment == "after"
        self._is_due = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_due:
            self._kill()
        if event != "os.rename" or not os.fspath(arguments[1]).endswith(self._name):
            return
        self._left -= 1
        if self._left == 0:
            if not self._is_after:
                self._kill()
            # The next event comes at once: the directory is opened for its fsync.
            self._is_due = True

    def _kill(self) -> None:
        # os.kill() is an event, too.
        self._is_due = False
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _, path_end, text, when, *rest = sys.argv
    sys.addaudithook(Killer(path_end, int(text), when))
    sys.argv = ["treenail-controller", *rest]
    sys.exit(main())
