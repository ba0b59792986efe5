"""From a request to its answer: which code runs for which verb, resource and subresource."""

import json
from dataclasses import dataclass
from typing import Any

import yaml

from treenail_lab.apiserver.access.authentication import ApiUser, TokenIssuer
from treenail_lab.apiserver.errors import (
    StatusCause,
    bad_request_error,
    invalid_error,
    method_not_allowed_error,
    path_not_found_error,
    unsupported_media_type_error,
)
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.patch.json_patch import apply_json_patch, apply_merge_patch
from treenail_lab.apiserver.patch.strategic_merge import apply_strategic_merge
from treenail_lab.apiserver.registry.deletion import delete_object, parse_delete_options
from treenail_lab.apiserver.registry.eviction import evict_pod
from treenail_lab.apiserver.registry.lists import build_selection, list_objects
from treenail_lab.apiserver.registry.metadata import check_uid
from treenail_lab.apiserver.registry.registry import (
    ObjectChange,
    ObjectRegistry,
    WriteContext,
    check_resource_version,
)
from treenail_lab.apiserver.request import ServerRequest
from treenail_lab.apiserver.schema.kinds import ResourceKind

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


@dataclass(frozen=True, slots=True)
class RequestBody:
    """What came with a request."""

    content: bytes
    media_type: str
    user_agent: str

    def parse_document(self) -> Any:
        """The body as a value; empty is an empty object, 400 when it can't be read."""
        if not self.content:
            return {}
        try:
            if self.media_type.endswith("yaml"):
                return yaml.safe_load(self.content)
            return json.loads(self.content)
        except (ValueError, yaml.YAMLError) as error:
            raise bad_request_error(f"the object provided is unrecognized: {error}") from None

    def parse_object(self) -> Json:
        """The body as an object; 415 for media types that are not JSON or YAML."""
        if self.media_type not in {"application/json", "application/yaml", ""}:
            raise unsupported_media_type_error(["application/json", "application/yaml"])
        document = self.parse_document()
        if not isinstance(document, dict):
            raise bad_request_error("the body of the request must be an object")
        return document


@dataclass(frozen=True, slots=True)
class ApiAnswer:
    """What to say: an HTTP code and a document."""

    code: int
    document: Json


