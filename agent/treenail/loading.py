"""Imports of the modules of a command."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def load_modules() -> Iterator[None]:
    """Import modules without collections of garbage, which take a tenth of a command's start.

    Modules live as long as the process: later collections exclude all objects that exist now. A
    process that runs for long calls `gc.unfreeze`, collects the few that are garbage, and freezes
    the others.
    """
    gc.disable()
    try:
        yield
    finally:
        # Without this the next collection would look at every object of the modules.
        gc.freeze()
        gc.enable()
