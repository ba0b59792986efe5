"""Who may do what: RBAC from the stored roles and bindings, and the Node authorizer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from treenail_lab.apiserver.access import node_authorizer
from treenail_lab.apiserver.access.authentication import AUTHENTICATED, MASTERS, User
from treenail_lab.apiserver.errors import ApiError, forbidden
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.request import Ask
from treenail_lab.apiserver.schema.kinds import RBAC, Storage
from treenail_lab.apiserver.schema.selectors import exact_name, exact_value
from treenail_lab.apiserver.storage.store import Store

_CLUSTER_ROLES: Storage = (RBAC, "clusterroles")
_CLUSTER_BINDINGS: Storage = (RBAC, "clusterrolebindings")
_ROLES: Storage = (RBAC, "roles")
_BINDINGS: Storage = (RBAC, "rolebindings")

# What every cluster has: name of a role, the group it is bound to, its rules.
BOOTSTRAP_ROLES: tuple[tuple[str, str, list[Json]], ...] = (
    (
        "cluster-admin",
        MASTERS,
        [
            {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]},
            {"nonResourceURLs": ["*"], "verbs": ["*"]},
        ],
    ),
    (
        "system:discovery",
        AUTHENTICATED,
        [
            {
                "nonResourceURLs": ["/api", "/api/*", "/apis", "/apis/*", "/healthz", "/livez",
                                    "/openapi", "/openapi/*", "/readyz", "/version", "/version/"],
                "verbs": ["get"],
            }
        ],
    ),
)  # fmt: skip


def bootstrap_objects() -> Iterator[tuple[Storage, Json]]:
    """The roles and bindings every cluster begins with, without metadata of their own."""
    for name, group, rules in BOOTSTRAP_ROLES:
        yield _CLUSTER_ROLES, {"metadata": {"name": name}, "rules": rules}
        yield (
            _CLUSTER_BINDINGS,
            {
                "metadata": {"name": name},
                "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": name},
                "subjects": [{"apiGroup": RBAC, "kind": "Group", "name": group}],
            },
        )


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a user wants to do, in the terms that rules are written in."""

    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    path: str

    @classmethod
    def of(cls, ask: Ask) -> "Attempt":
        """A list of one name counts as being about that name, as a get does."""
        name = ask.name
        if ask.verb in {"list", "watch", "deletecollection"}:
            name = exact_name(ask.query.get("fieldSelector", ""))
        path = "" if ask.on_resource else ask.path
        return cls(ask.verb, ask.group, ask.resource, ask.namespace, name, path)


class Authorizer:
    """Decides by what is stored at the moment of the request."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def check(self, user: User, ask: Ask) -> None:
        """Raise 403 when a user may not make a request."""
        attempt = Attempt.of(ask)
        if self.allows(user, attempt):
            return
        why = ""
        if user.node and not attempt.path:
            node_name = exact_value(ask.query.get("fieldSelector", ""), "spec.nodeName")
            why = node_authorizer.refusal(self._store, user.node, attempt, node_name)
            if not why:
                return
        raise _refused(user, attempt, ask, why)

    def impersonated(self, user: User, name: str, groups: Sequence[str]) -> User:
        """The user that somebody wants to be taken for; raises 403 when he may not."""
        wanted = [("users", name), *(("groups", group) for group in groups)]
        for resource, who in wanted:
            attempt = Attempt("impersonate", "", resource, "", who, "")
            if not self.allows(user, attempt):
                why = f'User "{user.name}" cannot impersonate resource "{resource}" in API group ""'
                raise forbidden("", resource, who, f"{why} at the cluster scope")
        return User(name, (*groups, AUTHENTICATED))

    def allows(self, user: User, attempt: Attempt) -> bool:
        """Whether system:masters or RBAC allows it."""
        return user.master or any(
            _rule_allows(rule, attempt) for rule in self._rules(user, attempt.namespace)
        )

    def _rules(self, user: User, namespace: str) -> Iterator[Json]:
        for binding in self._store.list(_CLUSTER_BINDINGS):
            if _is_about(binding, user):
                yield from self._role_rules(binding, "")
        if namespace:
            for binding in self._store.list(_BINDINGS, namespace):
                if _is_about(binding, user):
                    yield from self._role_rules(binding, namespace)

    def _role_rules(self, binding: Json, namespace: str) -> list[Json]:
        reference = binding["roleRef"]
        if reference.get("kind") == "Role":
            role = self._store.get(_ROLES, (namespace, reference["name"]))
        else:
            role = self._store.get(_CLUSTER_ROLES, ("", reference["name"]))
        return (role or {}).get("rules") or []


def _is_about(binding: Json, user: User) -> bool:
    namespace = binding["metadata"].get("namespace", "")
    return any(_is_subject(subject, user, namespace) for subject in binding.get("subjects") or [])


def _is_subject(subject: Json, user: User, namespace: str) -> bool:
    match subject.get("kind"):
        case "User":
            return bool(user.name == subject.get("name"))
        case "Group":
            return subject.get("name") in user.groups
        case "ServiceAccount":
            place = subject.get("namespace") or namespace
            return user.name == f"system:serviceaccount:{place}:{subject.get('name')}"
        case _:
            return False


def _rule_allows(rule: Json, attempt: Attempt) -> bool:
    verbs = rule.get("verbs") or []
    if "*" not in verbs and attempt.verb not in verbs:
        return False
    if attempt.path:
        return any(_path_matches(url, attempt.path) for url in rule.get("nonResourceURLs") or [])
    groups = rule.get("apiGroups") or []
    if "*" not in groups and attempt.group not in groups:
        return False
    if not any(_resource_matches(name, attempt.resource) for name in rule.get("resources") or []):
        return False
    names = rule.get("resourceNames") or []
    return not names or attempt.name in names


def _path_matches(pattern: str, path: str) -> bool:
    if pattern.endswith("*"):
        return path.startswith(pattern.rstrip("*"))
    return pattern == path


def _resource_matches(pattern: str, resource: str) -> bool:
    if pattern in {"*", resource}:
        return True
    subresource = resource.partition("/")[2]
    return bool(subresource) and pattern == f"*/{subresource}"


def _refused(user: User, attempt: Attempt, ask: Ask, why: str) -> ApiError:
    if attempt.path:
        message = f'forbidden: User "{user.name}" cannot {attempt.verb} path "{attempt.path}"'
        return ApiError(403, "Forbidden", message)
    where = f'in the namespace "{ask.namespace}"' if ask.namespace else "at the cluster scope"
    message = (
        f'User "{user.name}" cannot {attempt.verb} resource "{attempt.resource}" '
        f'in API group "{attempt.group}" {where}'
    )
    return forbidden(ask.group, ask.plural, ask.name, f"{message}: {why}" if why else message)
