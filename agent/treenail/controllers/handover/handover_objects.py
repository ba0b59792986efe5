"""Objects by which the bootstrap host and the controller ``install`` hand images over. Pure.

The bootstrap host publishes a Secret with its registry, the images in it and the objects that the
cluster adopts. The controller answers with a ConfigMap when the final registries have the images.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail.api.decode import Fields, Json, load_json
from treenail.api.unknown_fields import reject_unknown_fields
from treenail.config.bootstrap_registry import (
    BootstrapRegistryRecord,
    decode_record,
    encode_record,
)
from treenail.errors import ConfigError
from treenail.image.push_spec import PushSpec, parse_push_spec
from treenail.installer.inputs.image_mode import NAMESPACE
from treenail.kube.resources import MACHINEOSBUILDS, MACHINEOSCONFIGS, SECRETS
from treenail.registry.names import check_digest

HANDOVER_SECRET = "treenail-install-handover"  # noqa: S105  # the name of a Secret
RESULT_CONFIGMAP = "treenail-install-result"
ADOPTED_KINDS = (SECRETS.kind, MACHINEOSCONFIGS.kind, MACHINEOSBUILDS.kind)
"""Kinds of the objects that the cluster adopts."""

_REGISTRY_KEY, _OBJECTS_KEY = "registry.json", "objects.json"
_LIMIT = 1024 * 1024  # the maximum size of a Kubernetes Secret
_IMAGES_LIMIT, _OBJECTS_LIMIT = 50, 200
_IMAGE_FIELDS = ("pool", "digest", "pushSpec")
_REGISTRY_FIELDS = ("registry", "ca", "username", "password", "images")


@dataclass(frozen=True, slots=True)
class HandoverImage:
    """The image of a pool, built or named at the installation."""

    pool: str
    digest: str
    push_spec: PushSpec
    """Final name. The registry on the bootstrap host has the image under the same repository."""

    @property
    def final_image(self) -> str:
        """Pull spec in the final registry."""
        return self.push_spec.make_pull_spec(self.digest)


@dataclass(frozen=True, slots=True)
class Handover:
    """Content of the Secret."""

    images: tuple[HandoverImage, ...]
    registry: str = ""
    """``HOST:PORT`` on the bootstrap host; empty if the images are in their final registries."""
    ca_pem: str = field(default="", repr=False)
    username: str = ""
    password: str = field(default="", repr=False)
    objects: tuple[Json, ...] = field(default=(), repr=False)
    """Secrets, MachineOSConfigs and MachineOSBuilds with status, as for an API server."""


@dataclass(frozen=True, slots=True)
class HandoverResult:
    """Content of the ConfigMap."""

    digests: Mapping[str, str]
    """Digest of each pool's image, which its final registry has."""
    registry: str
    """The registry that may stop; empty for none."""
    completed: str
    """Time in RFC 3339."""


def build_handover_secret(handover: Handover) -> Json:
    """Build the Secret; equal contents give equal objects. Raises `ConfigError`."""
    images: list[Json] = [
        {"pool": each.pool, "digest": each.digest, "pushSpec": str(each.push_spec)}
        for each in handover.images
    ]
    registry: Json = {"registry": handover.registry, "images": images}
    if handover.registry:
        registry |= {
            "ca": handover.ca_pem,
            "username": handover.username,
            "password": handover.password,
        }
    contents = {_REGISTRY_KEY: registry, _OBJECTS_KEY: list(handover.objects)}
    secret: Json = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": HANDOVER_SECRET, "namespace": NAMESPACE},
        "type": "Opaque",
        "data": {
            name: base64.b64encode(json.dumps(value, sort_keys=True).encode()).decode()
            for name, value in contents.items()
        },
    }
    read_handover_secret(secret)
    return secret


