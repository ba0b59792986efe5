"""Config documents in the ConfigMaps of a NodePool, and the MachineConfig that they become.

Pure. HyperShift's operator reads the ConfigMaps in the same way (nodepool/config.go); an unknown
field is a problem here, and HyperShift ignores it.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from treenail import memory, sanitize
from treenail.api import annotations as key
from treenail.api import decode, documents, kinds, machineconfig, machineconfigpool
from treenail.config import merge, node_paths, validation
from treenail.config.generated import (
    container_runtime,
    generate,
    kubelet,
    kubelet_fields,
    policies,
    sources,
)
from treenail.controllers.hosted.config import pool_config
from treenail.controllers.render import render
from treenail.errors import ConfigError

CONFIG_KEY, MAX_CONFIG_MAPS, _MAX_BYTES = "config", 10, memory.MIB
"""The limits are those of the CRD of NodePool and of an API server."""
_MIRRORS = "ImageContentSourcePolicy", "ImageDigestMirrorSet"
KINDS = {machineconfig.KIND: machineconfig.API_VERSION} | {
    kind: kinds.GENERATOR_KINDS[kind]
    for kind in (*generate.POOL_KINDS, *_MIRRORS, policies.CLUSTER_KIND)
}
"""The apiVersion of each kind that HyperShift accepts in a ConfigMap."""
ALL_KINDS = KINDS | kinds.GENERATOR_KINDS
"""Those that treenail generates from; HyperShift has the kind Image in its HostedCluster."""
_OLD_POLICY_VERSION = "config.openshift.io/v1alpha1"
# Go writes these fields also when the user does not, and drops unknown ones.
_MACHINE_CONFIG_SPEC: decode.Json = {
    "baseOSExtensionsContainerImage": "", "config": None, "extensions": None, "fips": False,
    "kernelArguments": None, "kernelType": "", "osImageURL": "",
}  # fmt: skip
WORKER_LABELS, _BUILT_IN = {merge.ROLE: merge.WORKER}, {key.BUILT_IN_POOL: ""}


@dataclass(frozen=True, slots=True)
class ConfigDocument:
    """One document with the defaults of HyperShift."""

    location: str
    """ConfigMap and number, which counts from 1 without blank documents."""
    value: decode.Json = field(repr=False)
    text: str = field(repr=False)
    """What HyperShift hashes: for mirrors and policies the user's text with its comments."""

    @property
    def title(self) -> str:
        """Kind and name."""
        metadata = decode.Fields(self.value, self.location).get_object("metadata")
        return sanitize.escape_line(f"{self.value['kind']} {metadata.get_text('name'):.253}")


@dataclass(frozen=True, slots=True)
class PoolDocuments:
    """The documents of a NodePool, sorted by their texts."""

    documents: tuple[ConfigDocument, ...] = ()
    problems: tuple[str, ...] = ()
    """What is wrong with ConfigMaps and documents, each with its remedy."""
    is_readable: bool = True
    """False when HyperShift refuses them too: then it changes nothing (``ValidMachineConfig``)."""
    reason: str = pool_config.INVALID_CONFIG
    """Reason of the problems."""


@dataclass(frozen=True, slots=True)
class RenderedDocuments:
    """The MachineConfig of the documents; None when a document is invalid."""

    result: render.RenderedConfig | None = field(repr=False, default=None)
    configs: Mapping[str, machineconfig.MachineConfig] = field(repr=False, default_factory=dict)
    """Its sources by name."""
    problems: tuple[str, ...] = ()
    locations: Mapping[str, str] = field(default_factory=dict)
    """ConfigMap and document by kind and name."""

    @property
    def config(self) -> machineconfig.MachineConfig | None:
        return self.result.config if self.result else None


