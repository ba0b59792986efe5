"""From a request to its answer: which code runs for which verb, resource and subresource."""

import json
from dataclasses import dataclass
from typing import Any

import yaml

from treenail_lab.apiserver.access.authentication import Tokens, User
from treenail_lab.apiserver.errors import (
    Cause,
    bad_request,
    invalid,
    method_not_allowed,
    no_such_path,
    unsupported_media_type,
)
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.patch.json_patch import json_patch, merge_patch
from treenail_lab.apiserver.patch.strategic_merge import strategic_merge
from treenail_lab.apiserver.registry.deletion import delete, read_options
from treenail_lab.apiserver.registry.eviction import evict
from treenail_lab.apiserver.registry.lists import listed, selection
from treenail_lab.apiserver.registry.metadata import check_uid
from treenail_lab.apiserver.registry.registry import Change, Registry, Write, check_versioned
from treenail_lab.apiserver.request import Ask
from treenail_lab.apiserver.schema.kinds import Kind

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


@dataclass(frozen=True, slots=True)
class Body:
    """What came with a request."""

    content: bytes
    media_type: str
    user_agent: str

    def document(self) -> Any:
        """The body as a value; empty is an empty object, 400 when it can't be read."""
        if not self.content:
            return {}
        try:
            if self.media_type.endswith("yaml"):
                return yaml.safe_load(self.content)
            return json.loads(self.content)
        except (ValueError, yaml.YAMLError) as error:
            raise bad_request(f"the object provided is unrecognized: {error}") from None

    def object(self) -> Json:
        """The body as an object; 415 for media types that are not JSON or YAML."""
        if self.media_type not in {"application/json", "application/yaml", ""}:
            raise unsupported_media_type(["application/json", "application/yaml"])
        document = self.document()
        if not isinstance(document, dict):
            raise bad_request("the body of the request must be an object")
        return document


@dataclass(frozen=True, slots=True)
class Answer:
    """What to say: an HTTP code and a document."""

    code: int
    document: Json


class Verbs:
    """Answers every request on resources but watches."""

    def __init__(self, registry: Registry, tokens: Tokens) -> None:
        self._registry = registry
        self._tokens = tokens

    def answer(self, ask: Ask, kind: Kind, body: Body, user: User) -> Answer:
        """Do what is asked for; raises ApiError."""
        if ask.subresource and ask.subresource not in kind.subresources:
            raise no_such_path()
        if bool(ask.namespace) != kind.namespaced and ask.verb not in {"list", "watch"}:
            raise no_such_path()
        write = Write(
            user=user,
            field_manager=_field_manager(ask, body),
            dry_run=ask.dry_run,
            force=ask.flag("force"),
            strict=ask.query.get("fieldValidation") == "Strict",
        )
        match ask.verb, ask.subresource:
            case "get", "" | "status":
                return Answer(200, self._registry.get(kind, ask.namespace, ask.name))
            case "list", "":
                return Answer(200, listed(self._registry.store, kind, ask))
            case "create", "" if not ask.name:
                made = self._registry.create(kind, ask.namespace, body.object(), write)
                return Answer(201, made)
            case "update", "" | "status":
                return self._update(ask, kind, body, write)
            case "patch", "" | "status":
                return self._patch(ask, kind, body, write)
            case "delete", "":
                options = read_options(self._delete_body(ask, body), dry_run=ask.dry_run)
                obj = delete(self._registry, kind, ask.namespace, ask.name, options, user)
                return Answer(200, obj)
            case "deletecollection", "":
                return self._delete_collection(ask, kind, body, user)
            case "create", "eviction":
                evicted = evict(self._registry, kind, ask.namespace, ask.name, body.object(), write)
                return Answer(201, evicted)
            case "create", "token":
                account = self._registry.get(kind, ask.namespace, ask.name)
                return Answer(201, self._tokens.requested(account, body.object()))
            case _:
                raise method_not_allowed()

    def _update(self, ask: Ask, kind: Kind, body: Body, write: Write) -> Answer:
        obj = body.object()
        known = self._registry.store.get(kind.storage, (ask.namespace, ask.name))
        if known is None and kind.create_on_update and not ask.subresource:
            named = obj | {"metadata": (obj.get("metadata") or {}) | {"name": ask.name}}
            return Answer(201, self._registry.create(kind, ask.namespace, named, write))
        check_uid(kind, self._registry.get(kind, ask.namespace, ask.name), obj)
        check_versioned(kind, obj)
        changed = self._registry.update(
            kind, ask.namespace, ask.name, lambda _: obj, write, ask.subresource
        )
        return Answer(200, changed)

    def _patch(self, ask: Ask, kind: Kind, body: Body, write: Write) -> Answer:
        if body.media_type == APPLY_PATCH:
            return self._apply(ask, kind, body, write)
        change = _change(kind, body)
        changed = self._registry.update(
            kind, ask.namespace, ask.name, change, write, ask.subresource
        )
        return Answer(200, changed)

    def _apply(self, ask: Ask, kind: Kind, body: Body, write: Write) -> Answer:
        if not ask.query.get("fieldManager"):
            cause = Cause("FieldValueRequired", "Required value: is required for apply patch",
                          "fieldManager")  # fmt: skip
            raise invalid("meta.k8s.io", "PatchOptions", "", [cause])
        intent = body.document()
        if not isinstance(intent, dict):
            raise bad_request("an applied configuration must be an object")
        obj, new = self._registry.apply(
            kind, ask.namespace, ask.name, intent, write, ask.subresource
        )
        return Answer(201 if new else 200, obj)

    def _delete_body(self, ask: Ask, body: Body) -> Json:
        """The DeleteOptions, in the body or in query parameters."""
        options = dict(body.object())
        if "propagationPolicy" in ask.query:
            options.setdefault("propagationPolicy", ask.query["propagationPolicy"])
        if (grace_s := ask.number("gracePeriodSeconds")) is not None:
            options.setdefault("gracePeriodSeconds", grace_s)
        return options

    def _delete_collection(self, ask: Ask, kind: Kind, body: Body, user: User) -> Answer:
        options = read_options(self._delete_body(ask, body), dry_run=ask.dry_run)
        selected = selection(ask, kind)
        doomed = [obj for obj in self._registry.store.list(kind.storage) if selected(obj)]
        for obj in doomed:
            metadata = obj["metadata"]
            delete(
                self._registry,
                kind,
                metadata.get("namespace", ""),
                metadata["name"],
                options,
                user,
            )
        return Answer(200, listed(self._registry.store, kind, ask) | {"items": doomed})


def _field_manager(ask: Ask, body: Body) -> str:
    """Who owns the fields that are written: as asked, else the program that writes."""
    asked = ask.query.get("fieldManager", "")
    return asked or body.user_agent.partition("/")[0] or "unknown"


def _change(kind: Kind, body: Body) -> Change:
    patch = body.document()
    if body.media_type == JSON_PATCH:
        return lambda old: json_patch(old, patch)
    if body.media_type == MERGE_PATCH:
        return lambda old: merge_patch(old, patch)
    if body.media_type == STRATEGIC_PATCH and not kind.custom:
        return lambda old: strategic_merge(old, patch)
    strategic = [] if kind.custom else [STRATEGIC_PATCH]
    raise unsupported_media_type([JSON_PATCH, MERGE_PATCH, *strategic, APPLY_PATCH])
