"""The lab's API server: for a running event loop, and in a thread for tests and commands."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from aiohttp import web

from treenail.clocks import Clock, SystemClock
from treenail_lab.apiserver.access.authentication import (
    MASTERS,
    NODE_PREFIX,
    NODES,
    ApiUser,
    Authenticator,
    TokenIssuer,
)
from treenail_lab.apiserver.access.authorization import Authorizer, build_bootstrap_objects
from treenail_lab.apiserver.access.certificates import (
    CertificateAuthority,
    render_kubeconfig,
    write_private_file,
)
from treenail_lab.apiserver.controllers.controllers import ControllerLoop
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.registry.crds import CustomKinds
from treenail_lab.apiserver.registry.list_watch import WatchTable
from treenail_lab.apiserver.registry.registry import ObjectRegistry, WriteContext
from treenail_lab.apiserver.schema.kinds import KindRegistry
from treenail_lab.apiserver.serving.control_endpoint import ControlEndpoint
from treenail_lab.apiserver.serving.faults import Fault, FaultInjector, FaultMatch
from treenail_lab.apiserver.serving.http import ApiBackend, RequestLog, WebApplication
from treenail_lab.apiserver.serving.verbs import PodLogs, VerbDispatcher
from treenail_lab.apiserver.store import Store, take_snapshot

_LOOPBACK = "127.0.0.1"
_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
_ADMIN = ApiUser("kubernetes-admin", (MASTERS,))
# Clients are on this machine: they read the end of a watch within this time.
_SHUTDOWN_TIMEOUT_S = 0.1
_CLOSING_TURNS = 5
"""Turns of the loop: for a connection accepted last, for its TLS, and for the socket below it."""


class ApiServer:
    """A Kubernetes API server on loopback, over TLS.

    Its certificate authority is in ``directory`` and is reused. Its state is in memory and
    survives `stop` and another `start`, which uses the same port.
    """

    def __init__(self, directory: Path, *, port: int = 0, clock: Clock | None = None) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._clock = clock or SystemClock()
        self._authority = CertificateAuthority(directory)
        self._tokens = TokenIssuer(directory, self._clock)
        self._port = port
        self._runner: web.AppRunner | None = None
        self._listener: socket.socket | None = None
        self.store = Store()
        self.kinds = KindRegistry()
        self.registry = ObjectRegistry(self.store, self.kinds, self._clock)
        self.faults = FaultInjector(self._clock)
        self.watches = WatchTable(self.store, self._clock, self.faults.find_watch_pace)
        self.requests = RequestLog(self._clock)
        self.pod_logs = PodLogs(self.store)
        self.controllers = ControllerLoop(self.registry, self._authority)
        self.control = ControlEndpoint(
            store=self.store,
            faults=self.faults,
            requests=self.requests,
            watches=self.watches,
            controllers=self.controllers,
            custom_kinds=CustomKinds(self.store, self.kinds),
        )
        self._create_bootstrap_objects()

    @property
    def url(self) -> str:
        """``https://127.0.0.1:PORT``; the port is known once the server has been started."""
        return f"https://{_LOOPBACK}:{self._port}"

    @property
    def ca_file(self) -> Path:
        return self._authority.file

    @property
    def admin_kubeconfig(self) -> Path:
        """Return a kubeconfig of a member of system:masters."""
        return self.write_kubeconfig(_ADMIN.name, _ADMIN.groups)

    def write_kubeconfig(self, user: str, groups: Sequence[str] = ()) -> Path:
        """Write a kubeconfig with a client certificate for a user; only its owner can read it."""
        path = self._directory / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', user)}.kubeconfig"
        identity = self._authority.make_client_identity(user, groups)
        text = render_kubeconfig(
            server=self.url, authority=self._authority.pem, user=user, identity=identity
        )
        write_private_file(path, text.encode())
        return path

    def write_node_kubeconfig(self, node: str) -> Path:
        """Write the kubeconfig of a kubelet, which may change its own Node only."""
        return self.write_kubeconfig(f"{NODE_PREFIX}{node}", [NODES])

    def write_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """Write a kubeconfig with the token of a ServiceAccount, as its pods have."""
        user = f"system:serviceaccount:{namespace}:{name}"
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}"]
        token = self.issue_token(user, groups)
        path = self._directory / f"{namespace}-{name}.kubeconfig"
        text = render_kubeconfig(
            server=self.url, authority=self._authority.pem, user=user, token=token
        )
        write_private_file(path, text.encode())
        return path

    def issue_token(self, user: str, groups: Sequence[str] = ()) -> str:
        """Issue a bearer token for a user; it is valid as long as the directory exists."""
        return self._tokens.issue_token(user, groups)

    async def start(self) -> None:
        """Listen; requests are answered when this returns."""
        backend = ApiBackend(
            registry=self.registry,
            authenticator=Authenticator(
                self._tokens, self._find_service_account, self._find_secret
            ),
            authorizer=Authorizer(self.store),
            verbs=VerbDispatcher(self.registry, self._tokens),
            watches=self.watches,
            faults=self.faults,
            requests=self.requests,
            pod_logs=self.pod_logs,
            answer_control=self.control.answer_request,
        )
        runner = web.AppRunner(
            WebApplication(backend).app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
        )
        await runner.setup()
        self._runner = runner
        listener = socket.create_server((_LOOPBACK, self._port))
        self._listener = listener
        self._port = listener.getsockname()[1]
        context = self._authority.make_server_context(self._directory)
        await web.SockSite(runner, listener, ssl_context=context).start()
        self.controllers.attach_loop(asyncio.get_running_loop())

    async def stop(self) -> None:
        """Close all watches and connections and stop listening; the state stays."""
        self.controllers.detach_loop()
        self.watches.cut_watches()
        if self._runner is not None:
            await self._end_accepting()
            self._abort_connections()
            await self._runner.cleanup()
            self._runner = None
            for _ in range(_CLOSING_TURNS):
                self._abort_connections()
                await asyncio.sleep(0)

    async def _end_accepting(self) -> None:
        # A server that is closed refuses the connection that the loop accepted in the same turn,
        # and leaves its socket open (asyncio.base_events.Server._attach).
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
        for _ in range(_CLOSING_TURNS):
            await asyncio.sleep(0)

    def _abort_connections(self) -> None:
        # close() would wait for the peer, which may never answer. aiohttp knows neither connections
        # that it closes nor those whose TLS handshake goes on; the loop does.
        for transport in list(getattr(asyncio.get_running_loop(), "_transports", {}).values()):
            address = transport.get_extra_info("sockname")
            if isinstance(address, tuple) and address[1] == self._port:
                transport.abort()

    def inject_fault(
        self,
        fault: Fault,
        match: FaultMatch | None = None,
        *,
        times: int | None = None,
        for_s: float | None = None,
    ) -> int:
        """Begin a fault: see `ControlEndpoint.inject_fault`."""
        return self.control.inject_fault(fault, match, times=times, for_s=for_s)

    def save_state(self, path: Path) -> None:
        """Write the whole state, including secrets, to a file that only its owner can read."""
        write_private_file(path, json.dumps(take_snapshot(self.store)).encode())

    def load_state(self, document: Json) -> None:
        """Replace the whole state: see `ControlEndpoint.load_state`."""
        self.control.load_state(document)

    def _create_bootstrap_objects(self) -> None:
        write = WriteContext(_ADMIN, "kube-apiserver")
        for name in _NAMESPACES:
            kind = self.kinds.find_kind("", "v1", "namespaces")
            self.registry.create_object(kind, "", {"metadata": {"name": name}}, write)
        for storage, obj in build_bootstrap_objects():
            group, plural = storage
            self.registry.create_object(self.kinds.find_kind(group, "v1", plural), "", obj, write)

    def _find_secret(self, namespace: str, name: str) -> Json | None:
        return self.store.find_object(("", "secrets"), (namespace, name))

    def _find_service_account(self, namespace: str, name: str) -> Json | None:
        return self.store.find_object(("", "serviceaccounts"), (namespace, name))


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
