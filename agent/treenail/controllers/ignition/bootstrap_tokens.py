"""Bootstrap tokens of Kubernetes: the credentials with which the kubelets of new machines join.

Each access token that is used has one bootstrap token of its own. Its secret is computed from the
access token, which no server stores, so all servers issue the same one and read no Secret for it.
"""

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass

from treenail.api.decode import Json
from treenail.clock import Clock, format_rfc3339
from treenail.controllers.ignition.tokens import TokenRecord
from treenail.errors import AlreadyExistsError, ConfigError, NotFoundError, UnreachableError
from treenail.kube.client import Client
from treenail.kube.resources import SECRETS

NAMESPACE = "kube-system"
"""The only namespace in which kube-apiserver accepts bootstrap tokens."""
SECRET_TYPE = "bootstrap.kubernetes.io/token"  # noqa: S105  # a type
SECRET_PREFIX = "bootstrap-token-"  # noqa: S105  # a name
MANAGER_LABEL = "app.kubernetes.io/managed-by"
MANAGER = "treenail-ignition"
USER_PREFIX = "system:bootstrap:"
"""kube-apiserver's name of the user with a bootstrap token; the ID follows."""
GROUP = "system:bootstrappers:treenail"
"""Group of all new machines."""
MACHINE_GROUP = "system:bootstrappers:treenail-machine"
USES_GROUP = "system:bootstrappers:treenail-uses"
LIFETIME_S = 3600.0
_RENEW_S = 600.0
_GROUP_LIMIT = 256
"""Characters after ``system:bootstrappers:`` (BootstrapGroupPattern, bootstrap/token/api)."""
_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
_SECRET_LENGTH = 16
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
    """Creates a bootstrap token for each access token, with a lifetime of an hour. Thread-safe.

    It writes Secrets of kube-system and reads none.
    """

    def __init__(self, client: Client, clock: Clock, target: JoinTarget) -> None:
        self._client = client
        self._clock = clock
        self._target = target
        self._lock = threading.Lock()
        self._expiries: dict[str, float] = {}
        self._pending: dict[str, Json] = {}

    def make_placeholder(self) -> bytes:
        """Return a kubeconfig as long as that of `issue`."""
        return self._target.format_kubeconfig("x" * 6 + "." + "x" * _SECRET_LENGTH)

    def issue(self, token: str, record: TokenRecord) -> bytes:
        """Create the bootstrap token or extend its lifetime; raise `ClusterError`.

        While the API server is unreachable the token waits for `create_pending`: the machine
        cannot join meanwhile either.
        """
        secret = derive_secret(token)
        now = self._clock.now()
        name = record.name
        if self._expiries.get(name, 0.0) < now + LIFETIME_S - _RENEW_S:
            body = build_secret(record, secret, now + LIFETIME_S)
            try:
                self._write_secret(name, body)
            except UnreachableError:
                with self._lock:
                    self._pending[name] = body
            self._expiries[name] = now + LIFETIME_S
        return self._target.format_kubeconfig(f"{name}.{secret}")

    def create_pending(self) -> None:
        """Create the tokens that wait for the API server; raise `ClusterError`."""
        for name, body in [*self._pending.items()]:
            self._write_secret(name, body)
            with self._lock:
                if self._pending.get(name) is body:
                    del self._pending[name]

    def revoke(self, name: str) -> None:
        """Delete the bootstrap token of an access token, if it exists; raise `ClusterError`."""
        self._expiries.pop(name, None)
        delete_bootstrap_token(self._client, name)

    def _write_secret(self, name: str, body: Json) -> None:
        try:
            self._client.create(SECRETS, body, namespace=NAMESPACE)
        except AlreadyExistsError:
            # Without a resourceVersion this replaces the object. The admission policy of the
            # manifests refuses it for a Secret of another program.
            self._client.update(SECRETS, SECRET_PREFIX + name, body, namespace=NAMESPACE)


def delete_bootstrap_token(client: Client, name: str) -> None:
    """Delete the bootstrap token of an access token, if it exists; raise `ClusterError`."""
    try:
        client.delete(SECRETS, SECRET_PREFIX + name, namespace=NAMESPACE)
    except NotFoundError:
        return


def derive_secret(token: str) -> str:
    """Return the secret part of the bootstrap token that belongs to an access token.

    The digest in the Secret of access tokens does not reveal it.
    """
    number = int.from_bytes(hmac.new(token.encode(), _PURPOSE, hashlib.sha256).digest(), "big")
    found = ""
    for _ in range(_SECRET_LENGTH):
        number, digit = divmod(number, len(_CHARACTERS))
        found += _CHARACTERS[digit]
    return found


def build_secret(record: TokenRecord, secret: str, expires: float) -> Json:
    """Build the Secret of a bootstrap token (type bootstrap.kubernetes.io/token)."""
    fields = {
        "token-id": record.name,
        "token-secret": secret,
        "expiration": format_rfc3339(expires),
        "usage-bootstrap-authentication": "true",
        "auth-extra-groups": ",".join(list_groups(record)),
        "description": f"access token {record.name} of treenail",
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": SECRET_TYPE,
        "metadata": {
            "name": SECRET_PREFIX + record.name,
            "namespace": NAMESPACE,
            "labels": {MANAGER_LABEL: MANAGER, "app.kubernetes.io/part-of": "treenail"},
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
        *([f"{MACHINE_GROUP}:{_encode_name(record.machine)}"] if record.machine else []),
    )
    for group in groups:
        if len(group.split(":", 2)[2]) > _GROUP_LIMIT:
            raise ConfigError(
                f"cannot create a bootstrap token for access token {record.name}: the name of its "
                "pool or machine is too long for a group of Kubernetes"
            )
    return groups


def _encode_name(name: str) -> str:
    return name.replace(".", ":")


def decode_name(text: str) -> str:
    """Return the name in a group."""
    return text.replace(":", ".")
