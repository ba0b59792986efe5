"""Transfers of blobs over several connections."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from threading import Event

from treenail.registry.client import RegistryClient
from treenail.registry.names import Descriptor

_CONNECTIONS = 3

OpenClient = Callable[[], AbstractContextManager[RegistryClient]]
"""Opens a client; a client belongs to one thread."""


def transfer_blobs(
    blobs: Iterable[Descriptor],
    open_client: OpenClient,
    transfer: Callable[[RegistryClient, Descriptor, Event], None],
) -> None:
    """Call ``transfer`` for each blob, the largest first; raise the first error.

    ``transfer`` gets an event that is set when another transfer has failed.
    """
    waiting: SimpleQueue[Descriptor] = SimpleQueue()
    for blob in sorted(blobs, key=lambda each: -each.size):
        waiting.put(blob)
    has_failed = Event()

    def transfer_waiting() -> None:
        with open_client() as client:
            while not has_failed.is_set():
                try:
                    blob = waiting.get_nowait()
                except Empty:
                    return
                try:
                    transfer(client, blob, has_failed)
                except BaseException:
                    has_failed.set()
                    raise

    count = min(_CONNECTIONS, waiting.qsize())
    if not count:
        return
    with ThreadPoolExecutor(count) as pool:
        try:
            for done in [pool.submit(transfer_waiting) for _ in range(count)]:
                done.result()
        except BaseException:
            # SIGTERM too: the pool waits for its threads.
            has_failed.set()
            raise
