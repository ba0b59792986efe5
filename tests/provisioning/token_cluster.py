"""A cluster of the lab that keeps access tokens, and servers' views of them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.contract.client import Cluster
from tests.fakes.clock import FakeClock
from tests.provisioning.serving import LIMIT_S
from tests.waiting import wait_until
from treenail.api import component_names
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.clocks import SystemClock
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.kube.api_client import Client
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.provisioning.tokens.bootstrap_tokens import MachineCredentials, SharedCredentials
from treenail.provisioning.tokens.token_access import (
    PoolEvents,
    TokenAccess,
    TokenSettings,
)
from treenail.provisioning.tokens.token_store import TOKEN_SECRET, TokenStore
from treenail.provisioning.tokens.tokens import TokenRecord, make_token
from treenail_lab.apiserver.serving.server import LabServer

NAMESPACE = "treenail-ignition"
SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"
SECRET = f"{SECRETS}/{TOKEN_SECRET}"
_PATIENT = SystemClock()


@dataclass(frozen=True, slots=True)
class Replica:
    """One server's part for tokens."""

    store: TokenStore
    access: TokenAccess
    informers: InformerSet


@dataclass
class TokenCluster:
    """The API server, and a clock that all replicas share."""

    server: LabServer
    stack: ExitStack
    directory: Path
    clock: FakeClock = field(default_factory=FakeClock)

    @property
    def real_clock(self) -> SystemClock:
        """The clock of the API server."""
        return _PATIENT

    def __post_init__(self) -> None:
        self.admin = Cluster.of_kubeconfig(self.server.admin_kubeconfig)
        self.admin.post("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}}).ok()
        self.client = self.connect()

    def connect(self) -> Client:
        connection = read_kubeconfig(str(self.server.admin_kubeconfig))
        transport = HttpTransport(connection, _PATIENT, max_kept=4)
        self.stack.callback(transport.close)
        return Client(transport, limit_s=LIMIT_S)

    def make_store(self) -> TokenStore:
        return TokenStore(self.connect(), NAMESPACE, self.clock)

    def create_token(
        self, *, pool: str = "worker", uses: int = 1, ttl_s: float = 3600.0, machine: str = ""
    ) -> tuple[str, TokenRecord]:
        """Create a token as the command does."""
        token, record = make_token(
            pool, expires=self.clock.now() + ttl_s, uses=uses, machine=machine
        )
        self.make_store().change(lambda table: (table.put(record), None))
        return token, record

    def read_record(self, name: str) -> TokenRecord:
        return self.make_store().load().tokens[name]

    def start_replica(
        self,
        settings: TokenSettings = TokenSettings(),  # noqa: B008  # frozen
        credentials: MachineCredentials | None = None,
        pools: Sequence[MachineConfigPool] = (),
    ) -> Replica:
        """Start the part of a server, with a watch of its own; its upkeep runs on request."""
        client = self.connect()
        recorder = EventRecorder(client, component_names.IGNITION_SERVER, "tests", _PATIENT)
        events = PoolEvents(recorder, lambda: pools)
        informers = InformerSet(client, _PATIENT)
        store = TokenStore(client, NAMESPACE, self.clock)
        store.add_to_informers(informers)
        access = TokenAccess(
            store,
            self.clock,
            settings,
            credentials or SharedCredentials(),
            report_overuse=events.report_overuse,
        )
        self.stack.callback(informers.stop)
        watches = self.server.count_requests(verb="watch")
        informers.start()
        # The lists come first. A watch, of the Secret or of Nodes, that begins later would count as
        # a request of the test.
        wait_until(lambda: self.server.count_requests(verb="watch") >= watches + 2, limit_s=LIMIT_S)
        wait_until(lambda: store.observed is not None, limit_s=LIMIT_S)
        return Replica(store, access, informers)


@contextmanager
def run_token_cluster(directory: Path) -> Iterator[TokenCluster]:
    with LabServer(directory) as server, ExitStack() as stack:
        yield TokenCluster(server, stack, directory)
