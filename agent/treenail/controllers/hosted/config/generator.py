"""The config of a NodePool from its documents, its release and the Secrets of its cluster.

Pure. The sources are those of HyperShift's NodePool controller (nodepool/config.go). Unknown fields
and a second writer of one of treenail's files are errors here.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from treenail.api import annotations as key
from treenail.api import decode, documents, machineconfig
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import node_mode, nodepool
from treenail.config import merge, node_paths, pullsecret, reconcilable, trust_anchors, wanted_state
from treenail.config.generated import generate, sources
from treenail.controllers.hosted.config import config_documents, hashes, pool_config, release
from treenail.controllers.hosted.config.config_documents import ALL_KINDS, ConfigDocument
from treenail.controllers.render import render
from treenail.errors import ConfigError, CredentialError

_OWN_CONFIG = "99-treenail-hosted"
_CORE_CONFIGS, _MAX_CONFIG_MAPS, _MAX_SHOWN = 3, 64, 5
_IGNITION: decode.Json = {"ignition": {"version": "3.2.0"}}
_DOCUMENT_FIELDS = ("apiVersion", "kind", "metadata", "spec", "status")
_SETTINGS = {"proxy": "/etc/mco/proxy.env", "tlsSecurityProfile": "tlsSecurityProfile"}
"""What HyperShift writes to nodes by the HostedCluster's configuration, and what must write it."""


@dataclass(frozen=True, slots=True)
class ConfigInputs:
    """Sources of the config of a NodePool; ConfigMaps are API objects."""

    pool: nodepool.NodePool
    cluster: nodepool.HostedCluster
    config_maps: Mapping[str, decode.Json | None] = field(default_factory=dict, repr=False)
    """Those that ``spec.config`` names, by name; None for a missing one."""
    core_config_maps: Sequence[decode.Json] = field(default=(), repr=False)
    """Those with label `annotations.CORE_CONFIG` ``true`` in the namespace of the control plane."""
    pool_config_maps: Sequence[decode.Json] = field(default=(), repr=False)
    """Of the Node Tuning Operator, and those with label `annotations.POOL`, of this pool."""
    release_config_maps: Sequence[decode.Json] = field(default=(), repr=False)
    """Those with label `annotations.RELEASE` of any version; ``spec.release.image`` chooses."""
    pull_secret: bytes | None = field(default=None, repr=False)
    """``.dockerconfigjson`` of the HostedCluster's Secret; None for a missing one."""
    trust_bundle: bytes | None = field(default=None, repr=False)
    """``ca-bundle.crt`` of the HostedCluster's ConfigMap; None for a missing one."""
    ssh_key: bytes | None = field(default=None, repr=False)
    """``id_rsa.pub`` of the HostedCluster's Secret; None for a missing one."""
    has_hypershift: bool = False
    """HyperShift made the control plane: its core ConfigMaps come, and its drainer runs."""


def generate_config(inputs: ConfigInputs) -> pool_config.PoolConfig:
    """Render the config of a NodePool; raise `pool_config.PoolConfigError`."""
    try:
        return _generate(inputs)
    except pool_config.PoolConfigError:
        raise
    except (ConfigError, CredentialError) as error:
        raise pool_config.PoolConfigError(str(error), remedy=error.remedy) from error


def _generate(inputs: ConfigInputs) -> pool_config.PoolConfig:
    pool, cluster = inputs.pool, inputs.cluster
    found = _read_documents(inputs)
    if inputs.has_hypershift:
        _check_core_configs(inputs, found)
    base = release.find_release(
        inputs.release_config_maps, pool.release_image, pool.os_image_stream
    )
    images = merge.DefaultImages(base.os_image, base.extensions_image)
    files = _build_files(inputs)
    rendered = config_documents.render_documents(
        config_documents.PoolDocuments(tuple(found)),
        render.ControllerConfig(images, base.version, pool.release_image),
        (*base.configs, _build_own_config(files)),
    )
    _check_paths(rendered, files)
    _raise_problems(rendered.problems)
    assert rendered.result is not None  # without problems there is a result
    try:
        render.check_appliable(rendered.result, rendered.configs.values())
    except ConfigError as error:
        _raise_problems([config_documents.locate_error(error, rendered.locations)])
    names: decode.Json = {
        "base": base.compute_digest(),
        "pullSecret": cluster.pull_secret,
        "trustBundle": cluster.trust_bundle,
        "configuration": _select_configuration(cluster),
    }
    target = hashes.compute_target_hash(found, names, files)
    rollout = hashes.compute_rollout_hash(found, names)
    config = rendered.result.config
    return pool_config.PoolConfig(config, target, rollout, base.version, pool.release_image)


