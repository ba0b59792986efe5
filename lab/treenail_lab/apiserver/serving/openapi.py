"""The little of OpenAPI v3 that kubectl wants to see.

It looks whether a kind's PATCH takes ``fieldValidation``, and if so leaves checking to the server.
There are no schemas: ``kubectl explain`` has nothing to say.
"""

from treenail_lab.apiserver.errors import path_not_found_error
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.schema.kinds import KindRegistry, ResourceKind

ROOT = "/openapi/v3"


def build_document(kinds: KindRegistry, path: str) -> Json:
    """The index, or what there is to say about one API version; raises 404 for anything else."""
    inner = path.removeprefix(ROOT).strip("/")
    by_root: dict[str, list[ResourceKind]] = {}
    for kind in kinds:
        by_root.setdefault(_build_root(kind), []).append(kind)
    if not inner:
        return {"paths": {root: {"serverRelativeURL": f"{ROOT}/{root}"} for root in by_root}}
    if inner not in by_root:
        raise path_not_found_error()
    paths = {
        f"/{inner}/{_build_path(kind)}": {"patch": _build_patch(kind)} for kind in by_root[inner]
    }
    return {
        "openapi": "3.0.0",
        "info": {"title": "treenail lab", "version": "v1"},
        "paths": paths,
        "components": {"schemas": {}},
    }


def _build_root(kind: ResourceKind) -> str:
    return f"apis/{kind.group}/{kind.version}" if kind.group else f"api/{kind.version}"


def _build_path(kind: ResourceKind) -> str:
    namespace = "namespaces/{namespace}/" if kind.is_namespaced else ""
    return f"{namespace}{kind.plural}/{{name}}"


def _build_patch(kind: ResourceKind) -> Json:
    names = ("dryRun", "fieldManager", "fieldValidation", "force")
    return {
        "parameters": [{"name": n, "in": "query", "schema": {"type": "string"}} for n in names],
        "responses": {"200": {"description": "OK"}},
        "x-kubernetes-action": "patch",
        "x-kubernetes-group-version-kind": {
            "group": kind.group,
            "version": kind.version,
            "kind": kind.kind,
        },
    }
