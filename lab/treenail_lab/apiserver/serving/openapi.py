"""The little of OpenAPI v3 that kubectl wants to see.

It looks whether a kind's PATCH takes ``fieldValidation``, and if so leaves checking to the server.
There are no schemas: ``kubectl explain`` has nothing to say.
"""

from treenail_lab.apiserver.errors import no_such_path
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.schema.kinds import Kind, Kinds

ROOT = "/openapi/v3"


def document(kinds: Kinds, path: str) -> Json:
    """The index, or what there is to say about one API version; raises 404 for anything else."""
    inner = path.removeprefix(ROOT).strip("/")
    by_root: dict[str, list[Kind]] = {}
    for kind in kinds:
        by_root.setdefault(_root(kind), []).append(kind)
    if not inner:
        return {"paths": {root: {"serverRelativeURL": f"{ROOT}/{root}"} for root in by_root}}
    if inner not in by_root:
        raise no_such_path()
    paths = {f"/{inner}/{_template(kind)}": {"patch": _patch(kind)} for kind in by_root[inner]}
    return {
        "openapi": "3.0.0",
        "info": {"title": "treenail lab", "version": "v1"},
        "paths": paths,
        "components": {"schemas": {}},
    }


def _root(kind: Kind) -> str:
    return f"apis/{kind.group}/{kind.version}" if kind.group else f"api/{kind.version}"


def _template(kind: Kind) -> str:
    namespace = "namespaces/{namespace}/" if kind.namespaced else ""
    return f"{namespace}{kind.plural}/{{name}}"


def _patch(kind: Kind) -> Json:
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
