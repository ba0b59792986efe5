"""Credentials with which the kubelets of new machines join the cluster."""

from collections.abc import Callable
from typing import Protocol

from treenail.controllers.ignition.tokens import TokenRecord


class MachineCredentials(Protocol):
    """Makes the kubeconfigs with which kubelets join the cluster."""

    def make_placeholder(self) -> bytes | None:
        """Return a kubeconfig as long as the real one; None for none."""

    def issue(self, token: str, record: TokenRecord) -> bytes | None:
        """Return the kubeconfig for a machine with this token; raise `TreenailError`.

        The credential is the same for every request with this token.
        """

    def create_pending(self) -> None:
        """Create credentials that wait for the API server; raise `TreenailError`."""

    def revoke(self, name: str) -> None:
        """Revoke the credential of an access token; raise `TreenailError`."""


class SharedCredentials:
    """Gives every machine the same kubeconfig, as the Machine Config Operator does."""

    def __init__(self, load_kubeconfig: Callable[[], bytes | None] = lambda: None) -> None:
        self._load_kubeconfig = load_kubeconfig

    def make_placeholder(self) -> bytes | None:
        """Return the kubeconfig."""
        return self._load_kubeconfig()

    def issue(self, token: str, record: TokenRecord) -> bytes | None:  # noqa: ARG002  # interface
        """Return the kubeconfig."""
        return self._load_kubeconfig()

    def create_pending(self) -> None:
        """Do nothing."""

    def revoke(self, name: str) -> None:
        """Do nothing: other machines have the same credential."""