def read_config_maps(
    config_maps: Mapping[str, decode.Json | None], count: int, accepted: Mapping[str, str] = KINDS
) -> PoolDocuments:
    """Read the ``count`` ConfigMaps that ``spec.config`` names; None for one that is missing."""
    if count > MAX_CONFIG_MAPS:
        problem = f"spec.config: expected at most {MAX_CONFIG_MAPS} ConfigMaps, found {count}"
        problem += "; put several documents into one ConfigMap, separated by ---"
        return PoolDocuments((), (problem,), is_readable=False)
    found, problems, is_readable = list[ConfigDocument](), list[str](), True
    reason = pool_config.INVALID_CONFIG
    for name, config_map in config_maps.items():
        location = f"ConfigMap {name}"
        try:
            text = _get_text(config_map, location, problems)
            for number, chunk in enumerate([*_split_documents(text)], start=1):
                found.append(read_document(chunk, f"{location}, document {number}", accepted))
        except ConfigError as error:
            is_readable = False
            problems.append(f"{error}; {error.remedy or 'correct the document'}")
            if isinstance(error, pool_config.PoolConfigError):
                reason = error.reason
    found.sort(key=lambda document: document.text)
    return PoolDocuments(tuple(found), tuple(problems), is_readable, reason)


def render_documents(
    found: PoolDocuments,
    cluster: render.ControllerConfig,
    base: Sequence[machineconfig.MachineConfig] = (),
) -> RenderedDocuments:
    """Render the documents over the base, by default one with the files that generators change."""
    if not found.is_readable:
        return RenderedDocuments()
    configs = {config.name: config for config in base or (_BASE,)}
    objects: dict[tuple[str, str, str], sources.SourceObject] = {}
    locations = {f"{machineconfig.KIND} {config.name}": "the base" for config in base}
    errors, ignored = list[str](), list[str]()
    for document in found.documents:
        place = f"{document.location}, {document.title}: "
        try:
            source = sources.SourceObject.from_json(document.value)
            earlier = locations.setdefault(source.title, document.location)
            if not source.metadata.name or earlier != document.location:
                expected = "expected a metadata.name that no other document has"
                errors.append(f"{place}{expected}, found {earlier}; choose another name")
            elif source.kind == machineconfig.KIND:
                config = machineconfig.MachineConfig.from_json(document.value)
                ignored += [f"{place}{one}" for one in validation.validate_config(config).ignored]
                configs[config.name] = config
            else:
                objects[source.key] = source
        except ConfigError as error:
            text = str(error).removeprefix(f"{document.title}: ")
            errors.append(f"{place}{text}; {error.remedy or 'correct the field'}")
    images = filter(None, (cluster.base_images.os, *(c.os_image_url for c in configs.values())))
    facts = sources.ClusterFacts(cluster.release_image, tuple(dict.fromkeys(images)))
    generation = generate.generate_configs(objects, [POOL], configs.values(), facts, ())
    for result in generation.results.values():
        place = f"{locations[result.source.title]}, {result.source.title}: "
        errors += [f"{place}{text}" for text in result.messages]
    configs |= generation.configs
    rendered = None
    try:
        if not errors:
            rendered = render.render_pool(POOL, configs.values(), cluster)
    except ConfigError as error:
        errors.append(locate_error(error, locations))
    return RenderedDocuments(rendered, configs, (*errors, *ignored), locations)


def locate_error(error: ConfigError, locations: Mapping[str, str]) -> str:
    """Return the error and its remedy behind the place of the MachineConfig that it names."""
    title = re.match(rf"{machineconfig.KIND} [^\s:]+(?=: )", str(error))
    place = f"{locations.get(title[0], '')}, " if title and title[0] in locations else ""
    return f"{place}{error}; {error.remedy or 'correct the documents'}"


