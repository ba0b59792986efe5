"""Memory: sizes in bytes, collections of garbage while modules load, and glibc's allocator."""

import gc
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""Of mallopt(3)."""
_MMAP_THRESHOLD = 128 * 1024


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


def limit_allocator() -> None:
    """Keep little freed memory in the process; do nothing without glibc.

    By default glibc makes an arena for each thread, up to 8 times the number of CPUs, and keeps
    freed blocks of up to 32 MiB (mallopt(3)): after requests of many machines a server would keep
    a multiple of what it needs, and the agent the memory of its last update.
    """
    # Imported late: short commands load modules, and need no ctypes.
    import ctypes  # noqa: PLC0415  see the comment

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)


def release_freed_memory() -> None:
    """Return freed memory to the kernel, in about a millisecond."""
    import ctypes  # noqa: PLC0415  as above

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


_SHARED_TYPES = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def measure_bytes(value: object) -> int:
    """Return how many bytes a value and all that it refers to take, without code."""
    size, seen, pending = 0, set[int](), [value]
    while pending:
        item = pending.pop()
        if not (id(item) in seen or isinstance(item, _SHARED_TYPES)):
            seen.add(id(item))
            size += sys.getsizeof(item)
            pending += gc.get_referents(item)
    return size


MIB = 1024 * 1024
GIB = 1024 * MIB


def format_bytes(count: int) -> str:
    """Format a size for users, rounded down."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{count // MIB} MiB" if count >= MIB else f"{count} bytes"
