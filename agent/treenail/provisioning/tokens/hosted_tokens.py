"""Tokens and configs of all NodePools that treenail owns, from the Secrets of their control planes.

The server reads Secrets and writes none. It records whom it served in one ConfigMap of each control
plane, so that the condition ReachedIgnitionEndpoint says what a machine really got.
"""

import base64
import binascii
import hashlib
import hmac
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from treenail import clocks, errors
from treenail.api import decode, machineconfigpool, object_meta
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import token_secret
from treenail.config.ignition import hosted_payload
from treenail.controllers.runtime import informer_set
from treenail.kube import api_client, resources, watch
from treenail.provisioning.content import source
from treenail.provisioning.tokens import tokens

_KUBECONFIG_SECRET, _KUBECONFIG_KEY = "bootstrap-kubeconfig", "kubeconfig"
"""With which kubelets join; HyperShift's control plane operator writes it."""
_BOOT_AGAIN = "a machine needs the user data that its NodePool has now"


@dataclass(frozen=True, slots=True)
class HostedToken:
    """A token Secret: the config of a NodePool, and who may have it."""

    namespace: str
    """That of the control plane."""
    pool: str
    """``NAMESPACE/NAME`` of the NodePool."""
    target: str
    """Hash of the config."""
    digests: tuple[bytes, ...] = field(repr=False)
    """SHA-256 of the token and of the one before."""
    notes: Mapping[str, str]
    """Annotations, of which one may say when the token ends."""
    config: source.PackedConfig | None
    problem: str = ""
    """Why the config cannot be served; empty if it can."""

    @classmethod
    def from_json(cls, secret: decode.Json) -> "HostedToken":
        """Read a Secret; raise `ConfigError` for malformed metadata."""
        metadata = object_meta.read_metadata(secret)
        notes, config, problem = metadata.annotations, None, ""
        target = notes.get(hosted_key.TARGET_CONFIG, "")
        values = (token_secret.read_value(secret, key) for key in ("token", "old_token"))
        digests = tuple(hashlib.sha256(value).digest() for value in values if value)
        try:
            config = _read_config(secret, target)
        except errors.ConfigError as error:
            problem = f"Secret {metadata.namespace}/{metadata.name}: {error}"
        pool = notes.get(hosted_key.NODE_POOL, "")
        return cls(metadata.namespace, pool, target, digests, notes, config, problem)


def _read_config(secret: decode.Json, target: str) -> source.PackedConfig:
    """Return the rendered config under the name ``target``; for InPlace it is in the payload.

    Nodes compare the name with the hash that the NodePool wants, and at their first boot all files
    that name their config.
    """
    document = hosted_payload.unpack_secret(secret, source.CONFIG_LIMIT)
    metadata = resources.get_object(document, "metadata") | {"name": target}
    config = source.PackedConfig.from_json(document | {"metadata": metadata})
    if config.os_image_url != token_secret.read_text(secret, "os-image"):
        raise errors.ConfigError("os-image: expected osImageURL of the config")
    return config


