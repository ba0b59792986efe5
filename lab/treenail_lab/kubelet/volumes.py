"""Volumes of a pod as directories: ConfigMaps, Secrets, projections of them, and empty ones."""

import base64
import os
from collections.abc import Mapping
from pathlib import Path

from treenail.errors import ConfigError, NotFoundError
from treenail.kube.api_client import Client
from treenail.kube.resources import CONFIGMAPS, SECRETS
from treenail_lab.apiserver.objects import Json, find_value

_DEFAULT_MODE = 0o644
Files = dict[str, tuple[bytes, int]]
"""Content and mode by the path below the volume."""


class MissingObjectError(ConfigError):
    """An object or key that a pod refers to does not exist yet."""


class VolumeReader:
    """Reads the objects that the pods of one namespace refer to, as the node's kubelet."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    def write_volume(self, volume: Json, directory: Path, group: int | None, pod: Json) -> None:
        """Create the directory of a volume; raise `ConfigError` for a missing object."""
        directory.mkdir(parents=True)
        # As kubelets do for volumes with a group, so that its members can write.
        directory.chmod(0o777 if group is None else 0o2775)
        if group is not None:
            os.chown(directory, -1, group)
        if "emptyDir" in volume:
            return
        for path, (content, mode) in self._read_files(volume, pod).items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            if group is not None:
                os.chown(target, -1, group)
            target.chmod(mode if group is None else mode | 0o040)

    def read_variable(self, source: Json, pod: Json) -> str | None:
        """Return the value of a ``valueFrom``; None if it is optional and missing."""
        if field := source.get("fieldRef"):
            return _read_field(pod, field.get("fieldPath", ""))
        for key, is_secret in (("secretKeyRef", True), ("configMapKeyRef", False)):
            if reference := source.get(key):
                data = self._read_object(reference["name"], reference, is_secret=is_secret)
                if reference["key"] in data:
                    return data[reference["key"]].decode("utf-8", "replace")
                if reference.get("optional"):
                    return None
                raise MissingObjectError(
                    f"couldn't find key {reference['key']} in {reference['name']}"
                )
        raise ConfigError(f"cannot read a variable from {', '.join(source)}: not emulated")

    def read_source(self, source: Json) -> Mapping[str, str]:
        """Return the variables of one element of ``envFrom``."""
        variables = {}
        for key, is_secret in (("secretRef", True), ("configMapRef", False)):
            if reference := source.get(key):
                data = self._read_object(reference["name"], reference, is_secret=is_secret)
                for name, value in data.items():
                    variables[source.get("prefix", "") + name] = value.decode("utf-8", "replace")
        return variables

    def _read_files(self, volume: Json, pod: Json) -> Files:
        if source := volume.get("configMap"):
            return self._select_files(source["name"], source, is_secret=False)
        if source := volume.get("secret"):
            return self._select_files(source["secretName"], source, is_secret=True)
        if source := volume.get("downwardAPI"):
            return _read_downward(source, pod)
        projected = volume["projected"]
        mode = {"defaultMode": projected["defaultMode"]} if "defaultMode" in projected else {}
        files: Files = {}
        for projection in projected.get("sources") or []:
            for key, is_secret in (("secret", True), ("configMap", False)):
                if source := projection.get(key):
                    files |= self._select_files(source["name"], mode | source, is_secret=is_secret)
            if source := projection.get("downwardAPI"):
                files |= _read_downward(mode | source, pod)
            if "serviceAccountToken" in projection:
                raise ConfigError("cannot mount a service account token: not emulated")
        return files

    def _select_files(self, name: str, source: Json, *, is_secret: bool) -> Files:
        data = self._read_object(name, source, is_secret=is_secret)
        default = source.get("defaultMode", _DEFAULT_MODE)
        if (items := source.get("items")) is None:
            return {key: (content, default) for key, content in data.items()}
        files = {}
        for item in items:
            if item["key"] in data:
                path = _check_path(item["path"])
                files[path] = data[item["key"]], item.get("mode", default)
            elif not source.get("optional"):
                raise MissingObjectError(f"{name} references non-existent key: {item['key']}")
        return files

    def _read_object(self, name: str, source: Json, *, is_secret: bool) -> dict[str, bytes]:
        resource = SECRETS if is_secret else CONFIGMAPS
        try:
            document: Json = self._client.get(resource, name, namespace=self._namespace)
        except NotFoundError as error:
            if source.get("optional"):
                return {}
            raise MissingObjectError(f'{resource.kind.lower()} "{name}" not found') from error
        data = document.get("data") or {}
        if is_secret:
            return {key: base64.b64decode(text) for key, text in data.items()}
        binary = document.get("binaryData") or {}
        texts = {key: text.encode() for key, text in data.items()}
        return texts | {key: base64.b64decode(text) for key, text in binary.items()}


def _read_downward(source: Json, pod: Json) -> Files:
    default = source.get("defaultMode", _DEFAULT_MODE)
    return {
        _check_path(item["path"]): (
            (_read_field(pod, find_value(item, "fieldRef", "fieldPath") or "") or "").encode(),
            item.get("mode", default),
        )
        for item in source.get("items") or []
    }


def _read_field(pod: Json, path: str) -> str | None:
    prefix, bracket, rest = path.partition("['")
    parts = prefix.split(".") + ([rest.removesuffix("']")] if bracket else [])
    value = find_value(pod, *parts)
    return None if value is None else str(value)


def _check_path(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/"):
        raise ConfigError(f"cannot write {path!r} into a volume: it must be a relative path")
    return path
