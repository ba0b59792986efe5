"""Adoption of the objects of an installation: what the cluster lacks of them. Pure.

The cluster's objects take precedence: nothing that a user or another controller wrote is replaced.
The writes are ordered so that the build controller never begins a build of its own.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from treenail.api import annotations as key
from treenail.api import decode, machineosbuild, machineosconfig, object_meta
from treenail.api.component_names import PART_OF_LABELS
from treenail.controllers.handover.handover_objects import Handover
from treenail.controllers.image_build import build_objects, cluster_reader
from treenail.controllers.image_build.status import compute_config_conditions
from treenail.kube import resources

_RESOURCES = {
    resource.kind: resource
    for resource in (resources.SECRETS, resources.MACHINEOSCONFIGS, resources.MACHINEOSBUILDS)
}
_KEPT_METADATA = ("name", "namespace", "labels", "annotations")


@dataclass(frozen=True, slots=True)
class CreateObject:
    """Create an object where it is missing; a Secret replaces an older one of the installation."""

    resource: resources.Resource
    document: decode.Json = field(repr=False)

    @property
    def name(self) -> str:
        return _get_meta(self.document).get_text("name")

    @property
    def namespace(self) -> str:
        return _get_meta(self.document).get_text("namespace")

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Kind, namespace, name, and the version of a Secret; empty for other objects."""
        version = _get_meta(self.document).get_text_map("annotations").get(key.ADOPTED_DATA, "")
        return self.resource.kind, self.namespace, self.name, version


@dataclass(frozen=True, slots=True)
class DeleteFailedBuild:
    """Delete a build of the same inputs that has ended without an image."""

    build: machineosbuild.MachineOSBuild


@dataclass(frozen=True, slots=True)
class FinishBuild:
    """Set the status of a build to that of the installation's build."""

    build: machineosbuild.MachineOSBuild
    status: decode.Json


@dataclass(frozen=True, slots=True)
class AnnotateConfig:
    """Write annotations of a MachineOSConfig that it lacks."""

    config: machineosconfig.MachineOSConfig
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ServeImage:
    """Name the image in the status of a MachineOSConfig that names none."""

    config: machineosconfig.MachineOSConfig
    build: machineosbuild.MachineOSBuild
    conditions: tuple[object_meta.Condition, ...]


AdoptionAction = CreateObject | DeleteFailedBuild | FinishBuild | AnnotateConfig | ServeImage


def describe_action(action: AdoptionAction) -> str:
    """Return kind and name of an action; equal for a repeated one."""
    match action:
        case CreateObject():
            return f"create {action.resource.kind} {action.name}"
        case DeleteFailedBuild(build) | FinishBuild(build):
            return f"{type(action).__name__} {build.name}"
        case AnnotateConfig(config) | ServeImage(config):
            return f"{type(action).__name__} {config.name}"


def decide_adoption(
    handover: Handover,
    configs: Mapping[str, machineosconfig.MachineOSConfig],
    builds: Mapping[str, machineosbuild.MachineOSBuild],
    created: Collection[tuple[str, str, str, str]],
) -> tuple[AdoptionAction, ...]:
    """Return the next writes; decide again after them, until there are none.

    ``created`` are the keys of objects that an attempt to create found or made.
    """
    actions: list[AdoptionAction] = []
    for document in handover.objects:
        kind = decode.Fields.from_json(document, "object").get_text("kind")
        if kind == resources.MACHINEOSBUILDS.kind:
            actions += _adopt_build(document, configs, builds)
            continue
        create = CreateObject(_RESOURCES[kind], clean_document(document))
        is_known = create.key in created or (
            kind == resources.MACHINEOSCONFIGS.kind and create.name in configs
        )
        if not is_known:
            actions.append(create)
    return tuple(actions)


