"""Dispatch a request by verb, resource and subresource, and return its answer.

The subresource pods/log reads the files of the Nodes' kubelets.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from treenail_lab.apiserver.access.authentication import ApiUser, TokenIssuer
from treenail_lab.apiserver.errors import (
    StatusCause,
    bad_request_error,
    invalid_error,
    method_not_allowed_error,
    not_found_error,
    path_not_found_error,
    unsupported_media_type_error,
)
from treenail_lab.apiserver.objects import Json, find_value
from treenail_lab.apiserver.patch.patches import (
    apply_json_patch,
    apply_merge_patch,
    apply_strategic_merge,
)
from treenail_lab.apiserver.registry.deletion import (
    DeleteOptions,
    delete_object,
    parse_delete_options,
)
from treenail_lab.apiserver.registry.disruption_budgets import PODS, evict_pod
from treenail_lab.apiserver.registry.list_watch import build_selection, list_objects
from treenail_lab.apiserver.registry.metadata import check_uid
from treenail_lab.apiserver.registry.registry import (
    ObjectChange,
    ObjectRegistry,
    WriteContext,
    check_resource_version,
)
from treenail_lab.apiserver.request import ServerRequest
from treenail_lab.apiserver.schema.kinds import ResourceKind
from treenail_lab.apiserver.store import Store

_POLL_S = 0.1
_CHUNK = 1 << 16


class PodLogs:
    """The logs below the directories of the kubelets that run containers."""

    def __init__(self, store: Store) -> None:
        self.directories: list[Path] = []
        """Each has ``NAMESPACE/POD/CONTAINER.log``."""
        self._store = store

    async def stream_log(self, request: ServerRequest) -> AsyncIterator[bytes]:
        """Yield the log of a container; with ``follow`` until the container has ended."""
        pod = self._find_pod(request)
        if pod is None:
            raise not_found_error("", "pods", request.name)
        container = _choose_container(pod, request.query.get("container", ""))
        path = self._find_log(request, container)
        offset = _find_offset(path, request.read_number("tailLines")) if path else 0
        while True:
            # Before the file: what a container wrote until its end is read, too.
            is_over = not request.read_flag("follow") or _has_ended(
                self._find_pod(request), container
            )
            path = path or self._find_log(request, container)
            while path is not None and (chunk := _read_chunk(path, offset)):
                offset += len(chunk)
                yield chunk
            if is_over:
                return
            await asyncio.sleep(_POLL_S)

    def _find_pod(self, request: ServerRequest) -> Json | None:
        return self._store.find_object(PODS, (request.namespace, request.name))

    def _find_log(self, request: ServerRequest, container: str) -> Path | None:
        below = Path(request.namespace, request.name, f"{container}.log")
        paths = (directory / below for directory in self.directories)
        return next((path for path in paths if path.exists()), None)


def _choose_container(pod: Json, name: str) -> str:
    names, initial = (
        [container["name"] for container in find_value(pod, "spec", group) or []]
        for group in ("containers", "initContainers")
    )
    pod_name = pod["metadata"]["name"]
    if name:
        if name not in {*names, *initial}:
            raise bad_request_error(f"container {name} is not valid for pod {pod_name}")
        return name
    if len(names) > 1 or initial:
        raise bad_request_error(
            f"a container name must be specified for pod {pod_name}, choose one of: "
            f"[{' '.join([*initial, *names])}]"
        )
    return str(names[0])


def _has_ended(pod: Json | None, container: str) -> bool:
    if pod is None or find_value(pod, "status", "phase") in {"Succeeded", "Failed"}:
        return True
    for group in ("initContainerStatuses", "containerStatuses"):
        for status in find_value(pod, "status", group) or []:
            if status.get("name") == container:
                return bool(find_value(status, "state", "terminated"))
    return False


def _find_offset(path: Path, lines: int | None) -> int:
    """Return where the last lines begin; 0 without a number of them."""
    if lines is None:
        return 0
    content = path.read_bytes()
    kept = content.splitlines(keepends=True)[-lines:] if lines > 0 else []
    return len(content) - sum(map(len, kept))


def _read_chunk(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(_CHUNK)


JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
# The loader in C reads a CustomResourceDefinition in a tenth of the time.
_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


@dataclass(frozen=True, slots=True)
class RequestBody:
    """The body of a request."""

    content: bytes
    media_type: str
    user_agent: str

    def parse_document(self) -> Any:
        """Parse the body; an empty one is an empty object. Raise 400 for invalid JSON or YAML."""
        if not self.content:
            return {}
        try:
            if self.media_type.endswith("yaml"):
                return yaml.load(self.content, Loader=_LOADER)  # noqa: S506  one of two safe loaders
            return json.loads(self.content)
        except (ValueError, yaml.YAMLError) as error:
            raise bad_request_error(f"the object provided is unrecognized: {error}") from None

    def parse_object(self) -> Json:
        """Parse the body as an object; raise 415 for media types that are not JSON or YAML."""
        if self.media_type not in {"application/json", "application/yaml", ""}:
            raise unsupported_media_type_error(["application/json", "application/yaml"])
        document = self.parse_document()
        if not isinstance(document, dict):
            raise bad_request_error("the body of the request must be an object")
        return document


@dataclass(frozen=True, slots=True)
class ApiAnswer:
    """An HTTP status code and a document."""

    code: int
    document: Json


class VerbDispatcher:
    """Answers every request on resources except watches."""

    def __init__(self, registry: ObjectRegistry, tokens: TokenIssuer) -> None:
        self._registry = registry
        self._tokens = tokens

    def answer_request(
        self, request: ServerRequest, kind: ResourceKind, body: RequestBody, user: ApiUser
    ) -> ApiAnswer:
        """Execute a request and return its answer; raise `ApiError`."""
        if request.subresource and request.subresource not in kind.subresources:
            raise path_not_found_error()
        if bool(request.namespace) != kind.is_namespaced and request.verb not in {"list", "watch"}:
            raise path_not_found_error()
        write = WriteContext(
            user=user,
            field_manager=_find_field_manager(request, body),
            is_dry_run=request.is_dry_run,
            is_forced=request.read_flag("force"),
            is_strict=request.query.get("fieldValidation") == "Strict",
        )
        match request.verb, request.subresource:
            case "get", "" | "status":
                return ApiAnswer(
                    200, self._registry.find_object(kind, request.namespace, request.name)
                )
            case "list", "":
                return ApiAnswer(200, list_objects(self._registry.store, kind, request))
            case "create", "" if not request.name:
                created = self._registry.create_object(
                    kind, request.namespace, body.parse_object(), write
                )
                return ApiAnswer(201, created)
            case "update", "" | "status" | "approval":
                return self._update_object(request, kind, body, write)
            case "patch", "" | "status" | "approval":
                return self._patch_object(request, kind, body, write)
            case "delete", "":
                options = self._parse_delete_options(request, kind, body)
                obj = delete_object(
                    self._registry, kind, request.namespace, request.name, options, user
                )
                return ApiAnswer(200, obj)
            case "deletecollection", "":
                return self._delete_collection(request, kind, body, user)
            case "create", "eviction":
                evicted = evict_pod(
                    self._registry,
                    kind,
                    request.namespace,
                    request.name,
                    body.parse_object(),
                    write,
                )
                return ApiAnswer(201, evicted)
            case "create", "token":
                account = self._registry.find_object(kind, request.namespace, request.name)
                return ApiAnswer(
                    201, self._tokens.answer_token_request(account, body.parse_object())
                )
            case _:
                raise method_not_allowed_error()

    def _update_object(
        self, request: ServerRequest, kind: ResourceKind, body: RequestBody, write: WriteContext
    ) -> ApiAnswer:
        obj = body.parse_object()
        known = self._registry.store.find_object(kind.storage, (request.namespace, request.name))
        if known is None and kind.can_create_on_update and not request.subresource:
            named = obj | {"metadata": (obj.get("metadata") or {}) | {"name": request.name}}
            return ApiAnswer(
                201, self._registry.create_object(kind, request.namespace, named, write)
            )
        check_uid(kind, self._registry.find_object(kind, request.namespace, request.name), obj)
        check_resource_version(kind, obj)
        changed = self._registry.update_object(
            kind, request.namespace, request.name, lambda _: obj, write, request.subresource
        )
        return ApiAnswer(200, changed)

    def _patch_object(
        self, request: ServerRequest, kind: ResourceKind, body: RequestBody, write: WriteContext
    ) -> ApiAnswer:
        if body.media_type == APPLY_PATCH:
            return self._apply_object(request, kind, body, write)
        change = _build_change(kind, body)
        changed = self._registry.update_object(
            kind, request.namespace, request.name, change, write, request.subresource
        )
        return ApiAnswer(200, changed)

    def _apply_object(
        self, request: ServerRequest, kind: ResourceKind, body: RequestBody, write: WriteContext
    ) -> ApiAnswer:
        if not request.query.get("fieldManager"):
            cause = StatusCause("FieldValueRequired", "Required value: is required for apply patch",
                          "fieldManager")  # fmt: skip
            raise invalid_error("meta.k8s.io", "PatchOptions", "", [cause])
        intent = body.parse_document()
        if not isinstance(intent, dict):
            raise bad_request_error("an applied configuration must be an object")
        obj, new = self._registry.apply_object(
            kind, request.namespace, request.name, intent, write, request.subresource
        )
        return ApiAnswer(201 if new else 200, obj)

    def _parse_delete_options(
        self, request: ServerRequest, kind: ResourceKind, body: RequestBody
    ) -> DeleteOptions:
        return parse_delete_options(
            self._read_delete_options(request, body),
            dry_run=request.is_dry_run,
            default_policy="Orphan" if kind.should_orphan_dependents else "Background",
        )

    def _read_delete_options(self, request: ServerRequest, body: RequestBody) -> Json:
        """Read the DeleteOptions from the body and the query parameters."""
        options = dict(body.parse_object())
        if "propagationPolicy" in request.query:
            options.setdefault("propagationPolicy", request.query["propagationPolicy"])
        if (grace_s := request.read_number("gracePeriodSeconds")) is not None:
            options.setdefault("gracePeriodSeconds", grace_s)
        return options

    def _delete_collection(
        self, request: ServerRequest, kind: ResourceKind, body: RequestBody, user: ApiUser
    ) -> ApiAnswer:
        options = self._parse_delete_options(request, kind, body)
        selected = build_selection(request, kind)
        selected_objects = [
            obj for obj in self._registry.store.list_objects(kind.storage) if selected(obj)
        ]
        for obj in selected_objects:
            metadata = obj["metadata"]
            delete_object(
                self._registry,
                kind,
                metadata.get("namespace", ""),
                metadata["name"],
                options,
                user,
            )
        return ApiAnswer(
            200, list_objects(self._registry.store, kind, request) | {"items": selected_objects}
        )


def _find_field_manager(request: ServerRequest, body: RequestBody) -> str:
    """Return the ``fieldManager`` parameter, or the program name of the User-Agent header."""
    manager = request.query.get("fieldManager", "")
    return manager or body.user_agent.partition("/")[0] or "unknown"


def _build_change(kind: ResourceKind, body: RequestBody) -> ObjectChange:
    patch = body.parse_document()
    if body.media_type == JSON_PATCH:
        return lambda old: apply_json_patch(old, patch)
    if body.media_type == MERGE_PATCH:
        return lambda old: apply_merge_patch(old, patch)
    if body.media_type == STRATEGIC_PATCH and not kind.is_custom:
        return lambda old: apply_strategic_merge(old, patch)
    strategic = [] if kind.is_custom else [STRATEGIC_PATCH]
    raise unsupported_media_type_error([JSON_PATCH, MERGE_PATCH, *strategic, APPLY_PATCH])
