"""The system parts of a MachineOSBuild, as its annotations and its status record them."""

import json
from collections.abc import Mapping

from treenail.api import annotations as key
from treenail.api.decode import Fields, load_json
from treenail.api.machineosbuild import MachineOSBuild
from treenail.controllers.image_build.facts import SystemFacts
from treenail.errors import ConfigError

_LIMIT = 8 * 1024


def read_systems(build: MachineOSBuild) -> dict[str, SystemFacts]:
    """Return the system parts by architecture; an empty name for the only one."""
    notes = build.metadata.annotations
    if text := notes.get(key.SYSTEMS, ""):
        return _decode_systems(text)
    only = SystemFacts(
        content_key=build.content_key,
        share_key=build.metadata.labels.get(key.BUILD_KEY, ""),
        job=build.job,
        image=notes.get(key.SYSTEM_IMAGE, ""),
    )
    return {"": only}


def read_architectures(build: MachineOSBuild) -> tuple[str, ...]:
    """Return the architectures of the image; empty if the build does not record them."""
    text = build.metadata.annotations.get(key.BUILD_ARCHITECTURES, "")
    return tuple(filter(None, text.split(",")))


def encode_systems(systems: Mapping[str, SystemFacts]) -> dict[str, str]:
    """Return the annotations that record the system parts.

    The Job of the only architecture is in the status of the build.
    """
    if (only := systems.get("")) is not None:
        return {key.SYSTEM_IMAGE: only.image} if only.image else {}
    found = {
        name: {
            "contentKey": each.content_key,
            "shareKey": each.share_key,
            "job": each.job,
            "image": each.image,
        }
        for name, each in sorted(systems.items())
    }
    return {key.SYSTEMS: json.dumps(found, separators=(",", ":"))}


def _decode_systems(text: str) -> dict[str, SystemFacts]:
    """Decode the annotation; an unreadable one has no part, so that the build begins again."""
    if len(text) > _LIMIT:
        return {}
    try:
        fields = Fields.from_json(load_json(text, where="systems"), "systems")
        return {name: _decode_system(fields.get_object(name)) for name in fields.values}
    except ConfigError:
        return {}


def _decode_system(fields: Fields) -> SystemFacts:
    return SystemFacts(
        content_key=fields.get_text("contentKey"),
        share_key=fields.get_text("shareKey"),
        job=fields.get_text("job"),
        image=fields.get_text("image"),
    )
