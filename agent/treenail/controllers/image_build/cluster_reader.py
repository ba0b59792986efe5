"""Objects that builds read: from the API server, from watches, or from files.

`ClusterReader` reads what no informer caches: Secrets, ConfigMaps, rendered configs, CAs.
`BuildViews` has the watched objects, and finds the MachineOSConfigs that a change concerns.
`FileObjects` replaces the API server where there is no cluster.
"""

import base64
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import (
    decode,
    documents,
    kinds,
    machineconfig,
    machineconfigpool,
    machineosbuild,
    machineosconfig,
    object_meta,
)
from treenail.api.controllerconfig import NAME as CONTROLLER_CONFIG
from treenail.api.controllerconfig import ClusterProxy, ControllerConfigContents
from treenail.config import image_mirrors, pullsecret
from treenail.controllers.image_build import build_objects
from treenail.controllers.pools import (
    node_facts,
    node_selection,
    pool_index,
    pool_membership,
    pool_views,
)
from treenail.controllers.render.render import RenderedConfig
from treenail.controllers.runtime import informer_set, workers
from treenail.encoding import codec
from treenail.image.build_inputs import find_build_paths
from treenail.kube import resources, watch
from treenail.registry import proxies

log = logging.getLogger(__name__)

GLOBAL_PULL_SECRET = "global-pull-secret-copy"  # noqa: S105  # the name of a Secret
"""The cluster's pull secret in the namespace of builds, as the MCO names it."""
_CACHED_CONFIGS = 64
_CA_AGE_S = 30.0
_FILE_RESOURCES = (
    resources.CONFIGMAPS,
    resources.CONTROLLERCONFIGS,
    resources.MACHINEOSCONFIGS,
    resources.SECRETS,
)
REPOSITORIES = "etc-yum-repos-d"
"""ConfigMap with the package repositories that the instructions of every build see."""


@dataclass(frozen=True, slots=True)
class RenderedFacts:
    """The parts of a rendered config that determine the system part of an image."""

    name: str
    base_image: str
    extensions_image: str
    extensions: tuple[str, ...]
    kernel_type: str
    build_paths: tuple[str, ...]
    """Files of the config that package managers and registry clients read."""
    mirrors: image_mirrors.ImageMirrors
    """Where its nodes, and builds for them, pull images from."""
    config: machineconfig.MachineConfig = field(repr=False, compare=False)
    """Without its Ignition config, which is large."""


