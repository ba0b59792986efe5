"""The lock of a sysroot: an open file description lock, as libostree takes it."""

import fcntl
import os
import struct


def lock_exclusively(descriptor: int, *, wait: bool) -> None:
    """Lock the file until the descriptor is closed; raise `BlockingIOError` without ``wait``."""
    # struct flock: type, whence, start, length, PID; the kernel rejects any PID but 0.
    whole_file = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, whole_file)
