"""Reads what the config and the machines of a NodePool are made from."""

from dataclasses import dataclass, field

from treenail import errors
from treenail.api import decode, machineconfig, object_meta
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool, token_secret
from treenail.config.ignition import hosted_payload
from treenail.controllers.hosted.config import generator, pool_config
from treenail.controllers.hosted.owning import machines
from treenail.kube import api_client, discovery, resources

_CONFIG_LIMIT = 64 * 1024 * 1024
_INFRASTRUCTURE = "infrastructure.cluster.x-k8s.io"
_NTO_CONFIG = hosted_key.PREFIX + "nto-generated-machine-config"


@dataclass(frozen=True, slots=True)
class OwnedPool:
    """A NodePool with the objects that are watched."""

    document: decode.Json
    pool: nodepool.NodePool
    cluster: nodepool.HostedCluster
    infra_id: str | None
    """Of the HostedControlPlane; None if HyperShift did not make the control plane."""
    found: decode.Json = field(default_factory=dict)
    """Its MachineDeployment or MachineSet as an API object; empty before it exists."""
    members: tuple[clusterapi.ClusterMachine, ...] = ()
    sets: tuple[clusterapi.MachineSet, ...] = ()
    """Its MachineSets."""
    templates: frozenset[str] = frozenset()
    """Secrets that templates with machines name."""

    @property
    def namespace(self) -> str:
        """Namespace of the control plane."""
        return self.cluster.control_plane_namespace

    @property
    def kind(self) -> resources.Resource:
        return resources.MACHINESETS if self.pool.is_in_place else resources.MACHINEDEPLOYMENTS

    @property
    def cluster_name(self) -> str:
        """Name of Cluster API's Cluster."""
        return self.infra_id or self.cluster.infra_id or self.cluster.name