def _adopt_build(
    document: decode.Json,
    configs: Mapping[str, machineosconfig.MachineOSConfig],
    builds: Mapping[str, machineosbuild.MachineOSBuild],
) -> Iterator[AdoptionAction]:
    installed = machineosbuild.MachineOSBuild.from_json(document)
    config, present = configs.get(installed.image_config), builds.get(installed.name)
    if config is None or config.is_deleting or (present is not None and present.is_deleting):
        return
    if present is None:
        # Another current build means other inputs: the cluster builds an image of its own.
        if config.current_build in ("", installed.name) and not config.pull_spec:
            yield CreateObject(resources.MACHINEOSBUILDS, _own_build(document, config))
        return
    if present.pull_spec != installed.pull_spec or not present.state.has_ended:
        if not present.state.has_ended:
            yield FinishBuild(present, installed.status)
        elif not present.pull_spec:
            yield DeleteFailedBuild(present)
        return
    if config.current_build not in ("", present.name):
        return
    if config.pull_spec not in ("", present.pull_spec):
        return
    notes = dict(_find_missing_notes(installed, config, present))
    if notes:
        yield AnnotateConfig(config, notes)
    if not config.pull_spec:
        conditions = compute_config_conditions(
            None,
            build_objects.make_build_facts(present),
            is_served=True,
            pull_spec=present.pull_spec,
        )
        yield ServeImage(config, present, conditions)


def _find_missing_notes(
    installed: machineosbuild.MachineOSBuild,
    config: machineosconfig.MachineOSConfig,
    present: machineosbuild.MachineOSBuild,
) -> Iterator[tuple[str, str]]:
    known = config.metadata.annotations
    if not config.current_build:
        yield key.CURRENT_BUILD, present.name
    resolved = installed.metadata.annotations.get(key.RESOLVED_BASE, "")
    if resolved and key.RESOLVED_BASE not in known and config.base_image:
        # The tag of the base image was resolved at the installation, and may have moved since.
        yield key.RESOLVED_BASE, resolved
    if unrecorded := build_objects.find_unrecorded_images(config, [present]):
        images = build_objects.add_pushed_images(
            build_objects.read_pushed_images(config), unrecorded
        )
        yield key.PUSHED_IMAGES, build_objects.encode_pushed_images(images)


def _own_build(document: decode.Json, config: machineosconfig.MachineOSConfig) -> decode.Json:
    """Return the build with its owner, whose UID only the cluster knows."""
    owner: decode.Json = {
        "apiVersion": resources.MACHINEOSCONFIGS.api_version,
        "kind": resources.MACHINEOSCONFIGS.kind,
        "name": config.name,
        "uid": config.metadata.uid,
        "controller": True,
    }
    cleaned = clean_document(document)
    metadata = cleaned["metadata"]
    kept = metadata if isinstance(metadata, dict) else {}
    return {**cleaned, "metadata": {**kept, "ownerReferences": [owner]}}


def clean_document(document: decode.Json) -> decode.Json:
    """Return an object without its status and without what the API server sets."""
    metadata = {name: value for name, value in _get_meta(document).values.items()
                if name in _KEPT_METADATA}  # fmt: skip
    rest = {name: value for name, value in document.items() if name not in ("metadata", "status")}
    cleaned: decode.Json = {**rest, "metadata": metadata}
    if document.get("kind") != resources.SECRETS.kind:
        return cleaned
    encoded = cluster_reader.encode_strings(cleaned)
    notes = {
        **_get_meta(encoded).get_text_map("annotations"),
        key.ADOPTED_DATA: _hash_secret(encoded),
    }
    labels = {**_get_meta(encoded).get_text_map("labels"), **PART_OF_LABELS}
    return {**encoded, "metadata": {**metadata, "labels": labels, "annotations": notes}}


def can_replace(present: decode.Json, wanted: decode.Json) -> bool:
    """Return whether a Secret has older data of the installation, which no other writer changed."""
    known = _get_meta(present).get_text_map("annotations").get(key.ADOPTED_DATA, "")
    # An API server refuses another type.
    is_equal_type = present.get("type") == wanted.get("type")
    return is_equal_type and known == _hash_secret(present) != _hash_secret(wanted)


def _hash_secret(secret: decode.Json) -> str:
    data = json.dumps(secret.get("data"), sort_keys=True)
    return hashlib.sha256(data.encode()).hexdigest()


def _get_meta(document: decode.Json) -> decode.Fields:
    return decode.Fields.from_json(document, "object").get_object("metadata")
