"""Discovery and OpenAPI v3 documents, which kubectl and generic clients request first.

Of OpenAPI there is only what kubectl needs: it checks whether the PATCH of a kind takes
``fieldValidation``, and then leaves validation to the server. There are no schemas.
"""

from treenail_lab.apiserver.errors import path_not_found_error
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.schema.kinds import ALL_VERBS, KindRegistry, ResourceKind

# The version that the lab follows where versions differ.
VERSION: Json = {
    "major": "1",
    "minor": "37",
    "gitVersion": "v1.37.2+treenail-lab",
    "gitCommit": "",
    "gitTreeState": "",
    "buildDate": "1970-01-01T00:00:00Z",
    "goVersion": "",
    "compiler": "",
    "platform": "linux/amd64",
}
_SUBRESOURCE_KINDS = {
    "log": ("", "v1", "Pod", ["get"]),
    "eviction": ("policy", "v1", "Eviction", ["create"]),
    "token": ("authentication.k8s.io", "v1", "TokenRequest", ["create"]),
}


def build_document(kinds: KindRegistry, path: str) -> Json:
    """Return the discovery document at a path; raise 404 for other paths."""
    match [part for part in path.split("/") if part]:
        case []:
            # Cluster API asks for it to see whether a server is there.
            return {"paths": ["/api", "/apis", "/version"]}
        case ["version"]:
            return VERSION
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        case ["apis"]:
            names = sorted({kind.group for kind in kinds if kind.group})
            groups = [_build_group(kinds, name) for name in names]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        case ["apis", group]:
            return {"kind": "APIGroup", "apiVersion": "v1"} | _build_group(kinds, group)
        case ["api", version]:
            return _build_resources(kinds, "", version)
        case ["apis", group, version]:
            return _build_resources(kinds, group, version)
        case _:
            raise path_not_found_error()


def _build_group(kinds: KindRegistry, group: str) -> Json:
    versions = list(dict.fromkeys(kind.version for kind in kinds if kind.group == group))
    if not group or not versions:
        raise path_not_found_error()
    entries = [{"groupVersion": f"{group}/{version}", "version": version} for version in versions]
    return {"name": group, "versions": entries, "preferredVersion": entries[0]}


def _build_resources(kinds: KindRegistry, group: str, version: str) -> Json:
    served = [kind for kind in kinds if (kind.group, kind.version) == (group, version)]
    if not served:
        raise path_not_found_error()
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": served[0].api_version,
        "resources": [entry for kind in served for entry in _build_entries(kind)],
    }


def _build_entries(kind: ResourceKind) -> list[Json]:
    entry: Json = {
        "name": kind.plural,
        "singularName": kind.singular,
        "namespaced": kind.is_namespaced,
        "kind": kind.kind,
        "verbs": list(ALL_VERBS),
    }
    if kind.short_names:
        entry["shortNames"] = list(kind.short_names)
    entries = [entry]
    for name in sorted(kind.subresources):
        sub: Json = {
            "name": f"{kind.plural}/{name}",
            "singularName": "",
            "namespaced": kind.is_namespaced,
            "kind": kind.kind,
            "verbs": ["get", "patch", "update"],
        }
        if name in _SUBRESOURCE_KINDS:
            group, version, kind_name, verbs = _SUBRESOURCE_KINDS[name]
            sub |= {"group": group, "version": version, "kind": kind_name, "verbs": verbs}
        entries.append(sub)
    return entries


OPENAPI_ROOT = "/openapi/v3"


def build_openapi(kinds: KindRegistry, path: str) -> Json:
    """Return the OpenAPI index or the document of an API version; raise 404 for other paths."""
    inner = path.removeprefix(OPENAPI_ROOT).strip("/")
    by_root: dict[str, list[ResourceKind]] = {}
    for kind in kinds:
        by_root.setdefault(_build_root(kind), []).append(kind)
    if not inner:
        return {
            "paths": {root: {"serverRelativeURL": f"{OPENAPI_ROOT}/{root}"} for root in by_root}
        }
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