def _get_text(config_map: decode.Json | None, where: str, problems: list[str]) -> str:
    if config_map is None:
        raise ConfigError(f"{where} does not exist", remedy="create it, or correct spec.config")
    data = decode.Fields(config_map, where).get_text_map("data")
    size = sum(len(text.encode()) for text in data.values())
    if size > _MAX_BYTES:
        raise ConfigError(
            f"{where}: expected at most {_MAX_BYTES} bytes of data, found {size}",
            remedy="divide the documents among several ConfigMaps",
        )
    if CONFIG_KEY not in data:
        problems.append(
            f"{where}: expected data.{CONFIG_KEY}, found none; write the documents to this key, "
            "because HyperShift reads no other"
        )
    return data.get(CONFIG_KEY, "")


def _split_documents(text: str) -> Iterator[str]:
    """Yield the documents as HyperShift divides them: the first one keeps a separator before it."""
    lines: list[str] = []
    for line in (*text.removesuffix("\n").split("\n"), "---"):
        if lines and re.match(r"---\s*(#|$)", line):
            if (chunk := "".join(lines)).strip():
                yield chunk
            lines = []
        else:
            lines.append(line.removesuffix("\r") + "\n")


def read_document(text: str, location: str, accepted: Mapping[str, str]) -> ConfigDocument:
    """Read a document and add the defaults of HyperShift; raise `ConfigError`."""
    value = documents.load_document(text, where=location)
    if (value.get("kind"), value.get("apiVersion")) == (policies.CLUSTER_KIND, _OLD_POLICY_VERSION):
        text = text.replace(_OLD_POLICY_VERSION, KINDS[policies.CLUSTER_KIND], 1)
        value = documents.load_document(text, where=location)
    fields = decode.Fields(value, location)
    kind, version = fields.get_text("kind"), fields.get_text("apiVersion")
    if (expected := accepted.get(kind)) != version:
        raise pool_config.PoolConfigError(
            f"{location}: expected one of {', '.join(accepted)}, found {kind or 'no kind':.80} of "
            f"apiVersion {version or 'none':.80}",
            reason=pool_config.UNSUPPORTED_KIND,
            remedy=f"set apiVersion: {expected}" if expected else "remove the document",
        )
    if kind not in (machineconfig.KIND, *generate.POOL_KINDS):
        return ConfigDocument(location, value, text)
    metadata, spec = fields.get_object("metadata"), fields.get_object("spec").values
    meta = {"creationTimestamp": None, **metadata.values}
    if kind == machineconfig.KIND:
        meta["labels"] = {**metadata.get_text_map("labels"), **WORKER_LABELS}
        value = {**value, "metadata": meta}
        known = {name: one for name, one in spec.items() if name in _MACHINE_CONFIG_SPEC}
        hashed = {**_MACHINE_CONFIG_SPEC, **decode.Fields(known, "").get_other_fields()}
        return ConfigDocument(location, value, documents.dump_document({**value, "spec": hashed}))
    value = {**value, "spec": {**spec, "machineConfigPoolSelector": {"matchLabels": _BUILT_IN}}}
    others: decode.Json = {"metadata": meta, "status": {"conditions": None}}
    return ConfigDocument(location, value, documents.dump_document({**value, **others}))


_KUBELET = kubelet_fields.complete_struct(kubelet_fields.CONFIGURATION, {})
_FILES = (
    (kubelet.KUBELET_CONF, documents.dump_document(_KUBELET)),
    (container_runtime.STORAGE_CONF, '[storage]\ndriver = "overlay"\n'),
    (node_paths.REGISTRIES_CONF, 'unqualified-search-registries = ["docker.io"]\n'),
)
_IGNITION = generate.build_ignition(itertools.starmap(sources.GeneratedFile, _FILES))
_BASE = machineconfig.MachineConfig.from_json(
    {"metadata": {"name": "00-worker", "labels": WORKER_LABELS}, "spec": {"config": _IGNITION}}
)
_SELECTOR = {"machineConfigSelector": {"matchLabels": WORKER_LABELS}}
POOL = machineconfigpool.MachineConfigPool.from_json(
    {"metadata": {"name": merge.WORKER, "labels": _BUILT_IN}, "spec": _SELECTOR}
)
