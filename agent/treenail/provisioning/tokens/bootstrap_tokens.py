"""Bootstrap tokens of Kubernetes: the credentials with which the kubelets of new machines join.

Each machine that uses an access token has one bootstrap token of its own. ID and secret are
computed from the access token, which no server stores, and from the address of the machine, so all
servers issue the same one and read no Secret for it. `SharedCredentials` gives every machine the
same kubeconfig instead.
"""

import base64
import hashlib
import hmac
import json
import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from treenail import clocks, errors
from treenail.api import component_names, decode, object_meta
from treenail.kube import api_client, resources
from treenail.provisioning.tokens.tokens import TokenRecord

log = logging.getLogger(__name__)

NAMESPACE = "kube-system"
"""The only namespace in which kube-apiserver accepts bootstrap tokens."""
SECRET_TYPE = "bootstrap.kubernetes.io/token"  # noqa: S105  # a type
SECRET_PREFIX = "bootstrap-token-"  # noqa: S105  # a name
MANAGER_LABEL = "app.kubernetes.io/managed-by"
MANAGER = component_names.IGNITION_SERVER
USER_PREFIX = "system:bootstrap:"
"""kube-apiserver's name of the user with a bootstrap token; the ID follows."""
GROUP = "system:bootstrappers:treenail"
"""Group of all new machines."""
MACHINE_GROUP = "system:bootstrappers:treenail-machine"
USES_GROUP = "system:bootstrappers:treenail-uses"
TOKEN_GROUP = "system:bootstrappers:treenail-token"  # noqa: S105  # a group
_GROUP_LIMIT = 256
"""Characters after ``system:bootstrappers:`` (BootstrapGroupPattern, bootstrap/token/api)."""
MAX_POOL_LENGTH = _GROUP_LIMIT - len(GROUP.removeprefix("system:bootstrappers:")) - 1
MAX_MACHINE_LENGTH = _GROUP_LIMIT - len(MACHINE_GROUP.removeprefix("system:bootstrappers:")) - 1
LIFETIME_S = 3600.0
_RENEW_S = 600.0
_MAX_SKEW_S = 60.0
"""Tolerated difference between the clocks of this server and of the API server."""
_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH, _SECRET_LENGTH = 6, 16
_PURPOSE = b"treenail bootstrap token"


@dataclass(frozen=True, slots=True)
class JoinTarget:
    """The API server, as new machines reach it."""

    url: str
    load_authority: Callable[[], bytes]
    """Returns the CA of its certificate, PEM; raises `ConfigError`."""

    def format_kubeconfig(self, token: str) -> bytes:
        """Return a kubeconfig with a bearer token."""
        cluster = {
            "server": self.url,
            "certificate-authority-data": base64.b64encode(self.load_authority()).decode("ascii"),
        }
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "local", "cluster": cluster}],
            "users": [{"name": "kubelet", "user": {"token": token}}],
            "contexts": [{"name": "kubelet", "context": {"cluster": "local", "user": "kubelet"}}],
            "current-context": "kubelet",
        }
        return json.dumps(document).encode() + b"\n"


class BootstrapCredentials:
    """Creates a bootstrap token for each machine, with a lifetime of an hour. Thread-safe.

    It writes Secrets of kube-system and reads none.
    """

    def __init__(self, client: api_client.Client, clock: clocks.Clock, target: JoinTarget) -> None:
        self._client = client
        self._clock = clock
        self._target = target
        self._lock = threading.Lock()
        self._expiries: dict[str, float] = {}
        self._pending: dict[str, _PendingToken] = {}
        self._is_skew_logged = False

    def make_placeholder(self) -> bytes:
        """Return a kubeconfig as long as that of `issue`."""
        return self._target.format_kubeconfig("x" * _ID_LENGTH + "." + "x" * _SECRET_LENGTH)

    def issue(
        self, token: str, record: TokenRecord, address: str, *, is_offline: bool = False
    ) -> bytes:
        """Create the bootstrap token or extend its lifetime; raise `ClusterError`.

        While the API server is unreachable the token waits for `create_pending`: the machine
        cannot join meanwhile either. With ``is_offline`` it waits without an attempt.
        """
        identity = compute_identity(record.name, record.uses, address)
        secret = derive_secret(token, address if record.uses > 1 else "")
        now = self._clock.now()
        # Another server may have deleted that of a machine which joined from the same address.
        is_shared = record.uses > 1
        if is_shared or self._expiries.get(identity, 0.0) < now + LIFETIME_S - _RENEW_S:
            body = build_secret(record, identity, secret, now + LIFETIME_S)
            if is_offline or not self._try_write(identity, body):
                with self._lock:
                    self._pending[identity] = _PendingToken(record.name, body)
            self._expiries[identity] = now + LIFETIME_S
        return self._target.format_kubeconfig(f"{identity}.{secret}")

    def create_pending(self, valid: Collection[str]) -> None:
        """Create the tokens that wait for the API server; raise `ClusterError`.

        ``valid`` are the names of the access tokens that exist: drop those of others.
        """
        for identity, pending in [*self._pending.items()]:
            if pending.token in valid:
                self._write_secret(identity, pending.body)
            with self._lock:
                if self._pending.get(identity) is pending:
                    del self._pending[identity]

    def revoke(self, identity: str) -> None:
        """Delete a bootstrap token, if it exists; raise `ClusterError`."""
        self._expiries.pop(identity, None)
        with self._lock:
            self._pending.pop(identity, None)
        delete_bootstrap_token(self._client, identity)

    def _try_write(self, identity: str, body: decode.Json) -> bool:
        """Return False when the API server is unreachable."""
        try:
            self._write_secret(identity, body)
        except errors.UnreachableError:
            return False
        return True

    def _write_secret(self, identity: str, body: decode.Json) -> None:
        try:
            created = self._client.create(resources.SECRETS, body, namespace=NAMESPACE)
        except errors.AlreadyExistsError:
            # Without a resourceVersion this replaces the object. The admission policy of the
            # manifests refuses it for a Secret of another program.
            self._client.update(
                resources.SECRETS, SECRET_PREFIX + identity, body, namespace=NAMESPACE
            )
        else:
            self._check_clock(created)

    def _check_clock(self, created: decode.Json) -> None:
        """Log once that the API server has another time: it decides when a token ends."""
        meta = object_meta.read_metadata(created, "Secret")
        created_at = clocks.parse_rfc3339(meta.created)
        if created_at is None:
            return
        behind_s = created_at - self._clock.now()
        is_skewed = abs(behind_s) > _MAX_SKEW_S
        if is_skewed and not self._is_skew_logged:
            log.error(
                "the clock of this server is %.0f s %s that of the API server: bootstrap "
                "tokens end too %s, and access tokens too %s; correct the clock",
                abs(behind_s),
                *(("behind", "early", "late") if behind_s > 0 else ("ahead of", "late", "early")),
            )
        self._is_skew_logged = is_skewed


