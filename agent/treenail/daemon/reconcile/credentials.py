"""Certificates and logins that the cluster distributes to this node, kept current."""

import logging
from collections.abc import Callable
from itertools import chain

from treenail import errors
from treenail.daemon.local.status_file import StatusFile
from treenail.daemon.reconcile.context import NodeInterfaces
from treenail.log import MessageId
from treenail.update import status
from treenail.update.decision import node_state

log = logging.getLogger(__name__)

# Reasons of Events.
_CONTROLLER_CONFIG, _PULL_SECRET = "ControllerConfigNotApplied", "PullSecretUnusable"
_TRUST_STORE, _BOOTSTRAP_REGISTRY = "TrustStoreNotUpdated", "BootstrapRegistryUnusable"


class CredentialSync:
    """Installs certificates and pull secrets, and reports each new problem once."""

    def __init__(self, interfaces: NodeInterfaces, status_file: StatusFile) -> None:
        self._interfaces = interfaces
        self._status_file = status_file
        self._problems: dict[str, tuple[str, ...]] = {}
        """The last problems, by the reason of their Events."""

    def sync_all(self) -> None:
        """Install what changed since the last pass."""
        self._sync_certificates()
        self._sync_bootstrap_registry()
        self._sync_pull_secrets()
        self.sync_trust_store()

    def sync_during_transaction(self) -> None:
        """Install rotated certificates; leave a pull its login, unless its registry went."""
        self._sync_certificates()
        if self._sync_bootstrap_registry():
            self._sync_pull_secrets()

    def sync_trust_store(self) -> None:
        """Update the trust store of the machine from its anchors."""
        self._report_problems(_TRUST_STORE, self._interfaces.trust_store.sync_store)

    def _sync_certificates(self) -> None:
        self._report_problems(_CONTROLLER_CONFIG, self._interfaces.certificates.sync_files)

    def _sync_pull_secrets(self) -> None:
        self._report_problems(_PULL_SECRET, self._interfaces.pull_secrets.install_secrets)

    def _sync_bootstrap_registry(self) -> bool:
        """Remove the files of the bootstrap registry when requested; return whether they went."""
        files = self._interfaces.bootstrap_registry
        node = self._interfaces.cluster.get_cached_node()
        requested = "" if node is None else node_state.summarize_node(node).removed_registry
        self._report_problems(_BOOTSTRAP_REGISTRY, lambda: files.sync_files(requested))
        self._status_file.show_bootstrap_registry(files.registry)
        if not files.removed:
            return False
        message = f"Removed mirror, CA and login of the bootstrap registry {files.removed}"
        self._interfaces.cluster.record_event(
            status.NodeEvent("Normal", "BootstrapRegistryRemoved", message)
        )
        return True

    def _report_problems(self, reason: str, sync: Callable[[], tuple[str, ...]]) -> None:
        """Call ``sync``, and record an Event with this reason once per new problem."""
        try:
            problems = sync()
        except errors.TreenailError as error:
            problems = (status.format_reason(error),)
        for problem in problems:
            if problem not in self._problems.get(reason, ()):
                log.warning("%s", problem, extra={"message_id": MessageId.CREDENTIALS_INVALID})
                self._interfaces.cluster.record_event(status.NodeEvent("Warning", reason, problem))
        self._problems[reason] = problems
        self._status_file.show_credential_problems(
            list(chain.from_iterable(self._problems.values()))
        )
