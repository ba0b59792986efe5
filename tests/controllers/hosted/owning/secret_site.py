"""A NodePool with its Secrets in a management cluster of one dictionary, and a clock."""

import base64
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from treenail import clocks
from treenail.api import machineconfig, object_meta
from treenail.api.decode import Json
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool, token_secret
from treenail.controllers.hosted.config import pool_config
from treenail.controllers.hosted.config.pool_config import PoolConfig
from treenail.controllers.hosted.owning import token_secrets

HOUR = 3600.0
PLANE = "clusters-one"
HASHES = tuple(f"{number:016x}" for number in range(0xA0, 0xC0))
IGNITION_URL = "https://ignition.example:22623"


def make_pool(upgrade_type: str = "Replace", **metadata: object) -> nodepool.NodePool:
    return nodepool.NodePool.from_json(
        {
            "kind": "NodePool",
            "apiVersion": nodepool.API_VERSION,
            "metadata": {"name": "np", "namespace": "clusters", **metadata},
            "spec": {"clusterName": "one", "management": {"upgradeType": upgrade_type}},
        }
    )


def make_config(target: str, image: str = "") -> PoolConfig:
    config = machineconfig.MachineConfig(
        object_meta.ObjectMeta(name=f"rendered-np-{target}"),
        {"ignition": {"version": "3.4.0"}},
        os_image_url=image,
    )
    return PoolConfig(config, target, target, "4.22.0", "quay.example/release:4.22.0")


def make_machine(
    name: str, user_data: str, created: float, node: str = ""
) -> clusterapi.ClusterMachine:
    metadata = object_meta.ObjectMeta(
        name=name, others={"creationTimestamp": clocks.format_rfc3339(created)}
    )
    return clusterapi.ClusterMachine(metadata, data_secret=user_data, node_name=node)


def decode(secret: Json, key: str) -> str:
    return token_secret.read_value(secret, key).decode()


def get_notes(secret: Json) -> Mapping[str, str]:
    return object_meta.read_metadata(secret).annotations


class SecretSite:
    """Applies plans as the API server does: it counts versions, and checks preconditions."""

    def __init__(
        self, upgrade_type: str = "Replace", now: float = 1_700_000_000.0, *, tokens: str = "uuid"
    ) -> None:
        """``tokens`` begins each token."""
        self.now = now
        self._prefix = tokens
        self.secrets: dict[str, Json] = {}
        self.facts = token_secrets.SecretFacts(
            make_pool(upgrade_type),
            PLANE,
            make_config(HASHES[0]),
            HASHES[0],
            IGNITION_URL,
            {},
            (),
            now,
        )
        self._versions = itertools.count(1)
        self._tokens = itertools.count(1)

    def plan(self, **changes: object) -> token_secrets.SecretPlan:
        self.facts = replace(self.facts, **changes, found=dict(self.secrets), now=self.now)  # type: ignore[arg-type]  # any field
        if self.facts.config is not None:
            is_payload = self.facts.pool.allows_refresh
            packed = pool_config.pack_config(self.facts.config, is_payload=is_payload)
            self.facts = replace(self.facts, packed=packed)
        return token_secrets.plan_secrets(
            self.facts, lambda: f"{self._prefix}-{next(self._tokens)}"
        )

    def apply(self, plan: token_secrets.SecretPlan, *, writes: int | None = None) -> None:
        """Apply a plan, or only the first of its writes and deletions."""
        for secret in [*plan.writes][:writes]:
            self.put(secret)
        for deletion in [*plan.deletions][: None if writes is None else 0]:
            known = object_meta.read_metadata(deletion)
            metadata = object_meta.read_metadata(self.secrets.pop(known.name))
            assert (metadata.uid, metadata.resource_version) == (known.uid, known.resource_version)

    def run(self, **changes: object) -> token_secrets.SecretPlan:
        """Plan and apply; another plan then has nothing to do."""
        plan = self.plan(**changes)
        self.apply(plan)
        again = self.plan()
        assert (again.writes, again.deletions) == ((), ())
        return plan

    def put(self, secret: Json) -> None:
        metadata = object_meta.read_metadata(secret)
        stored = self.secrets.get(metadata.name)
        assert metadata.resource_version == (
            object_meta.read_metadata(stored).resource_version if stored else ""
        )
        given = secret["metadata"]
        assert isinstance(given, dict)
        numbered = {**given, "resourceVersion": str(next(self._versions)), "uid": metadata.name}
        self.secrets[metadata.name] = {**secret, "metadata": numbered}

    def put_copy(self, user_data: str) -> str:
        """Copy user data as the KubeVirt provider does; return the name of the copy."""
        name = user_data + token_secret.COPY_SUFFIX
        data = self.secrets[user_data]["data"]
        assert isinstance(data, dict)
        self.put({"metadata": {"name": name}, "data": {"userdata": data["value"]}})
        return name

    def annotate(self, name: str, annotations: Mapping[str, str]) -> None:
        secret = self.secrets[name]
        metadata = secret["metadata"]
        assert isinstance(metadata, dict)
        self.secrets[name] = {**secret, "metadata": {**metadata, "annotations": annotations}}

    def read_bearer(self, name: str) -> str:
        """Return the token in user data."""
        bearer = token_secret.read_bearer(self.secrets[name], "value")
        return base64.b64decode(bearer).decode()

    def read_tokens(self, target: str = HASHES[0]) -> tuple[str, str]:
        secret = self.secrets[f"token-np-{target}"]
        return decode(secret, "token"), decode(secret, "old_token")

    def read_pointer(self, name: str) -> Json:
        document: Json = json.loads(decode(self.secrets[name], "value"))
        return document

    @property
    def names(self) -> Sequence[str]:
        return sorted(self.secrets)

    def read_expiry_s(self, target: str) -> float | None:
        """Return in how many seconds a token ends; None for one that does not."""
        text = get_notes(self.secrets[f"token-np-{target}"]).get(hosted_key.TOKEN_EXPIRATION)
        end = clocks.parse_rfc3339(text)
        return None if end is None else end - self.now