def _read_documents(inputs: ConfigInputs) -> list[ConfigDocument]:
    names, labelled = inputs.pool.configs, dict[str, decode.Json | None]()
    core = inputs.core_config_maps if inputs.has_hypershift else ()
    for one in (*core, *inputs.pool_config_maps):
        metadata = decode.Fields(one, "ConfigMap").get_object("metadata")
        labelled[f"{metadata.get_text('namespace')}/{metadata.get_text('name')}"] = one
    if len({*names}) < len(names) or len(labelled) > _MAX_CONFIG_MAPS:
        raise ConfigError(
            f"expected each ConfigMap once in spec.config, and at most {_MAX_CONFIG_MAPS} with "
            f"labels, found {', '.join(names):.1000} and {len(labelled)}",
            remedy="remove a name, or put the documents of several ConfigMaps into one",
        )
    named = {name: inputs.config_maps.get(name) for name in names}
    found = list[ConfigDocument]()
    for config_maps, count in ((named, len(names)), (labelled, 0)):
        read = config_documents.read_config_maps(config_maps, count, ALL_KINDS)
        _raise_problems(read.problems, read.reason)
        found += read.documents
    for place, kind, name, spec in _list_cluster_documents(inputs):
        own = {"apiVersion": ALL_KINDS[kind], "kind": kind, "metadata": {"name": name}}
        text = documents.dump_document({**own, "spec": spec})
        found.append(config_documents.read_document(text, f"HostedCluster {place}", ALL_KINDS))
    for document in found:
        fields = decode.Fields(document.value, document.location)
        decode.reject_unknown_fields(fields, _DOCUMENT_FIELDS)
    settings = _select_configuration(inputs.cluster)
    for name, mark in _SETTINGS.items():
        if settings[name] and not any(mark in document.text for document in found):
            raise pool_config.PoolConfigError(
                f"HostedCluster spec.configuration: treenail generates nothing from {name}",
                reason=pool_config.UNSUPPORTED_KIND,
                remedy=f"write {mark} by a document in spec.config",
            )
    return found


def _list_cluster_documents(inputs: ConfigInputs) -> Iterator[tuple[str, str, str, object]]:
    """Yield place, kind, name and spec of what follows from the HostedCluster.

    With HyperShift the core ConfigMaps have all but the image config.
    """
    cluster = inputs.cluster
    if image := cluster.configuration.get("image"):
        yield "spec.configuration.image", "Image", "cluster", image
    if inputs.has_hypershift:
        return
    if cluster.image_content_sources:
        mirrors = [source.to_json() for source in cluster.image_content_sources]
        spec = {"imageDigestMirrors": mirrors}
        yield "spec.imageContentSources", "ImageDigestMirrorSet", "cluster", spec
    if cluster.fips:
        yield "spec.fips", machineconfig.KIND, "30-fips", {"fips": True}
    if cluster.ssh_key:
        text = _decode(inputs.ssh_key, f"Secret {cluster.ssh_key}", "id_rsa.pub")
        user = {"name": node_paths.CORE_USER, "sshAuthorizedKeys": [text.strip()]}
        ignition = _IGNITION | {"passwd": {"users": [user]}}
        yield "spec.sshKey", machineconfig.KIND, "99-worker-ssh", {"config": ignition}


def _decode(value: bytes | None, where: str, name: str) -> str:
    if not value:
        raise ConfigError(
            f"{where:.300}: expected {name}, found none",
            remedy="create it, or correct the name in the HostedCluster",
        )
    return documents.decode_text(value, where)