@dataclass(frozen=True, slots=True)
class _PendingToken:
    token: str
    """Name of the access token."""
    body: decode.Json


def delete_bootstrap_token(client: api_client.Client, identity: str) -> None:
    """Delete a bootstrap token, if it exists; raise `ClusterError`."""
    try:
        client.delete(resources.SECRETS, SECRET_PREFIX + identity, namespace=NAMESPACE)
    except errors.NotFoundError:
        return


def compute_identity(token: str, uses: int, address: str) -> str:
    """Return the ID of the bootstrap token for a machine at an address; it is no secret.

    That of an access token for one machine has the name of the access token. ``token`` is that
    name.
    """
    if uses == 1:
        return token
    return _encode_digits(hashlib.sha256(f"{token} {address}".encode()).digest(), _ID_LENGTH)


def list_identities(record: TokenRecord) -> list[str]:
    """Return the IDs of the bootstrap tokens that the uses of an access token have."""
    identities = (compute_identity(record.name, record.uses, use.address) for use in record.used)
    return [*dict.fromkeys(identities)]


def derive_secret(token: str, address: str = "") -> str:
    """Return the secret part of the bootstrap token that belongs to an access token.

    The digest in the Secret of access tokens does not reveal it. ``address`` is that of the
    machine, for an access token of several.
    """
    purpose = _PURPOSE + (f" {address}".encode() if address else b"")
    return _encode_digits(
        hmac.new(token.encode(), purpose, hashlib.sha256).digest(), _SECRET_LENGTH
    )


def _encode_digits(digest: bytes, length: int) -> str:
    number = int.from_bytes(digest, "big")
    digits = ""
    for _ in range(length):
        number, digit = divmod(number, len(_CHARACTERS))
        digits += _CHARACTERS[digit]
    return digits


def build_secret(record: TokenRecord, identity: str, secret: str, expires: float) -> decode.Json:
    """Build the Secret of a bootstrap token (type bootstrap.kubernetes.io/token)."""
    fields = {
        "token-id": identity,
        "token-secret": secret,
        "expiration": clocks.format_rfc3339(expires),
        "usage-bootstrap-authentication": "true",
        "auth-extra-groups": ",".join(list_groups(record)),
        "description": f"access token {record.name} of treenail",
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": SECRET_TYPE,
        "metadata": {
            "name": SECRET_PREFIX + identity,
            "namespace": NAMESPACE,
            "labels": {MANAGER_LABEL: MANAGER, **component_names.PART_OF_LABELS},
        },
        "data": {
            name: base64.b64encode(text.encode()).decode("ascii") for name, text in fields.items()
        },
    }


def list_groups(record: TokenRecord) -> tuple[str, ...]:
    """Return the groups of a machine. They say what the approval of its certificate must know.

    A group cannot have dots, so colons stand for those of names. Raises `ConfigError` for a name
    that is too long.
    """
    groups = (
        GROUP,
        f"{GROUP}:{_encode_name(record.pool)}",
        f"{USES_GROUP}:{record.uses}",
        f"{TOKEN_GROUP}:{record.name}",
        *([f"{MACHINE_GROUP}:{_encode_name(record.machine)}"] if record.machine else []),
    )
    for group in groups:
        if len(group.split(":", 2)[2]) > _GROUP_LIMIT:
            raise errors.ConfigError(
                f"cannot create a bootstrap token for access token {record.name}: the name of its "
                "pool or machine is too long for a group of Kubernetes"
            )
    return groups


def _encode_name(name: str) -> str:
    return name.replace(".", ":")


def decode_name(text: str) -> str:
    """Return the name in a group."""
    return text.replace(":", ".")


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
