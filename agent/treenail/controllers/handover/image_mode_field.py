"""Field ``imageMode`` of an install configuration, and its ConfigMap: read and written. Pure.

All problems are found in one pass, each with the line of the file. One key of the ConfigMap has
the field as JSON.
"""

import difflib
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from treenail.api import component_names, decode, documents
from treenail.api.pullspec import parse_push_spec
from treenail.controllers.handover import image_mode
from treenail.encoding import yaml11
from treenail.errors import ConfigError

FIELD = "imageMode"
_FIELDS = ("enabled", "registry", "workers", "pools")
_REGISTRY_FIELDS = ("type",)
_POOL_FIELDS = ("name", "containerFile", "renderedImagePushSpec")
_MAX_POOLS = 50
_MAX_QUOTED = 60

_Choice = TypeVar("_Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class ParsedImageMode:
    """The field, and what is wrong with it; ``settings`` is None without the field."""

    settings: image_mode.ImageMode | None = None
    problems: tuple[documents.LineProblem, ...] = ()
    pool_lines: tuple[int, ...] = ()
    """Line of each pool in the settings."""
    line: int = 0
    """Line of the field."""


def parse_image_mode(text: str | bytes, *, where: str) -> ParsedImageMode:
    """Read the field of a file's only document; raise `ConfigError` if that is not YAML.

    A field with problems is read as far as possible, for checks of the rest.
    """
    text = documents.decode_text(text, where)
    document = documents.load_document(text, where=where)
    if FIELD not in document:
        return ParsedImageMode()
    positions = yaml11.find_positions(text, where=where)
    reader = _FieldReader(positions)
    settings = reader.read_settings(document[FIELD])
    return ParsedImageMode(
        settings, tuple(reader.problems), tuple(reader.pool_lines), positions.find_line(FIELD)
    )


@dataclass(slots=True)
class _FieldReader:
    positions: yaml11.YamlPositions
    problems: list[documents.LineProblem] = field(default_factory=list)
    pool_lines: list[int] = field(default_factory=list)

    def read_settings(self, value: object) -> image_mode.ImageMode:
        path = (FIELD,)
        values = self._read_object(value, path, _FIELDS)
        registry_path = (*path, "registry")
        registry: dict[str, object] = {}
        if values.get("registry") is not None:
            registry = self._read_object(values["registry"], registry_path, _REGISTRY_FIELDS)
        return image_mode.ImageMode(
            is_enabled=self._read_bool(values.get("enabled"), (*path, "enabled")),
            registry=self._read_choice(
                registry.get("type"), (*registry_path, "type"), image_mode.RegistryType.BOOTSTRAP
            ),
            workers=self._read_choice(
                values.get("workers"), (*path, "workers"), image_mode.WorkerMode.WAIT
            ),
            pools=self._read_pools(values.get("pools"), (*path, "pools")),
        )

    def _read_pools(
        self, value: object, path: yaml11.FieldPath
    ) -> tuple[image_mode.ImageModePool, ...]:
        if value is None:
            return ()
        if not isinstance(value, list):
            self._add_problem(
                path,
                f"expected a list of pools, found {_describe_value(value)}",
                "write a list: - name: master",
            )
            return ()
        if len(value) > _MAX_POOLS:
            self._add_problem(
                path,
                f"expected at most {_MAX_POOLS} pools, found {len(value)}",
                "remove the others",
            )
            value = value[:_MAX_POOLS]
        pools: dict[str, image_mode.ImageModePool] = {}
        for index, entry in enumerate(value):
            pool = self._read_pool(entry, (*path, index))
            if pool is None:
                continue
            if pool.name in pools:
                first = self.pool_lines[list(pools).index(pool.name)]
                self._add_problem(
                    (*path, index),
                    f"pool {pool.name} is listed a second time, first in line {first}",
                    "remove one of the two entries",
                )
                continue
            pools[pool.name] = pool
            self.pool_lines.append(self.positions.find_line(*path, index))
        return tuple(pools.values())

    def _read_pool(self, value: object, path: yaml11.FieldPath) -> image_mode.ImageModePool | None:
        values = self._read_object(value, path, _POOL_FIELDS)
        name = self._read_text(values.get("name"), (*path, "name"))
        if not name:
            if isinstance(value, dict) and isinstance(values.get("name"), str | None):
                self._add_problem(
                    path, "the pool has no name", "add the name, such as name: master"
                )
            return None
        push_spec = values.get("renderedImagePushSpec")
        if push_spec is None or push_spec == "":
            self._add_problem(
                path,
                f"pool {name:.{_MAX_QUOTED}} has no renderedImagePushSpec, the final name of its "
                "image",
                "add it: renderedImagePushSpec: REGISTRY/REPOSITORY:TAG",
            )
        push_path = (*path, "renderedImagePushSpec")
        return image_mode.ImageModePool(
            name=name,
            container_file=self._read_text(values.get("containerFile"), (*path, "containerFile")),
            push_spec=self._read_push_spec(push_spec, push_path),
        )

    def _read_push_spec(self, value: object, path: yaml11.FieldPath) -> str:
        text = self._read_text(value, path)
        if text:
            try:
                parse_push_spec(text, where="renderedImagePushSpec")
            except ConfigError as error:
                self._add_problem(path, str(error), error.remedy)
        return text

    def _read_object(
        self, value: object, path: yaml11.FieldPath, known: Collection[str]
    ) -> dict[str, object]:
        if not isinstance(value, dict):
            self._add_problem(
                path,
                f"expected an object with {', '.join(known)}, found {_describe_value(value)}",
                "write the fields on lines of their own below it",
            )
            return {}
        for name in value:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                self._add_problem(
                    (*path, name),
                    f"unknown field {_format_path(path)}.{name:.{_MAX_QUOTED}}, expected "
                    f"{', '.join(known)}",
                    f"rename it to {near[0]}" if near else "remove it",
                )
        return value

    def _read_text(self, value: object, path: yaml11.FieldPath) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        self._add_problem(
            path,
            f"{_format_path(path)}: expected a string, found {_describe_value(value)}",
            "write it in quotes",
        )
        return ""

    def _read_bool(self, value: object, path: yaml11.FieldPath) -> bool:
        if value is None:
            return True
        if isinstance(value, bool):
            return value
        self._add_problem(
            path,
            f"{_format_path(path)}: expected true or false, found {_describe_value(value)}",
            "set it to true",
        )
        return True

    def _read_choice(self, value: object, path: yaml11.FieldPath, default: _Choice) -> _Choice:
        choices = type(default)
        if value is None:
            return default
        if isinstance(value, str) and value in tuple(choices):
            return choices(value)
        self._add_problem(
            path,
            f"{_format_path(path)}: expected {' or '.join(choices)}, "
            f"found {_describe_value(value)}",
            f"set it to {default}, the default, or remove it",
        )
        return default

    def _add_problem(self, path: yaml11.FieldPath, text: str, remedy: str) -> None:
        self.problems.append(documents.LineProblem(self.positions.find_line(*path), text, remedy))


def _format_path(path: yaml11.FieldPath) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def _describe_value(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return repr(value)[:_MAX_QUOTED]


def is_settings_configmap(document: decode.Json) -> bool:
    """Return whether an object is the ConfigMap with the settings."""
    meta = decode.Fields.from_json(document, "").get_object("metadata")
    place = (document.get("kind"), meta.get_text("namespace"), meta.get_text("name"))
    return place == ("ConfigMap", component_names.NAMESPACE, image_mode.CONFIGMAP)


def read_settings_configmap(document: decode.Json, *, where: str) -> image_mode.ImageMode:
    """Read the settings; raise `ConfigError` that names ``where``."""
    text = (
        decode.Fields.from_json(document, where)
        .get_object("data")
        .get_required_text(image_mode.CONFIGMAP_KEY)
    )
    place = f"{where}, key {image_mode.CONFIGMAP_KEY}"
    # The value is one document of its own: a broken one must not change the text around it.
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise _make_error(place, "expected JSON") from None
    parsed = parse_image_mode(json.dumps({FIELD: value}), where=place)
    if parsed.problems or parsed.settings is None:
        raise _make_error(place, "; ".join(problem.text for problem in parsed.problems[:3]))
    return parsed.settings


def build_settings_configmap(settings: image_mode.ImageMode) -> decode.Json:
    """Return the ConfigMap; equal settings give equal objects."""
    content = {
        "enabled": settings.is_enabled,
        "registry": {"type": settings.registry.value},
        "workers": settings.workers.value,
        "pools": [_encode_pool(pool) for pool in settings.pools],
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": image_mode.CONFIGMAP,
            "namespace": component_names.NAMESPACE,
            "labels": component_names.PART_OF_LABELS,
        },
        "data": {image_mode.CONFIGMAP_KEY: json.dumps(content, indent=1) + "\n"},
    }


def _encode_pool(pool: image_mode.ImageModePool) -> decode.Json:
    encoded: decode.Json = {"name": pool.name, "renderedImagePushSpec": pool.push_spec}
    return {**encoded, "containerFile": pool.container_file} if pool.container_file else encoded


def _make_error(place: str, why: str) -> ConfigError:
    return ConfigError(
        f"{place}: {why}",
        remedy="write the field imageMode again, and run: treenail-controller install prepare",
    )
