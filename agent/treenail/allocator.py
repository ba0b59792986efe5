"""Settings of glibc's allocator for a process with threads that must keep little memory."""

import ctypes

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""Of mallopt(3)."""
_MMAP_THRESHOLD = 128 * 1024


def limit_allocator() -> None:
    """Keep little freed memory in the process; do nothing without glibc.

    By default glibc makes an arena for each thread, up to 8 times the number of CPUs, and keeps
    freed blocks of up to 32 MiB (mallopt(3)): after requests of many machines a server would keep
    a multiple of what it needs, and the agent the memory of its last update.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)


def release_freed_memory() -> None:
    """Return freed memory to the kernel, in about a millisecond."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
