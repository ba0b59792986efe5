"""Credentials with which the kubelets of new machines join the cluster."""

from collections.abc import Callable, Collection
from typing import Protocol

from treenail.provisioning.tokens.tokens import TokenRecord


class MachineCredentials(Protocol):
    """Makes the kubeconfigs with which kubelets join the cluster."""

    def make_placeholder(self) -> bytes | None:
        """Return a kubeconfig as long as the real one; None for none."""

    def issue(
        self, token: str, record: TokenRecord, address: str, *, is_offline: bool = False
    ) -> bytes | None:
        """Return the kubeconfig for a machine with this token; raise `TreenailError`.

        The credential is the same for every request with this token from this address.
        ``is_offline``: the API server is unreachable, so that the credential must wait for it.
        """

    def create_pending(self, valid: Collection[str]) -> None:
        """Create credentials that wait for the API server; raise `TreenailError`.

        ``valid`` are the names of the access tokens that exist: drop the credentials of others.
        """

    def revoke(self, identity: str) -> None:
        """Revoke the credential with this ID; raise `TreenailError`."""


class SharedCredentials:
    """Gives every machine the same kubeconfig, as the Machine Config Operator does."""

    def __init__(self, load_kubeconfig: Callable[[], bytes | None] = lambda: None) -> None:
        self._load_kubeconfig = load_kubeconfig

    def make_placeholder(self) -> bytes | None:
        """Return the kubeconfig."""
        return self._load_kubeconfig()

    def issue(
        self,
        token: str,  # noqa: ARG002  # interface
        record: TokenRecord,  # noqa: ARG002  # interface
        address: str,  # noqa: ARG002  # interface
        *,
        is_offline: bool = False,  # noqa: ARG002  # interface
    ) -> bytes | None:
        """Return the kubeconfig."""
        return self._load_kubeconfig()

    def create_pending(self, valid: Collection[str]) -> None:
        """Do nothing."""

    def revoke(self, identity: str) -> None:
        """Do nothing: other machines have the same credential."""
