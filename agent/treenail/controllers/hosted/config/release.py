"""The base MachineConfigs and images of a release, and the ConfigMaps that hold them. Pure.

HyperShift extracts both from the images of a release. treenail takes them from its user, once for
each release. The ConfigMaps have the label `annotations.RELEASE`, and parts of one JSON text.
"""

import base64
import functools
import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated

from treenail.api import decode, documents, machineconfig, object_meta, pullspec
from treenail.api.hosted import annotations as hosted_key
from treenail.api.ignition import model, parser
from treenail.config import merge, node_paths
from treenail.controllers.hosted.config import config_documents, pool_config
from treenail.controllers.render import render
from treenail.encoding import codec
from treenail.errors import ConfigError

PART_LIMIT = 900 * 1024
"""Maximum size of a ConfigMap in bytes; the API server's own limit is 1 MiB."""
PULL_SECRET_PATH = "/var/lib/kubelet/config.json"  # noqa: S105  # a path
_ROOM, _MAX_SHOWN, _MAX_VERSION = 4096, 10, 63
_LOGINS = {PULL_SECRET_PATH, node_paths.KUBECONFIG, *node_paths.CREDENTIALS}
_IMAGE, _STREAM = "releaseImage", "osImageStream"
_PART, _DIGEST, _CONTENT = "part", "digest", "content"


@dataclass(frozen=True, slots=True)
class Release(codec.JsonObject, is_strict=True, omits_defaults=True):
    """Images and base MachineConfigs; the names are those of the MCO's ControllerConfig."""

    version: Annotated[codec.NonEmptyText, codec.Key("releaseVersion")]
    release_image: codec.NonEmptyText
    """As NodePools name it in ``spec.release.image``."""
    os_image: Annotated[codec.NonEmptyText, codec.Key("baseOSContainerImage")]
    extensions_image: Annotated[str, codec.Key("baseOSExtensionsContainerImage")] = ""
    stream: Annotated[str, codec.Key(_STREAM)] = ""
    """As NodePools name it in ``spec.osImageStream``; empty for those that name none."""
    configs: tuple[machineconfig.MachineConfig, ...] = field(default=(), repr=False)

    def compute_digest(self) -> str:
        """Return a digest of what nodes get from the release, in any order of its configs."""
        specs = sorted((config.name, config.to_json()["spec"]) for config in self.configs)
        values = [self.version, self.os_image, self.extensions_image, specs]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_release(
    images: tuple[str, bytes], configs: Iterable[tuple[str, str | bytes]]
) -> tuple[Release, list[str]]:
    """Read a release from the contents of files, and return warnings; raise `ConfigError`.

    ``images`` has name and content.
    """
    where, text = images
    release = decode.Fields(documents.load_document(text, where=where), where).read(Release)
    version = release.version
    is_name = object_meta.is_object_name(f"{version}{release.stream}")
    if not is_name or len(version) > _MAX_VERSION:
        raise ConfigError(
            f"{where}: releaseVersion, osImageStream: expected a-z, 0-9, . and -, "
            f"found {version:.80}, {release.stream:.80}",
            remedy="correct it",
        )
    for image in filter(None, (release.os_image, release.extensions_image)):
        pullspec.parse_pull_spec(image, where=where)
    manifests, base = render.read_manifests(configs), list[machineconfig.MachineConfig]()
    for (kind, name), place in manifests.locations.items():
        config = manifests.configs.get(name, machineconfig.MachineConfig())
        paths = {file.path for file in parser.parse_ignition(config.config).files}
        is_worker = config_documents.POOL.selects(config.metadata.labels)
        if not is_worker or render.is_rendered(config) or paths & _LOGINS:
            raise ConfigError(
                f"{place}, {kind} {name:.253}: expected a MachineConfig with label {merge.ROLE}: "
                f"worker that is not rendered and has none of {', '.join(sorted(_LOGINS))}",
                remedy="remove it or these files: all nodes are workers, clusters have own logins",
            )
        notes = config.metadata.annotations.items()
        kept = {name: text for name, text in notes if name == merge.GENERATED_BY}
        metadata = replace(config.metadata, annotations=kept, others={})
        base.append(replace(config, metadata=metadata))
    render.render_pool(config_documents.POOL, base, render.ControllerConfig())
    others = [f"ignored: {kind}" for kind in manifests.others]
    return replace(release, configs=tuple(base)), manifests.warnings + others


def build_config_maps(release: Release) -> Iterator[decode.Json]:
    """Yield the ConfigMaps of a release, without a namespace."""
    text = json.dumps(release.to_json(), sort_keys=True).encode()
    # The time is fixed, so that the same files make the same ConfigMaps.
    packed = base64.b64encode(gzip.compress(text, 9, mtime=0)).decode()
    starts = range(0, len(packed), PART_LIMIT - _ROOM)
    title = "-".join(filter(None, ("treenail-release", release.version, release.stream)))
    for number, start in enumerate(starts, start=1):
        data = {
            _IMAGE: release.release_image,
            _STREAM: release.stream,
            _PART: f"{number:02}/{len(starts):02}",
            _DIGEST: hashlib.sha256(text).hexdigest(),
            _CONTENT: packed[start : start + PART_LIMIT - _ROOM],
        }
        labels = {hosted_key.RELEASE: release.version}
        metadata = {"name": f"{title}-{number}", "labels": labels}
        yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def find_release(config_maps: Iterable[decode.Json], image: str, stream: str = "") -> Release:
    """Return the release with this image and stream; raise `pool_config.PoolConfigError`."""
    every = [decode.Fields(one, "ConfigMap").get_text_map("data") for one in config_maps]
    wanted = [
        data for data in every if (data.get(_IMAGE), data.get(_STREAM, "")) == (image, stream)
    ]
    parts = sorted(wanted, key=lambda data: data.get(_PART, ""))
    content = "".join(data.get(_CONTENT, "") for data in parts)
    try:
        return _parse_release(content, parts[0].get(_DIGEST, "") if parts else "")
    except ConfigError as error:
        names = ", ".join(data.get(_PART, "?") for data in parts[:_MAX_SHOWN]) or "none"
        known = ", ".join(sorted({data.get(_IMAGE, "?") for data in every})[:_MAX_SHOWN]) or "none"
        raise pool_config.PoolConfigError(
            f"expected all parts of release {image or '(none)':.300} {stream:.80}, found "
            f"{names:.200} ({error}); known releases: {known:.2000}",
            reason=pool_config.MISSING_RELEASE,
            remedy="delete ConfigMaps of other runs, and run: treenail-controller hosted release "
            "--configs DIR --images FILE | kubectl apply --server-side -n NAMESPACE -f -",
        ) from error


@functools.lru_cache(maxsize=8)
def _parse_release(packed: str, digest: str) -> Release:
    """Parse the joined parts. All pools of a release share the result, which is immutable."""
    # The digest decides whether all parts are there, and no other one.
    source, where = f"data:;base64,{packed}", "data.content"
    contents = model.Contents(source, model.GZIP, f"sha256-{digest}", location=where)
    document = decode.load_json(contents.decode_bytes(), where=where)
    return decode.Fields.from_json(document, where).read(Release)