@dataclass(frozen=True, slots=True)
class ClusterTrust:
    """CAs of the cluster in PEM, the pull secret of its registry, and its proxy."""

    registry_cas: dict[str, str] = field(default_factory=dict)
    bundle: str = ""
    """The additional trust bundle."""
    pull_secret: bytes = field(default=b"", repr=False)
    proxies: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of an environment: `proxies.make_variables`."""


class ObjectGetter(Protocol):
    """Reads one object; raises `ClusterError`."""

    def get(
        self, resource: resources.Resource, name: str, *, namespace: str = ""
    ) -> decode.Json: ...


class ClusterReader:
    """Reads objects of builds on demand. Thread-safe. Every method raises `ClusterError`."""

    def __init__(
        self,
        client: ObjectGetter,
        clock: clocks.Clock,
        *,
        namespace: str,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """``environ`` has the proxy of a cluster whose ControllerConfig names none.

        Raises `ConfigError` if it is unusable.
        """
        self._environ = _check_proxies(environ or {})
        self._client = client
        self._clock = clock
        self._namespace = namespace
        self._lock = threading.Lock()
        self._rendered: OrderedDict[str, RenderedFacts] = OrderedDict()
        self._trust: tuple[float, ClusterTrust] | None = None

    def find_object(self, resource: resources.Resource, name: str) -> decode.Json | None:
        """Return an object of the namespace of builds; None when it does not exist."""
        try:
            return self._client.get(resource, name, namespace=self._namespace)
        except errors.NotFoundError:
            return None

    def describe_object(self, resource: resources.Resource, name: str) -> str:
        """Return the words for an object of the namespace of builds; of files, without one."""
        return f"{resource.kind} {f'{self._namespace}/' if self._namespace else ''}{name}"

    def read_login(self, name: str) -> pullsecret.PullSecret:
        """Read a login; raise `CredentialError`, which contains no part of it."""
        where = self.describe_object(resources.SECRETS, name)
        document = self.find_object(resources.SECRETS, name)
        if document is None:
            raise errors.CredentialError(f"{where} does not exist", remedy="create it")
        return pullsecret.read_login_secret(document, where=where)

    def read_base_login(self, name: str) -> pullsecret.PullSecret:
        """Read the login for base images; without a name, the cluster's pull secret."""
        if name:
            return self.read_login(name)
        if self.find_object(resources.SECRETS, GLOBAL_PULL_SECRET) is not None:
            return self.read_login(GLOBAL_PULL_SECRET)
        content = self.read_trust().pull_secret
        return pullsecret.parse_pull_secret(content, where="internalRegistryPullSecret")

    def read_ca(self, registry: str) -> str:
        """Return the CAs of a registry beside those of the system, in PEM."""
        trust = self.read_trust()
        return "\n".join(filter(None, (trust.registry_cas.get(registry, ""), trust.bundle)))

    def read_proxies(self) -> dict[str, str]:
        """Return the variables of the proxy: the cluster's, otherwise that of the environment."""
        return dict(self.read_trust().proxies or self._environ)

    def read_proxy_settings(self) -> proxies.ProxySettings:
        """Return the proxy of requests to registries."""
        return proxies.read_proxy_settings(self.read_proxies())

    def compute_access_version(self, name: str) -> str:
        """Return a text that changes with the login for base images, and with the CAs."""
        trust = self.read_trust()
        secret = self.find_object(resources.SECRETS, name or GLOBAL_PULL_SECRET)
        meta = object_meta.read_metadata(secret or {}, "Secret")
        parts = (
            meta.uid,
            meta.resource_version,
            hashlib.sha256(trust.pull_secret).hexdigest(),
            *sorted(trust.registry_cas.values()),
            trust.bundle,
            *self.read_proxies().values(),
        )
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def read_rendered_facts(self, name: str) -> RenderedFacts:
        """Read a rendered config once; its name contains the hash of its content."""
        with self._lock:
            if (known := self._rendered.get(name)) is not None:
                self._rendered.move_to_end(name)
                return known
        config = self.read_rendered(name)
        slim = machineconfig.MachineConfig(
            metadata=config.metadata,
            os_image_url=config.os_image_url,
            extensions_image=config.extensions_image,
            kernel_type=config.kernel_type,
            extensions=config.extensions,
        )
        facts = RenderedFacts(
            name,
            config.os_image_url,
            config.extensions_image,
            config.extensions,
            config.kernel_type,
            find_build_paths(config),
            _read_mirrors(config),
            slim,
        )
        with self._lock:
            self._rendered[name] = facts
            while len(self._rendered) > _CACHED_CONFIGS:
                self._rendered.popitem(last=False)
        return facts

    def read_rendered(self, name: str) -> machineconfig.MachineConfig:
        """Read a rendered config with its files; raise `ConfigError`."""
        return machineconfig.MachineConfig.from_json(
            self._client.get(resources.MACHINECONFIGS, name)
        )

    def read_trust(self) -> ClusterTrust:
        """Read CAs, pull secret and proxy of the ControllerConfig, at most every 30 s.

        Raises `ConfigError` for a ControllerConfig that cannot be read.
        """
        now = self._clock.monotonic()
        with self._lock:
            if self._trust is not None and now - self._trust[0] < _CA_AGE_S:
                return self._trust[1]
        try:
            document = self._client.get(resources.CONTROLLERCONFIGS, CONTROLLER_CONFIG)
        except errors.NotFoundError:
            trust = ClusterTrust()
        else:
            contents = ControllerConfigContents.from_json(document)
            trust = ClusterTrust(
                {name: _decode_pem(pem) for name, pem in contents.registry_cas.items()},
                _decode_pem(contents.trust_bundle),
                contents.pull_secret or b"",
                _check_proxies(ClusterProxy.from_json(document).variables),
            )
        with self._lock:
            self._trust = (now, trust)
        return trust


