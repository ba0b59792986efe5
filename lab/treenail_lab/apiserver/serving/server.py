"""The lab's API server in a thread, for tests and commands."""

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
    """An `ApiServer` that other threads can use.

    State, port and certificates survive `stop` and `start`, which emulates an outage.
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
        """Return a kubeconfig of a member of system:masters."""
        return self.api.admin_kubeconfig

    def write_kubeconfig(self, user: str, groups: Sequence[str] = ()) -> Path:
        """Write a kubeconfig with a client certificate for a user; only its owner can read it."""
        return self.api.write_kubeconfig(user, groups)

    def write_node_kubeconfig(self, node: str) -> Path:
        """Write the kubeconfig of a kubelet, which may change its own Node only."""
        return self.api.write_node_kubeconfig(node)

    def write_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """Write a kubeconfig with the token of a ServiceAccount, as its pods have."""
        return self.api.write_account_kubeconfig(namespace, name)

    def issue_token(self, user: str, groups: Sequence[str] = ()) -> str:
        """Issue a bearer token for a user."""
        return self.api.issue_token(user, groups)

    def start(self) -> "LabServer":
        """Serve; requests are answered when this returns."""
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
        """Stop serving; the state stays, and `start` continues with it."""
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
        """Run an action on the server in its thread, between two requests; return its result."""
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
        """Begin a fault for ``times`` matching requests, for some seconds, or until lifted."""
        return self.call_api(lambda api: api.inject_fault(fault, match, times=times, for_s=for_s))

    def lift_fault(self, number: int | None = None) -> None:
        """End one fault, or all faults."""
        self.call_api(lambda api: api.faults.lift_fault(number))

    def cut_watches(self, plural: str = "", user: str = "") -> int:
        """Close open watches, return how many; empty matches all."""
        return self.call_api(lambda api: api.watches.cut_watches(plural, user))

    def expire_versions(self) -> None:
        """Answer 410 from now on to a watch or list from an older resource version."""
        self.call_api(lambda api: api.store.expire_versions())

    def count_requests(self, *, user: str = "", verb: str = "", resource: str = "") -> int:
        """Count the requests; empty matches all."""
        return self.call_api(
            lambda api: api.requests.count_requests(user=user, verb=verb, resource=resource)
        )

    def set_kubelet(self, node: str, *, is_stopped: bool) -> None:
        """Stop or start the kubelet of a node: see `ControlEndpoint.set_kubelet`."""
        self.call_api(lambda api: api.control.set_kubelet(node, is_stopped=is_stopped))

    def save_state(self, path: Path) -> None:
        """Write the whole state, including secrets, to a file that only its owner can read."""
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
