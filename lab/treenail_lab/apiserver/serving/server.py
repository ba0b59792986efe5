"""The lab's API server in a thread of its own, for tests and commands."""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from treenail.clock import Clock
from treenail_lab.apiserver.serving.faults import Fault, FaultMatch
from treenail_lab.apiserver.serving.service import ApiServer

_T = TypeVar("_T")
_TIMEOUT_S = 10.0


class LabServer:
    """An :class:`ApiServer` that other threads can use.

    It keeps state, port and certificates over :meth:`stop` and :meth:`start`, so a server that is
    gone for a while is a stop and a start.
    """

    def __init__(self, directory: Path, port: int = 0, *, clock: Clock | None = None) -> None:
        self.api = ApiServer(directory, port=port, clock=clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """``https://127.0.0.1:PORT``."""
        return self.api.url

    @property
    def ca_file(self) -> Path:
        return self.api.ca_file

    @property
    def admin_kubeconfig(self) -> Path:
        """A kubeconfig that may do everything."""
        return self.api.admin_kubeconfig

    def write_kubeconfig(self, user: str, groups: Sequence[str] = ()) -> Path:
        """A kubeconfig, readable by its owner only, with a client certificate for a user."""
        return self.api.write_kubeconfig(user, groups)

    def write_node_kubeconfig(self, node: str) -> Path:
        """A kubeconfig as a kubelet has it: it may change its own Node only."""
        return self.api.write_node_kubeconfig(node)

    def write_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """A kubeconfig with the token of a ServiceAccount, which is all that its pods have."""
        return self.api.write_account_kubeconfig(namespace, name)

    def issue_token(self, user: str, groups: Sequence[str] = ()) -> str:
        """A bearer token for a user."""
        return self.api.issue_token(user, groups)

    def start(self) -> "LabServer":
        """Serve; returns when requests are answered."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run_loop, args=(loop,), name="lab-apiserver", daemon=True)
        thread.start()
        self._loop, self._thread = loop, thread
        try:
            asyncio.run_coroutine_threadsafe(self.api.start(), loop).result(_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop serving; the state stays, and :meth:`start` goes on with it."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self._loop = self._thread = None
        asyncio.run_coroutine_threadsafe(self.api.stop(), loop).result(_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_TIMEOUT_S)

    def __enter__(self) -> "LabServer":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def call_api(self, action: Callable[[ApiServer], _T]) -> _T:
        """The result of an action on the server, run in its thread between two requests."""
        loop = self._loop
        if loop is None:
            return action(self.api)

        async def run() -> _T:
            return action(self.api)

        return asyncio.run_coroutine_threadsafe(run(), loop).result(_TIMEOUT_S)

    def inject_fault(
        self,
        fault: Fault,
        match: FaultMatch | None = None,
        *,
        times: int | None = None,
        for_s: float | None = None,
    ) -> int:
        """Begin a fault for the next ``times`` matching requests, for a time, or until lifted."""
        return self.call_api(lambda api: api.inject_fault(fault, match, times=times, for_s=for_s))

    def lift_fault(self, number: int | None = None) -> None:
        """End a fault, or all of them."""
        self.call_api(lambda api: api.faults.lift_fault(number))

    def cut_watches(self, plural: str = "", user: str = "") -> int:
        """End open watches now; how many there were. Empty matches all."""
        return self.call_api(lambda api: api.watches.cut_watches(plural, user))

    def expire_versions(self) -> None:
        """From now on nobody can watch or list from an older resource version: 410."""
        self.call_api(lambda api: api.store.expire_versions())

    def count_requests(self, *, user: str = "", verb: str = "", resource: str = "") -> int:
        """How many requests there were; empty matches all."""
        return self.call_api(
            lambda api: api.requests.count_requests(user=user, verb=verb, resource=resource)
        )

    def set_kubelet(self, node: str, *, is_stopped: bool) -> None:
        """Whether pods of a node stay as they are, as when its machine is off."""

        def change(api: ApiServer) -> None:
            kubelets = api.controllers.kubelets
            if is_stopped:
                kubelets.stop_kubelet(node)
            else:
                kubelets.start_kubelet(node)
                api.controllers.schedule_run()

        self.call_api(change)

    def save_state(self, path: Path) -> None:
        """Write the whole state, secrets included, to a file that only its owner can read."""
        self.call_api(lambda api: api.save_state(path))

    def load_state(self, path: Path) -> None:
        """Replace the whole state by a saved one; open watches end with 410."""
        document = json.loads(path.read_text(encoding="utf-8"))
        self.call_api(lambda api: api.load_state(document))


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
