"""The ConfigMap with the settings of an installation: its key has the field as JSON. Pure."""

import json

from treenail.api.decode import Fields, Json
from treenail.errors import ConfigError
from treenail.installer.inputs.image_mode import (
    CONFIGMAP,
    CONFIGMAP_KEY,
    NAMESPACE,
    ImageMode,
    ImageModePool,
)
from treenail.installer.inputs.image_mode_field import FIELD, parse_image_mode


def is_settings_configmap(document: Json) -> bool:
    """Return whether an object is the ConfigMap with the settings."""
    meta = Fields.from_json(document, "").get_object("metadata")
    place = (document.get("kind"), meta.get_text("namespace"), meta.get_text("name"))
    return place == ("ConfigMap", NAMESPACE, CONFIGMAP)


def read_settings_configmap(document: Json, *, where: str) -> ImageMode:
    """Read the settings; raise `ConfigError` that names ``where``."""
    text = Fields.from_json(document, where).get_object("data").get_required_text(CONFIGMAP_KEY)
    place = f"{where}, key {CONFIGMAP_KEY}"
    # The value is one document of its own: a broken one must not change the text around it.
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise _make_error(place, "expected JSON") from None
    parsed = parse_image_mode(json.dumps({FIELD: value}), where=place)
    if parsed.problems or parsed.settings is None:
        raise _make_error(place, "; ".join(each.text for each in parsed.problems[:3]))
    return parsed.settings


def build_settings_configmap(settings: ImageMode) -> Json:
    """Return the ConfigMap; equal settings give equal objects."""
    content = {
        "enabled": settings.is_enabled,
        "registry": {"type": settings.registry.value},
        "workers": settings.workers.value,
        "pools": [_encode_pool(each) for each in settings.pools],
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": CONFIGMAP, "namespace": NAMESPACE},
        "data": {CONFIGMAP_KEY: json.dumps(content, indent=1) + "\n"},
    }


def _encode_pool(pool: ImageModePool) -> Json:
    encoded: Json = {"name": pool.name, "renderedImagePushSpec": pool.push_spec}
    return {**encoded, "containerFile": pool.container_file} if pool.container_file else encoded


def _make_error(place: str, why: str) -> ConfigError:
    return ConfigError(
        f"{place}: {why}",
        remedy="write the field imageMode again, and run: treenail-controller install prepare",
    )
