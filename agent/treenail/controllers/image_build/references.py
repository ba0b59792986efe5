"""Reads from the API server, not from caches, which objects refer to images."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from treenail.api import annotations as key
from treenail.api.decode import Fields, Json
from treenail.api.machineosbuild import BuildState, MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.api.meta import ObjectMeta
from treenail.controllers.image_build.cluster_reader import ClusterReader
from treenail.controllers.image_build.pushed_images import make_system_tag
from treenail.controllers.image_build.systems import read_systems
from treenail.errors import NotFoundError
from treenail.image.oci.prune import collect_references
from treenail.kube.client import Client
from treenail.kube.resources import (
    MACHINECONFIGNODES,
    MACHINECONFIGPOOLS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    NODES,
    ROLLOUTPOLICIES,
    Resource,
)

# In the direction in which a reference spreads: an image that is assigned between two of these
# lists is found in the later one.
_LISTED = (
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    MACHINECONFIGPOOLS,
    ROLLOUTPOLICIES,
    NODES,
    MACHINECONFIGNODES,
)
_OPTIONAL = (MACHINECONFIGNODES, ROLLOUTPOLICIES)


@dataclass(slots=True)
class ImageReferences:
    """Everything that may refer to an image."""

    digests: dict[str, str] = field(default_factory=dict)
    """The object that refers to each digest."""
    tags: dict[str, str] = field(default_factory=dict)
    """The MachineOSBuild that pushes, or may use, each tag."""
    succeeded: dict[str, set[str]] = field(default_factory=dict)
    """Digests of succeeded builds by MachineOSConfig."""
    current: dict[str, str] = field(default_factory=dict)
    """Digest of the present image by MachineOSConfig."""


class ReferenceReader:
    """Lists the objects. A kind that cannot be read makes `read` fail, so nothing is deleted."""

    def __init__(self, client: Client, reader: ClusterReader) -> None:
        self._client = client
        self._reader = reader

    def read(self) -> ImageReferences:
        """Return the present references; raises `ClusterError`, `ConfigError`."""
        found = ImageReferences()
        configs: set[str] = set()
        for resource in _LISTED:
            for document in self._iter_objects(resource):
                meta = ObjectMeta.from_fields(
                    Fields.from_json(document, resource.kind).get_object("metadata")
                )
                name = f"{resource.kind} {meta.name}"
                for digest, why in collect_references([(name, _strip_marks(document))]).items():
                    found.digests.setdefault(digest, why)
                configs |= _find_configs(resource, document, meta)
                if resource is MACHINEOSBUILDS:
                    _add_build(found, MachineOSBuild.from_json(document))
                if resource is MACHINEOSCONFIGS:
                    image = MachineOSConfig.from_json(document).pull_spec
                    found.current[meta.name] = image.partition("@")[2]
        for name in sorted(filter(None, configs)):
            self._add_config(found, name)
        return found

    def _iter_objects(self, resource: Resource) -> Iterator[Json]:
        try:
            # Without a resourceVersion: the API server then reads its store, not its cache.
            for page in self._client.list_pages(resource):
                yield from page.items
        except NotFoundError:
            if resource not in _OPTIONAL:
                raise

    def _add_config(self, found: ImageReferences, name: str) -> None:
        try:
            rendered = self._reader.read_rendered_facts(name)
        except NotFoundError:
            # No node can get a config that does not exist.
            return
        images = [rendered.base_image, rendered.extensions_image]
        for digest, why in collect_references([(f"MachineConfig {name}", images)]).items():
            found.digests.setdefault(digest, why)


def _add_build(found: ImageReferences, build: MachineOSBuild) -> None:
    name = f"MachineOSBuild {build.name}"
    found.tags[build.name] = name
    for system in read_systems(build).values():
        if system.content_key:
            found.tags[make_system_tag(system.content_key)] = name
    if build.state is BuildState.SUCCEEDED:
        digest = build.pull_spec.partition("@")[2]
        found.succeeded.setdefault(build.image_config, set()).add(digest)


def _strip_marks(document: Json) -> Mapping[str, object]:
    """Return the object without the annotation that names expired images."""
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("annotations"), dict):
        return document
    notes = {k: v for k, v in metadata["annotations"].items() if k != key.PUSHED_IMAGES}
    return {**document, "metadata": {**metadata, "annotations": notes}}


def _find_configs(resource: Resource, document: Json, meta: ObjectMeta) -> set[str]:
    """Return the rendered configs that an object names."""
    if resource is NODES:
        notes = meta.annotations
        return {notes.get(key.CURRENT_CONFIG, ""), notes.get(key.DESIRED_CONFIG, "")}
    if resource is MACHINECONFIGPOOLS:
        fields = Fields.from_json(document, resource.kind)
        parts = (fields.get_object("spec"), fields.get_object("status"))
        return {each.get_object("configuration").get_text("name") for each in parts}
    return set()