def _check_core_configs(inputs: ConfigInputs, found: Sequence[ConfigDocument]) -> None:
    """Raise unless HyperShift has written all its core ConfigMaps.

    They have FIPS, the SSH key, mirrors if there are any, and the proxy of the API server where the
    control plane is old. For a newer one HyperShift's NodePool controller generates the proxy.
    """
    namespace = inputs.cluster.control_plane_namespace
    is_own = any(
        hashes.is_haproxy(one) and f"ConfigMap {namespace}/" not in one.location for one in found
    )
    expected = _CORE_CONFIGS + bool(inputs.cluster.image_content_sources) - is_own
    if (count := len(inputs.core_config_maps)) != expected:
        raise pool_config.PoolConfigError(
            f"expected {expected} ConfigMaps with label {hosted_key.CORE_CONFIG} in namespace "
            f"{namespace}, found {count}",
            reason=pool_config.MISSING_CORE_CONFIG,
            remedy="wait for the control plane operator; if only MachineConfig "
            f"{hashes.HAPROXY_CONFIG} is missing, copy it from the key config of a token Secret of "
            f"HyperShift to a ConfigMap with label {hosted_key.POOL}: {inputs.pool.name}",
        )


def _build_files(inputs: ConfigInputs) -> dict[str, str]:
    """Return the contents of treenail's own files by path."""
    name, cluster = inputs.pool.name, inputs.cluster
    drain = hosted_key.HOSTED_DRAIN if inputs.has_hypershift else key.DESIRED_DRAIN
    mode = node_mode.HostedMode(name, node_mode.name_upgrade_namespace(name), drain)
    where = f"Secret {cluster.pull_secret}"
    pull_secret = _decode(inputs.pull_secret, where, ".dockerconfigjson")
    pullsecret.parse_pull_secret(pull_secret.encode(), where=where)
    files = {node_mode.PATH: json.dumps(mode.to_json()), release.PULL_SECRET_PATH: pull_secret}
    if cluster.trust_bundle:
        bundle, where = inputs.trust_bundle or b"", f"ConfigMap {cluster.trust_bundle}"
        certificates = bundle if trust_anchors.find_certificates(bundle) else None
        text = _decode(certificates, where, "certificates in PEM in ca-bundle.crt")
        files[node_paths.USER_CA_BUNDLE] = text
    return files


def _build_own_config(files: Mapping[str, str]) -> machineconfig.MachineConfig:
    modes = {release.PULL_SECRET_PATH: 0o600}
    generated = [sources.GeneratedFile(path, files[path], modes.get(path, 0o644)) for path in files]
    metadata = {"name": _OWN_CONFIG, "labels": config_documents.WORKER_LABELS}
    spec = {"config": generate.build_ignition(generated)}
    return machineconfig.MachineConfig.from_json({"metadata": metadata, "spec": spec})


def _check_paths(rendered: config_documents.RenderedDocuments, files: Mapping[str, str]) -> None:
    """Raise for a path that no MachineConfig may write, among them those of treenail's files."""
    for name, config in rendered.configs.items():
        if name == _OWN_CONFIG:
            continue
        parsed = wanted_state.ParsedConfig(config)
        entries = {file.path: file.location for file in parsed.ignition.files}
        entries |= {link.path: link.location for link in parsed.ignition.links}
        problems = [
            reconcilable.IrreconcilableChange(place, f"treenail writes {own}", "remove the entry")
            for path, place in entries.items()
            for own in files
            if own == path or own.startswith(f"{path}/")
        ]
        # Of a config and itself these are the paths that belong to the agent or to the kernel.
        problems += reconcilable.find_irreconcilable_changes(parsed, parsed)
        for problem in problems:
            title = f"{machineconfig.KIND} {name}"
            text = f"{rendered.locations.get(title, '')}, {title}: {problem.place}: "
            _raise_problems([f"{text}{problem.reason}; {problem.remedy}"])


def _select_configuration(cluster: nodepool.HostedCluster) -> decode.Json:
    """Return the parts of ``spec.configuration`` that HyperShift hashes, without empty fields."""
    fields = decode.Fields(cluster.configuration, "HostedCluster spec.configuration")
    profile = fields.get_object("apiServer").values.get("tlsSecurityProfile")
    found = {name: fields.values.get(name) for name in ("proxy", "image")}
    found["tlsSecurityProfile"] = profile
    return {name: hashes.drop_nulls(value) for name, value in found.items()}


def _raise_problems(problems: Sequence[str], reason: str = pool_config.INVALID_CONFIG) -> None:
    """Raise for the problems, which have their remedies, if there are any."""
    if problems:
        more = f"\nand {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        raise pool_config.PoolConfigError("\n".join(problems[:_MAX_SHOWN]) + more, reason=reason)
