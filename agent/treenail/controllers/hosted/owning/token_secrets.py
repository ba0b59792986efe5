"""Decide about the Secrets that new machines of a NodePool fetch their config with. Pure.

A token Secret has one config and the token for it; its name has the target hash. A user-data Secret
points a machine to the Ignition server, with a token. Templates of machines name it, so that it
keeps its name while nothing must roll, and then leads to another token Secret.

A token is replaced after 5.5 h and accepted for 5.5 h more. A machine that is younger can thus
always fetch, also with the token Secret of a template that was replaced meanwhile.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from treenail import clocks
from treenail.api import component_names, decode, object_meta
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool, token_secret
from treenail.config.ignition import pointer
from treenail.controllers.hosted.config import pool_config
from treenail.kube import resources

RENEWAL_S = 5.5 * 3600
"""Half of the lifetime of a token."""
EXPIRY_S = 2 * 3600.0
"""From the replacement of a token Secret to its deletion; HyperShift's."""
_SKEW_S = 300.0
"""The API server's clock, which stamps machines, may differ from this one."""
_POINTER_VERSION = "3.2.0"
_RECHECK_S = 600.0
_HASH = re.compile(r"[0-9a-f]{16}")
_Data = dict[str, object]


@dataclass(frozen=True, slots=True)
class SecretFacts:
    """Facts about a NodePool and its Secrets, which are in the namespace of the control plane."""

    pool: nodepool.NodePool
    namespace: str
    """Namespace of the control plane."""
    config: pool_config.PoolConfig | None
    """None while it cannot be generated: tokens are renewed all the same."""
    rolled_hash: str
    """Hash in the name of the user-data Secret that the template of the pool names, or will name.

    Empty for a pool that never had a config.
    """
    ignition_url: str
    """``https://HOST:PORT``, where machines fetch their config."""
    found: Mapping[str, decode.Json] = field(repr=False)
    """Secrets of the namespace by name: those with `token_secret.TOKEN_LABEL` or `USER_DATA_LABEL`,
    and for KubeVirt each ``USER-DATA-userdata``. Those of other pools and programs stay as they
    are."""
    machines: Sequence[clusterapi.ClusterMachine]
    """All machines of the pool."""
    now: float
    templates: Collection[str] = ()
    """User-data Secrets that the MachineDeployment and MachineSets with replicas name: another
    machine may boot from them."""
    packed: str = field(default="", repr=False)
    """The packed config: for a pool whose nodes get it in place too, the payload."""
    pull_secret: bytes = field(default=b"", repr=False)
    trust_bundle: bytes = field(default=b"", repr=False)
    """Contents whose digests the token Secret has."""
    reached: str = ""
    """Target hash that a machine fetched last: the value of `token_secret.REACHED_CONFIGMAP`."""
    authorities: bytes = field(default=b"", repr=False)
    """CAs of the server's certificate, PEM; without them machines trust the CAs of their image."""


@dataclass(frozen=True, slots=True)
class SecretPlan:
    """Writes, in this order, and deletions after them."""

    writes: tuple[decode.Json, ...] = field(default=(), repr=False)
    """Whole Secrets. One with ``metadata.resourceVersion`` is an update, else it is created."""
    deletions: tuple[decode.Json, ...] = field(default=(), repr=False)
    recheck_s: float = _RECHECK_S
    """Seconds until the next decision by the clock; at least 1."""


def plan_secrets(facts: SecretFacts, new_token: Callable[[], str]) -> SecretPlan:
    """Return what to do with the Secrets of a pool; nothing if all is as it should be.

    ``new_token`` makes a token, such as a random UUID. Write in the order of the plan, and stop at
    the first error: a later plan goes on. Raises `PoolConfigError` if another program has a Secret
    of the same name.
    """
    return _SecretPlanner(facts, new_token).plan()