def _read_mirrors(config: machineconfig.MachineConfig) -> image_mirrors.ImageMirrors:
    try:
        return image_mirrors.read_config_mirrors(config)
    except errors.ConfigError as error:
        # Not a reason to refuse a build that needs no mirror.
        log.warning("%s: ignoring the mirrors of registries: %s", config.name, error)
        return image_mirrors.NO_MIRRORS


def _check_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables; raise `ConfigError` for a proxy that no request can use."""
    variables = proxies.make_variables(environment)
    proxies.read_proxy_settings(variables)
    return variables


def _decode_pem(content: bytes) -> str:
    return content.decode("ascii", "replace")


class FileObjects:
    """Objects of the input files, read as from an API server with one namespace."""

    def __init__(self, texts: Iterable[tuple[str, str | bytes]]) -> None:
        self._objects: dict[tuple[str, str], decode.Json] = {}
        for where, text in texts:
            for document in documents.load_documents(text, where=where):
                self._add_document(document)

    # The files of one build are of one namespace.
    def get(self, resource: resources.Resource, name: str, *, namespace: str = "") -> decode.Json:  # noqa: ARG002
        """Return an object of any namespace; raise `NotFoundError`."""
        try:
            return self._objects[resource.kind, name]
        except KeyError:
            raise errors.NotFoundError(f"the input has no {resource.kind} {name}") from None

    def add_rendered(self, rendered: RenderedConfig) -> None:
        """Add a rendered config."""
        self._objects[resources.MACHINECONFIGS.kind, rendered.name] = rendered.config.to_json()

    def list_image_configs(self) -> list[machineosconfig.MachineOSConfig]:
        """Return the MachineOSConfigs by name; raise `ConfigError` that names the object."""
        configs = []
        for (kind, name), document in sorted(self._objects.items()):
            if kind == resources.MACHINEOSCONFIGS.kind:
                try:
                    configs.append(machineosconfig.MachineOSConfig.from_json(document))
                except errors.ConfigError as error:
                    raise errors.ConfigError(
                        f"{kind} {name}: {error}", remedy=error.remedy
                    ) from error
        return configs

    def _add_document(self, document: decode.Json) -> None:
        fields = decode.Fields.from_json(document, "")
        kind = fields.get_text("kind")
        if (items := kinds.list_items(fields)) is not None:
            for item in items:
                self._add_document(item.values)
        elif kind in {resource.kind for resource in _FILE_RESOURCES}:
            document = encode_strings(document)
            name = fields.get_object("metadata").get_text("name")
            self._objects[kind, name] = document


def encode_strings(document: decode.Json) -> decode.Json:
    """Return a Secret as the API server stores it: ``stringData`` becomes a part of ``data``."""
    fields = decode.Fields.from_json(document, "")
    texts = (
        fields.get_text_map("stringData")
        if fields.get_text("kind") == resources.SECRETS.kind
        else {}
    )
    if not texts:
        return document
    encoded = {name: base64.b64encode(text.encode()).decode() for name, text in texts.items()}
    rest = {name: value for name, value in document.items() if name != "stringData"}
    return {**rest, "data": {**fields.get_object("data").values, **encoded}}


@dataclass(frozen=True, slots=True)
class NodeArchitecture(codec.JsonObject, where="Node"):
    """Labels and architecture of a Node."""

    name: Annotated[str, codec.Key("metadata.name")]
    labels: Annotated[Mapping[str, str], codec.Key("metadata.labels")]
    architecture: Annotated[str, codec.Key("status.nodeInfo.architecture")]


@dataclass(frozen=True, slots=True)
class InputVersion(codec.JsonObject, where="ConfigMap"):
    """Name and version of a ConfigMap that builds may read."""

    name: Annotated[str, codec.Key("metadata.name")]
    version: Annotated[str, codec.Key("metadata.resourceVersion")]


class BuildViews:
    """The caches of the build controller.

    Rendered MachineConfigs and Secrets are read on demand: they are large, or secret.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._pool_index = pool_index.SelectedPools()
        self._lock = threading.Lock()
        self._architectures: dict[str, frozenset[str]] | None = None
        """By pool; None until they are needed. Grouping reads every Node."""
        self._enqueue: workers.Enqueue
        self.configs: informer_set.InformerView[machineosconfig.MachineOSConfig]
        self.builds: informer_set.InformerView[machineosbuild.MachineOSBuild]
        self.pools: informer_set.InformerView[machineconfigpool.MachineConfigPool]
        self.nodes: informer_set.InformerView[NodeArchitecture]
        self.inputs: informer_set.InformerView[InputVersion]
        self.jobs: informer_set.InformerView[build_objects.ObservedJob]
        self.pods: informer_set.InformerView[build_objects.ObservedPod]

    def register_watches(
        self, informers: informer_set.InformerSet, enqueue: workers.Enqueue
    ) -> None:
        """Add the views, and enqueue MachineOSConfigs when something changes for them."""
        self._enqueue = enqueue
        self.configs, self.builds = pool_views.add_build_views(informers)
        self.pools = informers.add_view(
            watch.WatchScope(resources.MACHINECONFIGPOOLS),
            machineconfigpool.MachineConfigPool.from_json,
        )
        selection = informers.add_view(
            watch.WatchScope(resources.MACHINECONFIGPOOLS), pool_membership.ObservedPool.from_json
        )
        self.nodes = informers.add_view(
            watch.WatchScope(resources.NODES), NodeArchitecture.from_json
        )
        self.nodes.add_handler(self._handle_node)
        # The controller writes those of Jobs itself. An older Role permits no watch.
        inputs = watch.WatchScope(
            resources.CONFIGMAPS,
            self._namespace,
            label_selector=f"!{key.EPHEMERAL_BUILD_OBJECT}",
            is_optional=True,
            has_metadata_only=True,
        )
        self.inputs = informers.add_view(
            inputs, InputVersion.from_json, optional=True, required=False
        )
        self.inputs.add_handler(self._handle_input)
        jobs = watch.WatchScope(resources.JOBS, self._namespace, label_selector=key.BUILD_KEY)
        pods = watch.WatchScope(resources.PODS, self._namespace, label_selector=key.BUILD_KEY)
        self.jobs = informers.add_view(jobs, build_objects.ObservedJob.from_json)
        self.pods = informers.add_view(pods, build_objects.ObservedPod.from_json)
        selection.add_handler(self._handle_selection)
        self.pools.add_handler(self._handle_pool)
        self.configs.add_handler(self._handle_config)
        self.builds.add_handler(self._handle_build)
        self.jobs.add_handler(self._handle_job)
        self.pods.add_handler(self._handle_pod)

    def find_architectures(self, pool: str) -> frozenset[str]:
        """Return the architectures of the pool's nodes that images are built for."""
        with self._lock:
            if self._architectures is None:
                self._architectures = self._group_architectures()
            return self._architectures.get(pool, frozenset())

    def has_only_control_plane(self) -> bool:
        """Return whether no Node is a worker, as before the first worker joins."""
        nodes = self.nodes.get_all().values()
        return not any(
            node.labels.keys().isdisjoint(node_selection.CONTROL_PLANE_LABELS) for node in nodes
        )

    def _group_architectures(self) -> dict[str, frozenset[str]]:
        architectures_by_pool: dict[str, set[str]] = {}
        for node in self.nodes.get_all().values():
            pool = self._pool_index.find_primary(node.name, node.labels)
            if pool is not None and node.architecture:
                architectures_by_pool.setdefault(pool, set()).add(node.architecture)
        return {
            pool: node_facts.find_architectures(architectures)
            for pool, architectures in architectures_by_pool.items()
        }

    def _forget_architectures(self) -> None:
        """Group the nodes again: a node or the selection of a pool changed."""
        with self._lock:
            self._architectures = None

    def _handle_selection(
        self,
        name: str,
        _before: pool_membership.ObservedPool | None,
        after: pool_membership.ObservedPool | None,
    ) -> None:
        self._pool_index.set_pool(name, after)
        self._forget_architectures()

    def _handle_pool(
        self,
        name: str,
        before: machineconfigpool.MachineConfigPool | None,
        after: machineconfigpool.MachineConfigPool | None,
    ) -> None:
        if _extract_inputs(before) != _extract_inputs(after):
            self._enqueue_configs_of({name})

    def _handle_node(
        self, _name: str, before: NodeArchitecture | None, after: NodeArchitecture | None
    ) -> None:
        if before == after:
            return
        self._forget_architectures()
        nodes = (node for node in (before, after) if node is not None)
        pools = (self._pool_index.find_primary(node.name, node.labels) for node in nodes)
        self._enqueue_configs_of(set(filter(None, pools)))

    def _handle_config(
        self,
        name: str,
        before: machineosconfig.MachineOSConfig | None,
        after: machineosconfig.MachineOSConfig | None,
    ) -> None:
        self._enqueue(name)
        if before is None or after is None:
            # Another MachineOSConfig of the pool may be the one that counts now.
            self._enqueue_configs_of(
                {config.pool for config in (before, after) if config is not None}
            )

    def _handle_input(
        self, _name: str, before: InputVersion | None, after: InputVersion | None
    ) -> None:
        """Plan builds that read a ConfigMap again."""
        changed = after or before
        if changed is None or before == after:
            return
        for config in self.configs.get_all().values():
            if changed.name in (config.context_name, REPOSITORIES):
                self._enqueue(config.name)

    def _handle_build(
        self,
        _name: str,
        before: machineosbuild.MachineOSBuild | None,
        after: machineosbuild.MachineOSBuild | None,
    ) -> None:
        for build in (before, after):
            if build is not None:
                self._enqueue(build.image_config)

    def _handle_job(
        self,
        _name: str,
        before: build_objects.ObservedJob | None,
        after: build_objects.ObservedJob | None,
    ) -> None:
        for job in (before, after):
            if job is not None:
                self._enqueue_sharers(job)

    def _handle_pod(
        self,
        _name: str,
        before: build_objects.ObservedPod | None,
        after: build_objects.ObservedPod | None,
    ) -> None:
        pod = after or before
        job = None if pod is None else self.jobs.find(f"{self._namespace}/{pod.job}")
        if job is not None:
            self._enqueue_sharers(job)

    def _enqueue_configs_of(self, pools: set[str]) -> None:
        for config in self.configs.get_all().values():
            if config.pool in pools:
                self._enqueue(config.name)

    def _enqueue_sharers(self, job: build_objects.ObservedJob) -> None:
        """workers.Enqueue every MachineOSConfig whose running build has the key of the Job."""
        self._enqueue(job.facts.image_config)
        for build in self.builds.get_all().values():
            if not build.state.has_ended and job.facts.share_key in {
                system.share_key for system in build_objects.read_systems(build).values()
            }:
                self._enqueue(build.image_config)


def _extract_inputs(pool: machineconfigpool.MachineConfigPool | None) -> object:
    """Return the parts of a pool that a build reads or reports."""
    return None if pool is None else (pool.configuration, pool.conditions, pool.metadata.uid)