class SourceReader:
    """Reads by name, and lists by label. Raises `ClusterError`."""

    def __init__(self, client: api_client.Client) -> None:
        self._client = client
        self._kinds: dict[str, resources.Resource] = {}

    def read_inputs(self, owned: OwnedPool) -> generator.ConfigInputs:
        """Read the sources of the config."""
        pool, cluster, has_hypershift = owned.pool, owned.cluster, owned.infra_id is not None
        core, tuned = hosted_key.CORE_CONFIG, f"{_NTO_CONFIG}=true,{hosted_key.NODE_POOL}"
        nto = self._list(owned.namespace, f"{tuned}={pool.name}") if has_hypershift else ()
        place = pool.namespace
        return generator.ConfigInputs(
            pool,
            cluster,
            {
                name: self._client.find(resources.CONFIGMAPS, name, namespace=place)
                for name in pool.configs
            },
            self._list(owned.namespace, f"{core}=true") if has_hypershift else (),
            (*nto, *self._list(place, f"{hosted_key.POOL}={pool.name}")),
            self._list(place, hosted_key.RELEASE),
            self._read_secret(place, cluster.pull_secret, ".dockerconfigjson"),
            self._read_bundle(place, cluster.trust_bundle),
            self._read_secret(place, cluster.ssh_key, "id_rsa.pub"),
            has_hypershift,
        )

    def read_secrets(self, owned: OwnedPool, rolled_hash: str) -> dict[str, decode.Json]:
        """Return treenail's Secrets in the namespace of the control plane, and the user data.

        The user data of machines may still be HyperShift's.
        """
        place = owned.namespace
        found: dict[str, decode.Json] = {}
        for label in (token_secret.TOKEN_LABEL, token_secret.USER_DATA_LABEL):
            params = {"labelSelector": label}
            listed = self._client.list(resources.SECRETS, namespace=place, params=params).items
            found |= {object_meta.read_metadata(item).name: item for item in listed}
        user_data = f"{nodepool.USER_DATA_PREFIX}{owned.pool.name}-{rolled_hash}"
        names = {user_data} if rolled_hash else set()
        if owned.pool.platform == nodepool.KUBEVIRT:
            listed_names = {*found, *owned.templates, *(each.data_secret for each in owned.members)}
            names |= {name + token_secret.COPY_SUFFIX for name in listed_names if name}
        for name in names - {*found}:
            if secret := self._client.find(resources.SECRETS, name, namespace=place):
                found[name] = secret
        taken = found.get(user_data, {})
        if taken and is_of_pool(taken, owned.pool):
            # One of HyperShift: machines boot from it, so that its name and uid must stay.
            metadata = resources.get_object(taken, "metadata")
            labels = resources.get_object(metadata, "labels") | {token_secret.USER_DATA_LABEL: ""}
            found[user_data] = taken | {"metadata": metadata | {"labels": labels}}
        return found

    def read_target_config(
        self, owned: OwnedPool, owner: machines.Owner
    ) -> machineconfig.MachineConfig:
        """Return the config that nodes should have now.

        Raises `ConfigError` for HyperShift's, and one that does not exist.
        """
        pool, place = owned.pool, owned.namespace
        target = owner.own_target or pool.read_secret_hash(owner.data_secret)
        name = f"{nodepool.TOKEN_PREFIX}{pool.name}-{target}"
        token = self._client.find(resources.SECRETS, name, namespace=place) or {}
        try:
            document = hosted_payload.unpack_secret(token, _CONFIG_LIMIT)
            return machineconfig.MachineConfig.from_json(document)
        except errors.ConfigError as error:
            raise errors.ConfigError(f"Secret {place}/{name}: {error}") from error

    def read_reached(self, owned: OwnedPool) -> str:
        """Return the hash that a machine of the pool fetched last; empty for none."""
        name = token_secret.REACHED_CONFIGMAP
        found = self._client.find(resources.CONFIGMAPS, name, namespace=owned.namespace)
        return str(resources.get_object(found or {}, "data").get(owned.pool.name, ""))

    def find_template(self, owned: OwnedPool) -> machines.MachineTemplate | None:
        """Return the user's infrastructure template; None if the one in use stays.

        Raises `PoolConfigError`.
        """
        pool = owned.pool
        text = pool.metadata.annotations.get(hosted_key.MACHINE_TEMPLATE, "")
        kind, _, name = text.partition("/")
        if not text and owned.found:
            return None
        if not (kind.isalnum() and object_meta.is_object_name(name)):
            fact = f"is {text!r:.80}, expected KIND/NAME" if text else "is missing"
            raise _make_error(pool, "InvalidMachineTemplate", f"annotation "
                              f"{hosted_key.MACHINE_TEMPLATE} {fact}")  # fmt: skip
        resource = self._kinds.get(kind) or self._find_kind(pool, kind)
        found = self._client.find(resource, name, namespace=owned.namespace)
        if found is None:
            text = f"{kind} {name} does not exist in namespace {owned.namespace}"
            raise _make_error(pool, "MachineTemplateMissing", text)
        template = resources.get_object(resources.get_object(found, "spec"), "template")
        if not isinstance(template.get("spec"), dict):
            text = f"{kind} {name} has no spec.template.spec: it is no infrastructure template"
            raise _make_error(pool, "InvalidMachineTemplate", text)
        capacity = resources.get_object(resources.get_object(found, "status"), "capacity")
        return machines.MachineTemplate(resource.api_version, kind, name, bool(capacity))

    def _find_kind(self, pool: nodepool.NodePool, kind: str) -> resources.Resource:
        try:
            group = self._client.read_path(f"/apis/{_INFRASTRUCTURE}")
            version = resources.get_object(group, "preferredVersion").get("version")
            listed = self._client.read_path(f"/apis/{_INFRASTRUCTURE}/{version}").get("resources")
        except errors.NotFoundError:
            version, listed = "", []
        for entry in discovery.iter_objects(listed):
            if entry.get("kind") == kind and "/" not in str(entry.get("name")):
                found = resources.Resource(
                    _INFRASTRUCTURE, str(version), str(entry["name"]), kind, namespaced=True
                )
                return self._kinds.setdefault(kind, found)
        text = f"the API server has no {kind} in {_INFRASTRUCTURE}"
        raise _make_error(pool, "MachineTemplateMissing", text)

    def _list(self, namespace: str, selector: str) -> tuple[decode.Json, ...]:
        params = {"labelSelector": selector}
        return self._client.list(resources.CONFIGMAPS, namespace=namespace, params=params).items

    def _read_secret(self, place: str, name: str, key: str) -> bytes | None:
        secret = self._client.find(resources.SECRETS, name, namespace=place) if name else None
        return token_secret.read_value(secret or {}, key) or None

    def _read_bundle(self, place: str, name: str) -> bytes | None:
        found = self._client.find(resources.CONFIGMAPS, name, namespace=place) if name else None
        text = resources.get_object(found or {}, "data").get("ca-bundle.crt")
        return text.encode() if isinstance(text, str) else None


def is_of_pool(document: decode.Json, pool: nodepool.NodePool) -> bool:
    """Return whether an object has the annotation with the name of the NodePool."""
    # A sync looks at the MachineSets of all pools: too many to decode their metadata.
    notes = resources.get_object(resources.get_object(document, "metadata"), "annotations")
    return notes.get(hosted_key.NODE_POOL) == pool.full_name


def _make_error(pool: nodepool.NodePool, reason: str, text: str) -> pool_config.PoolConfigError:
    return pool_config.PoolConfigError(
        text,
        reason=reason,
        condition=nodepool.NodePoolCondition.VALID_MACHINE_TEMPLATE,
        remedy=f"name a template: kubectl annotate nodepool {pool.name} -n {pool.namespace} "
        f"--overwrite {hosted_key.MACHINE_TEMPLATE}=KIND/NAME",
    )