def read_handover_secret(document: Json) -> Handover:
    """Read the Secret; raise `ConfigError`, which contains no part of a secret."""
    where = f"Secret {NAMESPACE}/{HANDOVER_SECRET}"
    data = Fields.from_json(document, where).get_object("data")
    registry = _read_json(data, _REGISTRY_KEY, where)
    fields = Fields.from_json(registry, f"{where}, {_REGISTRY_KEY}")
    reject_unknown_fields(fields, _REGISTRY_FIELDS)
    images = fields.map_objects("images", _read_image)
    pools = [each.pool for each in images]
    if len(pools) > _IMAGES_LIMIT or len(set(pools)) != len(pools):
        raise ConfigError(
            f"{fields.path_of('images')}: expected at most {_IMAGES_LIMIT} images and one for each "
            "pool"
        )
    handover = Handover(
        images,
        fields.get_text("registry"),
        fields.get_text("ca"),
        fields.get_text("username"),
        fields.get_text("password"),
        _read_objects(_read_json(data, _OBJECTS_KEY, where), f"{where}, {_OBJECTS_KEY}"),
    )
    if handover.registry and images:
        make_node_record(handover)
    return handover


def make_node_record(handover: Handover) -> BootstrapRegistryRecord:
    """Return the record of the registry; raise `ConfigError` for invalid fields."""
    repositories = (f"{each.push_spec.registry}/{each.push_spec.repository}"
                    for each in handover.images)  # fmt: skip
    record = BootstrapRegistryRecord(
        handover.registry, handover.username, handover.password, tuple(sorted(set(repositories)))
    )
    return decode_record(encode_record(record), where="the bootstrap registry")


def build_result_configmap(result: HandoverResult, *, namespace: str = NAMESPACE) -> Json:
    """Build the ConfigMap."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": RESULT_CONFIGMAP, "namespace": namespace},
        "data": {
            "handedOver": json.dumps(dict(result.digests), sort_keys=True),
            "registry": result.registry,
            "completed": result.completed,
        },
    }


def read_result_configmap(document: Json) -> HandoverResult:
    """Read the ConfigMap; raise `ConfigError`."""
    where = f"ConfigMap {NAMESPACE}/{RESULT_CONFIGMAP}"
    data = Fields.from_json(document, where).get_object("data")
    text = data.get_required_text("handedOver")
    digests = Fields.from_json(load_json(text, where=where), where)
    return HandoverResult(
        {name: digests.get_required_text(name) for name in digests.values},
        data.get_text("registry"),
        data.get_text("completed"),
    )


def _read_image(fields: Fields) -> HandoverImage:
    reject_unknown_fields(fields, _IMAGE_FIELDS)
    return HandoverImage(
        fields.get_required_text("pool"),
        check_digest(fields.get_required_text("digest")),
        parse_push_spec(fields.get_required_text("pushSpec"), where=fields.path_of("pushSpec")),
    )


def _read_objects(found: object, where: str) -> tuple[Json, ...]:
    if not isinstance(found, list) or len(found) > _OBJECTS_LIMIT:
        raise ConfigError(f"{where}: expected a list of at most {_OBJECTS_LIMIT} objects")
    objects = []
    for index, each in enumerate(found):
        fields = Fields.from_json(each, f"{where}[{index}]")
        kind = fields.get_required_text("kind")
        if kind not in ADOPTED_KINDS:
            raise ConfigError(
                f"{fields.path_of('kind')}: expected one of {', '.join(ADOPTED_KINDS)}, found "
                f"{kind!r:.60}"
            )
        fields.get_object("metadata").get_required_text("name")
        objects.append(fields.values)
    return tuple(objects)


def _read_json(data: Fields, name: str, where: str) -> object:
    text = data.get_required_text(name)
    if len(text) > 2 * _LIMIT:
        raise ConfigError(f"{data.path_of(name)}: longer than a Secret can be")
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        # Without its cause, which contains the content.
        raise ConfigError(f"{data.path_of(name)}: not base64") from None
    return load_json(content, where=f"{where}, {name}")
