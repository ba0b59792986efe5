"""Attempts every verb on every kind that an API server serves, and what the manifests grant."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.contract.client import MERGE, Cluster, Json

ABSENT = "absent"
"""The name of the objects that are attempted: none has it."""
_COLLECTION_VERBS = ("list", "watch", "create", "deletecollection")
_METHODS = {"get": "GET", "update": "PUT", "patch": "PATCH", "delete": "DELETE"}
# Reviews answer questions about the requester; any authenticated user may send them.
_REVIEWS = ("authentication.k8s.io", "authorization.k8s.io")


class Cell(NamedTuple):
    """A verb on a resource (``PLURAL[/SUBRESOURCE][.GROUP]``), in a namespace or in the cluster.

    Without a name it is a verb on all objects.
    """

    resource: str
    verb: str
    namespace: str
    name: str = ""

    def __str__(self) -> str:
        place = f" in {self.namespace}" * bool(self.namespace)
        return f"{self.verb} {self.resource}{f' {self.name}' * bool(self.name)}{place}"


@dataclass(frozen=True, slots=True)
class ServedResource:
    """A resource of the API server's discovery."""

    group: str
    version: str
    name: str
    is_namespaced: bool
    verbs: tuple[str, ...]

    @property
    def full_name(self) -> str:
        return f"{self.name}.{self.group}" if self.group else self.name

    def build_path(self, namespace: str, *, is_collection: bool, name: str = "") -> str:
        plural, _, part = self.name.partition("/")
        base = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        where = f"/namespaces/{namespace}" if namespace else ""
        path = f"{base}{where}/{plural}"
        if not is_collection or part:
            path += f"/{name or ABSENT}"
        return f"{path}/{part}" if part else path


def discover_resources(cluster: Cluster) -> list[ServedResource]:
    """Return the resources of all groups, each in the preferred version."""
    versions = [("", "v1", "/api/v1")]
    for group in cluster.get("/apis").ok()["groups"]:
        version = group["preferredVersion"]["version"]
        if group["name"] not in _REVIEWS:
            versions.append((group["name"], version, f"/apis/{group['name']}/{version}"))
    return [
        ServedResource(group, version, each["name"], each["namespaced"], tuple(each["verbs"]))
        for group, version, path in versions
        for each in cluster.get(path).ok()["resources"]
    ]


def find_allowed_cells(
    client: Cluster, resources: Iterable[ServedResource], namespaces: Sequence[str]
) -> set[Cell]:
    """Return the cells that the API server allows this user; writes are dry runs."""
    return {
        cell
        for resource in resources
        for cell in list_cells(resource, namespaces)
        if _is_allowed(client, resource, cell)
    }


def describe_cells(
    cells: Iterable[Cell], namespaces: Sequence[str], own_namespace: str
) -> dict[str, str]:
    """Return the verbs by objects: a resource, a name, and a namespace unless it is any."""
    places: dict[tuple[str, str, str], set[str]] = {}
    for cell in cells:
        places.setdefault((cell.resource, cell.name, cell.verb), set()).add(cell.namespace)
    verbs: dict[str, list[str]] = {}
    for (resource, name, verb), found in sorted(places.items()):
        where = found - {""} if found != {"", *namespaces} - {""} else set()
        shown = " and ".join(
            "its namespace" if place == own_namespace else place for place in sorted(where)
        )
        text = f"{resource}{f' {name}' * bool(name)}{f' in {shown}' * bool(shown)}"
        verbs.setdefault(text, []).append(verb)
    return {text: " ".join(found) for text, found in verbs.items()}


def list_cells(resource: ServedResource, namespaces: Sequence[str]) -> Iterator[Cell]:
    places = namespaces if resource.is_namespaced else ("",)
    for verb in resource.verbs:
        for namespace in places:
            yield Cell(resource.full_name, verb, namespace)


def _is_allowed(client: Cluster, resource: ServedResource, cell: Cell) -> bool:
    is_collection = cell.verb in _COLLECTION_VERBS
    path = resource.build_path(cell.namespace, is_collection=is_collection, name=cell.name)
    # RBAC grants a list of one object to requests with this selector only.
    selector = {"fieldSelector": f"metadata.name={cell.name}"} if cell.name else {}
    if cell.verb == "watch":
        return _may_watch(client, path, selector)
    match cell.verb:
        case "list":
            answer = client.get(path, limit=1, **selector)
        case "create":
            answer = client.post(path, {}, dryRun="All")
        case "deletecollection":
            answer = client.delete(path, dryRun="All", labelSelector="no=object")
        case "patch":
            answer = client.patch(path, {}, MERGE, dryRun="All")
        case "get":
            answer = client.get(path)
        case _:
            body = None if cell.verb == "delete" else {}
            answer = client.request(_METHODS[cell.verb], path, body, dryRun="All")
    return answer.code not in {401, 403}


def _may_watch(client: Cluster, path: str, selector: dict[str, str]) -> bool:
    try:
        with client.watch(path, timeoutSeconds=1, labelSelector="no=object", **selector):
            return True
    except AssertionError:
        return False


def find_granted_cells(
    documents: Sequence[Json],
    subject: tuple[str, str],
    resources: Iterable[ServedResource],
    namespaces: Sequence[str],
) -> set[Cell]:
    """Return the cells that roles of the documents grant the subject, a kind and a name.

    Rules for objects of certain names grant no cell, but creations, which have no name.
    """
    rules = _list_rules(documents, subject)
    return {
        cell
        for resource in resources
        for cell in list_cells(resource, namespaces)
        if any(_grants(rule, resource, cell, where) for where, rule in rules)
    }


def find_named_cells(
    client: Cluster,
    documents: Sequence[Json],
    subject: tuple[str, str],
    resources: Iterable[ServedResource],
    namespaces: Sequence[str],
) -> tuple[set[Cell], set[Cell]]:
    """Return the cells of objects of certain names: those granted, and of these those allowed."""
    granted: dict[Cell, ServedResource] = {}
    for where, rule in _list_rules(documents, subject):
        unnamed = {**rule, "resourceNames": []}
        for resource in resources:
            for cell in list_cells(resource, namespaces):
                if _grants(unnamed, resource, cell, where):
                    named = {cell._replace(name=name) for name in rule.get("resourceNames", ())}
                    granted |= dict.fromkeys(named, resource)
    return {*granted}, {
        cell for cell, resource in granted.items() if _is_allowed(client, resource, cell)
    }


def _list_rules(documents: Sequence[Json], subject: tuple[str, str]) -> list[tuple[str, Json]]:
    """Return the rules of a subject, each with its namespace."""
    roles = {
        (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]): each
        for each in documents
        if each["kind"] in ("Role", "ClusterRole")
    }
    rules: list[tuple[str, Json]] = []
    for binding in documents:
        if binding["kind"] not in ("RoleBinding", "ClusterRoleBinding"):
            continue
        if subject not in [(each["kind"], each["name"]) for each in binding["subjects"]]:
            continue
        where = binding["metadata"].get("namespace", "")
        named = binding["roleRef"]
        role_where = where if named["kind"] == "Role" else ""
        role = roles[named["kind"], role_where, named["name"]]
        rules += [(where, rule) for rule in role["rules"]]
    return rules


def _grants(rule: Json, resource: ServedResource, cell: Cell, where: str) -> bool:
    return (
        where in ("", cell.namespace)
        and not rule.get("resourceNames")
        and resource.group in rule["apiGroups"]
        and resource.name in rule["resources"]
        and cell.verb in rule["verbs"]
    )