class VerbDispatcher:
    """Answers every request on resources but watches."""

    def __init__(self, registry: ObjectRegistry, tokens: TokenIssuer) -> None:
        self._registry = registry
        self._tokens = tokens

    def answer_request(
        self, ask: ServerRequest, kind: ResourceKind, body: RequestBody, user: ApiUser
    ) -> ApiAnswer:
        """Do what is asked for; raises ApiError."""
        if ask.subresource and ask.subresource not in kind.subresources:
            raise path_not_found_error()
        if bool(ask.namespace) != kind.is_namespaced and ask.verb not in {"list", "watch"}:
            raise path_not_found_error()
        write = WriteContext(
            user=user,
            field_manager=_find_field_manager(ask, body),
            is_dry_run=ask.is_dry_run,
            is_forced=ask.read_flag("force"),
            is_strict=ask.query.get("fieldValidation") == "Strict",
        )
        match ask.verb, ask.subresource:
            case "get", "" | "status":
                return ApiAnswer(200, self._registry.find_object(kind, ask.namespace, ask.name))
            case "list", "":
                return ApiAnswer(200, list_objects(self._registry.store, kind, ask))
            case "create", "" if not ask.name:
                made = self._registry.create_object(kind, ask.namespace, body.parse_object(), write)
                return ApiAnswer(201, made)
            case "update", "" | "status":
                return self._update_object(ask, kind, body, write)
            case "patch", "" | "status":
                return self._patch_object(ask, kind, body, write)
            case "delete", "":
                options = parse_delete_options(
                    self._read_delete_options(ask, body), dry_run=ask.is_dry_run
                )
                obj = delete_object(self._registry, kind, ask.namespace, ask.name, options, user)
                return ApiAnswer(200, obj)
            case "deletecollection", "":
                return self._delete_collection(ask, kind, body, user)
            case "create", "eviction":
                evicted = evict_pod(
                    self._registry, kind, ask.namespace, ask.name, body.parse_object(), write
                )
                return ApiAnswer(201, evicted)
            case "create", "token":
                account = self._registry.find_object(kind, ask.namespace, ask.name)
                return ApiAnswer(
                    201, self._tokens.answer_token_request(account, body.parse_object())
                )
            case _:
                raise method_not_allowed_error()

    def _update_object(
        self, ask: ServerRequest, kind: ResourceKind, body: RequestBody, write: WriteContext
    ) -> ApiAnswer:
        obj = body.parse_object()
        known = self._registry.store.find_object(kind.storage, (ask.namespace, ask.name))
        if known is None and kind.can_create_on_update and not ask.subresource:
            named = obj | {"metadata": (obj.get("metadata") or {}) | {"name": ask.name}}
            return ApiAnswer(201, self._registry.create_object(kind, ask.namespace, named, write))
        check_uid(kind, self._registry.find_object(kind, ask.namespace, ask.name), obj)
        check_resource_version(kind, obj)
        changed = self._registry.update_object(
            kind, ask.namespace, ask.name, lambda _: obj, write, ask.subresource
        )
        return ApiAnswer(200, changed)

    def _patch_object(
        self, ask: ServerRequest, kind: ResourceKind, body: RequestBody, write: WriteContext
    ) -> ApiAnswer:
        if body.media_type == APPLY_PATCH:
            return self._apply_object(ask, kind, body, write)
        change = _build_change(kind, body)
        changed = self._registry.update_object(
            kind, ask.namespace, ask.name, change, write, ask.subresource
        )
        return ApiAnswer(200, changed)

    def _apply_object(
        self, ask: ServerRequest, kind: ResourceKind, body: RequestBody, write: WriteContext
    ) -> ApiAnswer:
        if not ask.query.get("fieldManager"):
            cause = StatusCause("FieldValueRequired", "Required value: is required for apply patch",
                          "fieldManager")  # fmt: skip
            raise invalid_error("meta.k8s.io", "PatchOptions", "", [cause])
        intent = body.parse_document()
        if not isinstance(intent, dict):
            raise bad_request_error("an applied configuration must be an object")
        obj, new = self._registry.apply_object(
            kind, ask.namespace, ask.name, intent, write, ask.subresource
        )
        return ApiAnswer(201 if new else 200, obj)

    def _read_delete_options(self, ask: ServerRequest, body: RequestBody) -> Json:
        """The DeleteOptions, in the body or in query parameters."""
        options = dict(body.parse_object())
        if "propagationPolicy" in ask.query:
            options.setdefault("propagationPolicy", ask.query["propagationPolicy"])
        if (grace_s := ask.read_number("gracePeriodSeconds")) is not None:
            options.setdefault("gracePeriodSeconds", grace_s)
        return options

    def _delete_collection(
        self, ask: ServerRequest, kind: ResourceKind, body: RequestBody, user: ApiUser
    ) -> ApiAnswer:
        options = parse_delete_options(self._read_delete_options(ask, body), dry_run=ask.is_dry_run)
        selected = build_selection(ask, kind)
        doomed = [obj for obj in self._registry.store.list_objects(kind.storage) if selected(obj)]
        for obj in doomed:
            metadata = obj["metadata"]
            delete_object(
                self._registry,
                kind,
                metadata.get("namespace", ""),
                metadata["name"],
                options,
                user,
            )
        return ApiAnswer(200, list_objects(self._registry.store, kind, ask) | {"items": doomed})


def _find_field_manager(ask: ServerRequest, body: RequestBody) -> str:
    """Who owns the fields that are written: as asked, else the program that writes."""
    asked = ask.query.get("fieldManager", "")
    return asked or body.user_agent.partition("/")[0] or "unknown"


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
