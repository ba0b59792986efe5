"""The lab's API server: in an event loop of one's own, or in a thread beside a test."""

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from aiohttp import web

from treenail.clock import Clock, SystemClock
from treenail.lab.apiserver.authorization import Authorizer, bootstrap_objects
from treenail.lab.apiserver.crds import Definitions
from treenail.lab.apiserver.kinds import Kinds
from treenail.lab.apiserver.objects import Json
from treenail.lab.apiserver.pki import Authority, kubeconfig, write_private
from treenail.lab.apiserver.registry import Registry, Write
from treenail.lab.apiserver.store import Store
from treenail.lab.apiserver.users import MASTERS, NODE_PREFIX, NODES, Authenticator, Tokens, User
from treenail.lab.apiserver.verbs import Verbs
from treenail.lab.apiserver.watch import Watches
from treenail.lab.apiserver.web import Web

_T = TypeVar("_T")
_LOOPBACK = "127.0.0.1"
_START_LIMIT_S = 10.0
_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
_ADMIN = User("kubernetes-admin", (MASTERS,))


class ApiServer:
    """A Kubernetes API server on loopback, over TLS.

    Its certificate authority lives in ``directory`` and is found there again; its state lives in
    memory and outlives :meth:`stop` and another :meth:`start`, which uses the same port.
    """

    def __init__(self, directory: Path, *, port: int = 0, clock: Clock | None = None) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._clock = clock or SystemClock()
        self._authority = Authority(directory)
        self._tokens = Tokens(directory, self._clock)
        self._port = port
        self._runner: web.AppRunner | None = None
        self.store = Store()
        self.kinds = Kinds()
        self.registry = Registry(self.store, self.kinds, self._clock)
        self._watches = Watches(self.store, self._clock)
        Definitions(self.store, self.kinds)
        self._bootstrap()

    @property
    def url(self) -> str:
        """``https://127.0.0.1:PORT``; the port is known once the server has been started."""
        return f"https://{_LOOPBACK}:{self._port}"

    @property
    def ca_file(self) -> Path:
        return self._authority.file

    @property
    def admin_kubeconfig(self) -> Path:
        """A kubeconfig that may do everything."""
        return self.kubeconfig_for(_ADMIN.name, _ADMIN.groups)

    def kubeconfig_for(self, user: str, groups: Sequence[str] = ()) -> Path:
        """A kubeconfig, readable by its owner only, with a client certificate for a user."""
        path = self._directory / f"{user.replace(':', '-').replace('/', '-')}.kubeconfig"
        identity = self._authority.client_identity(user, groups)
        text = kubeconfig(
            server=self.url, authority=self._authority.pem, user=user, identity=identity
        )
        write_private(path, text.encode())
        return path

    def node_kubeconfig(self, node: str) -> Path:
        """A kubeconfig as a kubelet has it: it may change its own Node only."""
        return self.kubeconfig_for(f"{NODE_PREFIX}{node}", [NODES])

    def token_for(self, user: str, groups: Sequence[str] = ()) -> str:
        """A bearer token for a user."""
        return self._tokens.issue(user, groups)

    async def start(self) -> None:
        """Listen; returns when requests are answered."""
        authenticator = Authenticator(self._tokens, self._service_account)
        application = Web(
            self.registry,
            authenticator,
            Authorizer(self.store),
            Verbs(self.registry),
            self._watches,
        )
        self._runner = web.AppRunner(
            application.app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        listener = socket.create_server((_LOOPBACK, self._port))
        self._port = listener.getsockname()[1]
        context = self._authority.server_context(self._directory)
        await web.SockSite(self._runner, listener, ssl_context=context).start()

    async def stop(self) -> None:
        """End all watches and connections and stop listening; the state stays."""
        if self._runner is not None:
            self._watches.cut(lambda *_: True)
            await self._runner.cleanup()
            self._runner = None

    def _bootstrap(self) -> None:
        write = Write(_ADMIN, "kube-apiserver")
        for name in _NAMESPACES:
            kind = self.kinds.find("", "v1", "namespaces")
            self.registry.create(kind, "", {"metadata": {"name": name}}, write)
        for storage, obj in bootstrap_objects():
            group, plural = storage
            self.registry.create(self.kinds.find(group, "v1", plural), "", obj, write)

    def _service_account(self, namespace: str, name: str) -> Json | None:
        return self.store.get(("", "serviceaccounts"), (namespace, name))


class LabServer:
    """An :class:`ApiServer` in a thread of its own, for tests and commands."""

    def __init__(self, directory: Path, port: int = 0, *, clock: Clock | None = None) -> None:
        self.api = ApiServer(directory, port=port, clock=clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return self.api.url

    @property
    def ca_file(self) -> Path:
        return self.api.ca_file

    @property
    def admin_kubeconfig(self) -> Path:
        return self.api.admin_kubeconfig

    def kubeconfig_for(self, user: str, groups: Sequence[str] = ()) -> Path:
        return self.api.kubeconfig_for(user, groups)

    def node_kubeconfig(self, node: str) -> Path:
        return self.api.node_kubeconfig(node)

    def token_for(self, user: str, groups: Sequence[str] = ()) -> str:
        return self.api.token_for(user, groups)

    def start(self) -> "LabServer":
        """Serve; returns when requests are answered."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_serve, args=(loop,), name="lab-apiserver", daemon=True)
        thread.start()
        self._loop, self._thread = loop, thread
        try:
            asyncio.run_coroutine_threadsafe(self.api.start(), loop).result(_START_LIMIT_S)
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
        asyncio.run_coroutine_threadsafe(self.api.stop(), loop).result(_START_LIMIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_START_LIMIT_S)

    def __enter__(self) -> "LabServer":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def call(self, action: Callable[[ApiServer], _T]) -> _T:
        """The result of an action on the server, run in its thread between two requests."""
        loop = self._loop
        if loop is None:
            return action(self.api)

        async def run() -> _T:
            return action(self.api)

        return asyncio.run_coroutine_threadsafe(run(), loop).result(_START_LIMIT_S)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