class _SecretPlanner:
    """Plans the Secrets of one pool; see `plan_secrets`."""

    def __init__(self, facts: SecretFacts, new_token: Callable[[], str]) -> None:
        self._facts, self._new_token = facts, new_token
        self._pool, self._now = facts.pool, facts.now
        self._tokens = self._select_own(token_secret.TOKEN_LABEL)
        self._user_data = self._select_own(token_secret.USER_DATA_LABEL)
        self._named = {machine.data_secret for machine in facts.machines} | {*facts.templates}
        self._starting = [
            (created, machine.data_secret)
            for machine in facts.machines
            if not machine.node_name
            and (created := clocks.parse_rfc3339(machine.metadata.created)) is not None
            and self._now - created < RENEWAL_S
        ]
        """Machines that may fetch their config: when they were created, and their user data."""
        self._writes: list[decode.Json] = []
        self._deletions: dict[str, decode.Json] = {}
        self._times = [self._now + _RECHECK_S]

    def plan(self) -> SecretPlan:
        name, prefix = self._facts.rolled_hash, f"{nodepool.USER_DATA_PREFIX}{self._pool.name}-"
        active = {*self._facts.templates} | ({prefix + name} if name else set())
        targets = {name: self._find_target(name, prefix) for name in sorted(active)}
        tokens: dict[str, object] = {}
        for target in sorted({*targets.values()} - {""}):
            users = [name for name in targets if targets[name] == target]
            tokens |= dict.fromkeys(users, self._plan_active(target, users))
        for name, secret in self._tokens.items():
            if _get_notes(secret).get(hosted_key.TARGET_CONFIG) not in targets.values():
                self._plan_replaced(name, secret)
        for name, secret in self._user_data.items():
            if name not in active and name not in self._named:
                self._deletions[name] = secret
        self._plan_copies(prefix, tokens)
        recheck_s = max(1.0, min(self._times) - self._now)
        return SecretPlan(tuple(self._writes), tuple(self._deletions.values()), recheck_s)

    def _select_own(self, label: str) -> dict[str, decode.Json]:
        return {
            name: secret
            for name, secret in self._facts.found.items()
            if label in object_meta.read_metadata(secret).labels
            and _get_notes(secret).get(hosted_key.NODE_POOL) == self._pool.full_name
        }

    def _find_target(self, user_data: str, prefix: str) -> str:
        """Return the target hash that user data should lead to; empty for none."""
        if user_data == prefix + self._facts.rolled_hash and self._facts.config is not None:
            return self._facts.config.target_hash
        target = _get_notes(self._user_data.get(user_data, {})).get(hosted_key.TARGET_CONFIG, "")
        return (
            target if f"{nodepool.TOKEN_PREFIX}{self._pool.name}-{target}" in self._tokens else ""
        )

    def _plan_active(self, target: str, users: Sequence[str]) -> object:
        """Write a token Secret and the user data that lead to it, in this order; return the token.

        A kill between the two leaves user data with the old token, which stays valid: the time
        until the next renewal begins once the user data have the new one.
        """
        name, config = f"{nodepool.TOKEN_PREFIX}{self._pool.name}-{target}", self._facts.config
        secret = self._tokens.get(name) or self._start_secret(name, token_secret.TOKEN_LABEL)
        data, notes = {**resources.get_object(secret, "data")}, _get_notes(secret)
        if config is not None and config.target_hash == target:
            data = self._complete_values(config, data)
        for annotation in (hosted_key.TOKEN_EXPIRATION, token_secret.REPLACED_AT):
            notes.pop(annotation, None)
        notes[token_secret.UPGRADE_TYPE] = str(self._pool.upgrade_type)
        notes[hosted_key.TARGET_CONFIG] = target
        if self._facts.reached == target:
            notes[token_secret.REACHED] = "True"
        self._renew_token(data, notes, users)
        self._write(secret, data, notes)
        for user in users:
            self._plan_pointer(user, target, data["token"])
        return data["token"]

    def _renew_token(self, data: _Data, notes: dict[str, str], users: Sequence[str]) -> None:
        """Replace a token whose time is over, or of which this is unknown."""
        known = [self._user_data[user] for user in users if user in self._user_data]
        bearers = {token_secret.read_bearer(secret, "value").decode() for secret in known}
        made, old = clocks.parse_rfc3339(notes.get(hosted_key.TOKEN_TIME)), data.get("token")
        if not old or made is None or self._now - made >= RENEWAL_S:
            data |= {"old_token": old} if old else {}
            data["token"] = _encode(self._new_token().encode())
        elif not bearers - {old} and made <= self._now + _SKEW_S:
            self._times.append(made + RENEWAL_S)
            return
        # Else the clock jumped back, or a kill came between the two writes. Another token would end
        # the one before, which machines may have. Its age counts from now on.
        notes[hosted_key.TOKEN_TIME] = clocks.format_micro_time(self._now)

    def _complete_values(self, config: pool_config.PoolConfig, data: _Data) -> _Data:
        """Return the values for a config; what the Secret has of them stays."""
        values = {
            "release": config.release_image.encode(),
            "release-version": config.version.encode(),
            "os-image": config.config.os_image_url.encode(),
            "pull-secret-hash": _digest(self._facts.pull_secret),
            "additional-trust-bundle-hash": _digest(self._facts.trust_bundle),
            "reason": b"AsExpected",
            "message": b"Payload generated successfully",
        }
        # Both together are above the limit of the API server sooner; machines can use either.
        if self._pool.allows_refresh:
            values["payload"] = self._facts.packed.encode()
            data.pop("config", None)
        elif not data.get("payload"):
            values["config"] = self._facts.packed.encode()
        return {name: _encode(value) for name, value in values.items()} | data

    def _plan_pointer(self, name: str, target: str, token: object) -> None:
        document = pointer.point_to(
            f"{pointer.check_server_url(self._facts.ignition_url)}/ignition",
            _POINTER_VERSION,
            {
                "Authorization": f"Bearer {token}",
                "NodePool": self._pool.full_name,
                "TargetConfigVersionHash": target,
            },
            authorities=self._facts.authorities,
        )
        secret = self._user_data.get(name)
        secret = secret or self._start_secret(name, token_secret.USER_DATA_LABEL)
        text = json.dumps(document, separators=(",", ":")).encode()
        data: _Data = {"value": _encode(text), "disableTemplating": _encode(b"dHJ1ZQ==")}
        self._write(secret, data, _get_notes(secret) | {hosted_key.TARGET_CONFIG: target})

    def _plan_replaced(self, name: str, secret: decode.Json) -> None:
        """Let a token end 2 h after its replacement, or later for machines created before it."""
        notes = _get_notes(secret)
        replaced = clocks.parse_rfc3339(notes.get(token_secret.REPLACED_AT))
        replaced = self._now if replaced is None else min(replaced, self._now)
        needed = [created for created, _ in self._starting if created <= replaced + _SKEW_S]
        end = max([replaced + EXPIRY_S, *(created + RENEWAL_S for created in needed)])
        end_text = notes.get(hosted_key.TOKEN_EXPIRATION)
        if end < self._now or (end_text is not None and clocks.parse_rfc3339(end_text) is None):
            self._deletions[name] = secret
            return
        notes[token_secret.REPLACED_AT] = clocks.format_rfc3339(replaced)
        notes[hosted_key.TOKEN_EXPIRATION] = clocks.format_rfc3339(end)
        self._write(secret, resources.get_object(secret, "data"), notes)
        self._times.append(end)

    def _plan_copies(self, prefix: str, tokens: Mapping[str, object]) -> None:
        """Delete copies of user data that the KubeVirt provider must make again.

        It copies once (hypershift#1634). The time of the token before ends within hours.
        """
        values = [
            resources.get_object(secret, "data")
            for name, secret in self._tokens.items()
            if name not in self._deletions
        ]
        accepted = {value.get(key) for value in values for key in ("token", "old_token")}
        for name, copy in self._facts.found.items():
            base = name.removesuffix(token_secret.COPY_SUFFIX)
            if base == name or not _HASH.fullmatch(base.removeprefix(prefix)):
                continue
            bearer = token_secret.read_bearer(copy, "userdata").decode()
            booting = [created for created, user_data in self._starting if user_data == base]
            if base not in tokens:
                is_kept = base in self._named or bearer in accepted
            elif is_kept := bearer == tokens[base] or bool(booting):
                self._times += [created + RENEWAL_S for created in booting]
            if not is_kept:
                self._deletions[name] = copy

    def _start_secret(self, name: str, label: str) -> decode.Json:
        if name in self._facts.found:
            raise pool_config.PoolConfigError(
                f"cannot write Secret {self._facts.namespace}/{name}: another program has made it",
                remedy=f"run: kubectl -n {self._facts.namespace} delete secret {name}",
                reason="SecretConflict",
                condition=nodepool.NodePoolCondition.VALID_GENERATED_PAYLOAD,
            )
        metadata: decode.Json = {
            "name": name,
            "namespace": self._facts.namespace,
            "labels": {label: "", **component_names.PART_OF_LABELS},
            "annotations": {hosted_key.NODE_POOL: self._pool.full_name},
        }
        return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"}

    def _write(self, before: decode.Json, data: _Data, notes: Mapping[str, str]) -> None:
        metadata = resources.get_object(before, "metadata") | {"annotations": {**notes}}
        secret = {**before, "metadata": metadata, "data": data}
        if secret != before:
            self._writes.append(secret)


def _get_notes(secret: decode.Json) -> dict[str, str]:
    return {**object_meta.read_metadata(secret).annotations} if secret else {}


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest()[:16].encode() if content else b""


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode()
