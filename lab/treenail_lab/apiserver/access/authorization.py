"""Authorization: RBAC from the stored roles and bindings, and the Node authorizer."""

from collections.abc import Iterator, Sequence

from treenail_lab.apiserver.access import node_authorizer
from treenail_lab.apiserver.access.authentication import AUTHENTICATED, MASTERS, ApiUser
from treenail_lab.apiserver.access.node_authorizer import AccessAttempt
from treenail_lab.apiserver.errors import ApiError, forbidden_error
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.request import ServerRequest
from treenail_lab.apiserver.schema.kinds import RBAC, StorageKey
from treenail_lab.apiserver.schema.selectors import find_exact_value
from treenail_lab.apiserver.store import Store

_CERTIFICATES = "certificates.k8s.io"
_CLUSTER_ROLES: StorageKey = (RBAC, "clusterroles")
_CLUSTER_BINDINGS: StorageKey = (RBAC, "clusterrolebindings")
_ROLES: StorageKey = (RBAC, "roles")
_BINDINGS: StorageKey = (RBAC, "rolebindings")

# The roles of every cluster: name, the group that it is bound to (empty for none), rules.
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
    (
        "system:node-bootstrapper",
        "",
        [
            {
                "apiGroups": ["certificates.k8s.io"],
                "resources": ["certificatesigningrequests"],
                "verbs": ["create", "get", "list", "watch"],
            }
        ],
    ),
)  # fmt: skip


def build_bootstrap_objects() -> Iterator[tuple[StorageKey, Json]]:
    """Yield the roles and bindings of a new cluster."""
    for name, group, rules in BOOTSTRAP_ROLES:
        yield _CLUSTER_ROLES, {"metadata": {"name": name}, "rules": rules}
        if not group:
            continue
        yield (
            _CLUSTER_BINDINGS,
            {
                "metadata": {"name": name},
                "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": name},
                "subjects": [{"apiGroup": RBAC, "kind": "Group", "name": group}],
            },
        )


class Authorizer:
    """Decides by the roles and bindings that are stored at the time of the request."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def check_access(self, user: ApiUser, request: ServerRequest) -> None:
        """Raise 403 for a request that the user is not allowed to make."""
        attempt = AccessAttempt.from_request(request)
        if self.is_allowed(user, attempt):
            return
        why = ""
        if user.node_name and not attempt.path:
            node_name = find_exact_value(request.query.get("fieldSelector", ""), "spec.nodeName")
            why = node_authorizer.find_refusal(self._store, user.node_name, attempt, node_name)
            if not why:
                return
        raise _build_refusal(user, attempt, request, why)

    def check_approval(self, user: ApiUser, request: Json) -> None:
        """Raise 403 unless the user may approve requests for this signer (CertificateApproval)."""
        signer = request["spec"]["signerName"]
        names = (signer, f"{signer.partition('/')[0]}/*")
        for name in names:
            attempt = AccessAttempt("approve", _CERTIFICATES, "signers", "", name, "")
            if self.is_allowed(user, attempt):
                return
        why = f'user not permitted to approve requests with signerName "{signer}"'
        raise forbidden_error(
            _CERTIFICATES, "certificatesigningrequests", request["metadata"]["name"], why
        )

    def resolve_impersonation(self, user: ApiUser, name: str, groups: Sequence[str]) -> ApiUser:
        """Return the impersonated user; raise 403 when the user may not impersonate it."""
        subjects = [("users", name), *(("groups", group) for group in groups)]
        for resource, subject in subjects:
            attempt = AccessAttempt("impersonate", "", resource, "", subject, "")
            if not self.is_allowed(user, attempt):
                why = f'User "{user.name}" cannot impersonate resource "{resource}" in API group ""'
                raise forbidden_error("", resource, subject, f"{why} at the cluster scope")
        return ApiUser(name, (*groups, AUTHENTICATED))

    def is_allowed(self, user: ApiUser, attempt: AccessAttempt) -> bool:
        """Return whether system:masters or RBAC allows the attempt."""
        return user.is_master or any(
            _is_allowed_by(rule, attempt) for rule in self._find_rules(user, attempt.namespace)
        )

    def _find_rules(self, user: ApiUser, namespace: str) -> Iterator[Json]:
        for binding in self._store.list_objects(_CLUSTER_BINDINGS):
            if _is_bound_to(binding, user):
                yield from self._find_role_rules(binding, "")
        if namespace:
            for binding in self._store.list_objects(_BINDINGS, namespace):
                if _is_bound_to(binding, user):
                    yield from self._find_role_rules(binding, namespace)

    def _find_role_rules(self, binding: Json, namespace: str) -> list[Json]:
        reference = binding["roleRef"]
        if reference.get("kind") == "Role":
            role = self._store.find_object(_ROLES, (namespace, reference["name"]))
        else:
            role = self._store.find_object(_CLUSTER_ROLES, ("", reference["name"]))
        return (role or {}).get("rules") or []


def _is_bound_to(binding: Json, user: ApiUser) -> bool:
    namespace = binding["metadata"].get("namespace", "")
    return any(_is_subject(subject, user, namespace) for subject in binding.get("subjects") or [])


def _is_subject(subject: Json, user: ApiUser, namespace: str) -> bool:
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


def _is_allowed_by(rule: Json, attempt: AccessAttempt) -> bool:
    verbs = rule.get("verbs") or []
    if "*" not in verbs and attempt.verb not in verbs:
        return False
    if attempt.path:
        return any(_is_path_match(url, attempt.path) for url in rule.get("nonResourceURLs") or [])
    groups = rule.get("apiGroups") or []
    if "*" not in groups and attempt.group not in groups:
        return False
    if not any(_is_resource_match(name, attempt.resource) for name in rule.get("resources") or []):
        return False
    names = rule.get("resourceNames") or []
    return not names or attempt.name in names


def _is_path_match(pattern: str, path: str) -> bool:
    if pattern.endswith("*"):
        return path.startswith(pattern.rstrip("*"))
    return pattern == path


def _is_resource_match(pattern: str, resource: str) -> bool:
    if pattern in {"*", resource}:
        return True
    subresource = resource.partition("/")[2]
    return bool(subresource) and pattern == f"*/{subresource}"


def _build_refusal(
    user: ApiUser, attempt: AccessAttempt, request: ServerRequest, why: str
) -> ApiError:
    if attempt.path:
        message = f'forbidden: User "{user.name}" cannot {attempt.verb} path "{attempt.path}"'
        return ApiError(403, "Forbidden", message)
    where = (
        f'in the namespace "{request.namespace}"' if request.namespace else "at the cluster scope"
    )
    message = (
        f'User "{user.name}" cannot {attempt.verb} resource "{attempt.resource}" '
        f'in API group "{attempt.group}" {where}'
    )
    return forbidden_error(
        request.group, request.plural, request.name, f"{message}: {why}" if why else message
    )