class HostedTokens:
    """A `PoolSource` and an `Access` for machines of hosted clusters. Thread-safe.

    While the API server does not answer, it continues with the last known Secrets.
    """

    def __init__(
        self,
        informers: informer_set.InformerSet,
        client: api_client.Client,
        clock: clocks.Clock,
        namespaces: Sequence[str] = (),
    ) -> None:
        """Add the views; the caller starts the informers. No namespaces are all of them."""
        self._informers, self._client, self._clock = informers, client, clock
        self._lock = threading.Lock()
        self._reached: set[tuple[str, str, str]] = set()
        self._views, self._kubeconfigs = [], []
        for namespace in namespaces or ("",):
            labelled = watch.WatchScope(
                resources.SECRETS, namespace, label_selector=token_secret.TOKEN_LABEL
            )
            self._views.append(informers.add_view(labelled, HostedToken.from_json))
            named = watch.WatchScope(
                resources.SECRETS, namespace, field_selector=f"metadata.name={_KUBECONFIG_SECRET}"
            )
            self._kubeconfigs.append(informers.add_view(named, _read_kubeconfig))

    def check(self, token: str, pool: str, address: str) -> tokens.AccessVerdict:  # noqa: ARG002  # interface
        """Decide by the token alone; what else a request says of its NodePool counts nothing."""
        try:
            presented = base64.b64decode(token, validate=True)
        except (binascii.Error, ValueError):
            presented = b""
        if not presented:
            return tokens.AccessVerdict(
                HTTPStatus.UNAUTHORIZED,
                f"expected one header Authorization: Bearer, with a token in base64; {_BOOT_AGAIN}",
            )
        digest = hashlib.sha256(presented).digest()
        # All are compared, so that the time says nothing about a token.
        found = [
            (key, known)
            for view in self._views
            for key, known in view.get_all().items()
            if [each for each in known.digests if hmac.compare_digest(each, digest)]
        ]
        if len(found) != 1 or token_secret.is_expired(found[0][1].notes, self._clock.now()):
            reason = f"no NodePool has this token now: try again later; {_BOOT_AGAIN}"
            return tokens.AccessVerdict(HTTPStatus.NETWORK_AUTHENTICATION_REQUIRED, reason)
        key, known = found[0]
        name = f"{known.namespace}/{_KUBECONFIG_SECRET}"
        kubeconfigs = (view.find(name) for view in self._kubeconfigs)
        return tokens.AccessVerdict(
            token_name=key,
            pool=known.pool,
            source=key,
            kubeconfig=next(filter(None, kubeconfigs), None),
        )

    def claim(self, verdict: tokens.AccessVerdict) -> tokens.AccessVerdict:
        """Allow the request: no token has a number of uses."""
        return verdict

    def confirm_sent(self, verdict: tokens.AccessVerdict) -> None:
        """Record that a machine of the NodePool got the config, once; may raise `ClusterError`."""
        if (known := self._find(verdict.source)) is None:
            return
        name = known.pool.rpartition("/")[2]
        place = (known.namespace, name, known.target)
        with self._lock:
            if place in self._reached:
                return
            self._client.patch(
                resources.CONFIGMAPS,
                token_secret.REACHED_CONFIGMAP,
                {"data": {name: known.target}},
                namespace=known.namespace,
            )
            self._reached.add(place)

    def release(self, verdict: tokens.AccessVerdict) -> None:
        """Do nothing."""

    def read_inputs(self, pool: str) -> source.ServedInputs:
        """Read the inputs from a Secret, ``NAMESPACE/NAME``; raise `SourceError`."""
        known = self._find(pool)
        if known is None:
            raise source.SourceUnreadyError(f"Secret {pool} was deleted")
        if known.config is None or known.problem:
            raise source.SourceError(f"cannot serve a config: {known.problem}")
        image = known.config.os_image_url
        return source.ServedInputs(
            machineconfigpool.MachineConfigPool(object_meta.ObjectMeta(known.pool)),
            known.config,
            None,
            source.SelectedImage("", "the config names it", image),
            (known.config.name, known.config.version),
        )

    def has_pool(self, name: str) -> bool:
        """Return whether a NodePool, ``NAMESPACE/NAME``, has a token."""
        return any(known.pool == name for view in self._views for known in view.get_all().values())

    def get_pools(self) -> Iterable[machineconfigpool.MachineConfigPool]:
        """Return nothing: NodePools are no MachineConfigPools."""
        return ()

    def describe_staleness(self) -> str:
        """Say why the Secrets may be outdated; empty when they are current."""
        return self._informers.summarize_problem()

    def describe_unready(self) -> str:
        """Say why no token is known yet; empty once one control plane has answered."""
        is_listed = any(view.listed_at is not None for view in self._views)
        return "" if is_listed else self._informers.unsynced_reason

    def _find(self, key: str) -> HostedToken | None:
        return next(filter(None, (view.find(key) for view in self._views)), None)


def _read_kubeconfig(secret: decode.Json) -> bytes | None:
    return token_secret.read_value(secret, _KUBECONFIG_KEY) or None
